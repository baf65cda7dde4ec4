"""Send requests to the Hugging Face Hub, and repeat them while it is busy. Errors of the Hub's client become one line
with a remedy, which never shows the token. This module imports no torch."""

from __future__ import annotations

import contextlib
import errno
import json
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..errors import UserError, shortened
from ..quiet import quiet_downloads
from .contents import SINGLE_OR_SHARDED
from .files import read_json

T = TypeVar("T")

# The client's exceptions by name, since its versions use different HTTP libraries.
CUT = {"ReadError", "WriteError", "RemoteProtocolError", "ReadTimeout", "WriteTimeout", "ChunkedEncodingError"}
UNREACHABLE = {
    *("ConnectError", "ConnectTimeout", "ProxyError", "PoolTimeout", "ConnectionError", "Timeout"),
    "LocalEntryNotFoundError",
}
WAITS = (1.0, 4.0, 16.0)  # seconds before each retry
PASSING = (408, 429, 500, 502, 503, 504)  # HTTP statuses worth a retry
LOG_IN = "log in with `hf auth login`, or put a token into HF_TOKEN"


def with_retries(work: Callable[[], T]) -> T:
    for wait in WAITS:
        try:
            return work()
        except Exception as error:
            if status_of(error) not in PASSING:
                raise
        time.sleep(wait)
    return work()


def chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def status_of(error: BaseException) -> int | None:
    statuses = (getattr(getattr(each, "response", None), "status_code", None) for each in chain(error))
    return next((status for status in statuses if isinstance(status, int)), None)


@contextlib.contextmanager
def explained(repo: str, *, endpoint: str | None = None, revision: str | None = None, token: str | None = None,
              writing: bool = False) -> Iterator[None]:  # fmt: skip
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals["__name__"]).startswith(__name__.partition(".")[0]):
            raise  # raised in this package; the client may raise any exception, since an answer may be nonsense
        message = explain(error, repo, endpoint, revision, token, writing=writing)
        raise UserError(message) from None  # the client's exception holds the token in its request's headers


def explain(
    error: BaseException, repo: str, endpoint: str | None, revision: str | None, token: str | None, *, writing: bool
) -> str:
    from huggingface_hub import constants

    def line(text: object) -> str:
        shown = " ".join(str(text).split())
        return shortened(shown.replace(token, "…") if token else shown)

    names, status = {kind.__name__ for each in chain(error) for kind in type(each).__mro__}, status_of(error)
    message = next((m for e in chain(error) if (m := getattr(e, "server_message", None))), "")
    card = next((str(e) for e in chain(error) if "metadata in README.md" in str(e)), "")
    full = any(isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT) for e in chain(error))
    host = (endpoint or constants.ENDPOINT).partition("://")[2].rpartition("@")[2].rstrip("/")
    here = next((e.filename for e in chain(error) if isinstance(e, OSError) and e.filename), None)
    asked, reason = f"{repo}@{revision}" if revision else repo, f" ({line(message)})" if message else ""
    access, again = ("write to" if writing else "read"), "run the same command again"
    local = "" if writing else f"{asked} is not a folder here, and "
    missing = f"{asked} is neither a folder here nor a repository on the Hub that you may read"
    failures: tuple[tuple[object, str], ...] = (
        ("HFValidationError" in names, f"{repo!r} is not a name for a repository; use namespace/name"),
        (card, f"the Hub refuses README.md: {line(card.partition(chr(10))[2]).removeprefix('- ')}; mend its metadata"),
        (full, f"the disk is full; free some space, or set HF_HOME to a folder on another disk, and {again}"),
        (
            "OfflineModeIsEnabled" in names,
            f"{asked}: HF_HUB_OFFLINE forbids asking the Hub; check the name or unset it",
        ),
        ("GatedRepoError" in names, f"{repo} is gated; accept its terms on its page and log in with `hf auth login`"),
        ("RevisionNotFoundError" in names, f"{repo} has no revision {revision!r}; name a branch, a tag or a commit"),
        ("RepositoryNotFoundError" in names or status == 404, f"{missing}; check the name, or {LOG_IN}"),
        (status == 401, f"{host} does not accept the token{reason}; {LOG_IN}"),
        (status == 403, f"no permission to {access} {repo} with this token{reason}; use another token or --create-pr"),
        (status in (409, 412), f"{repo} was changed by someone else meanwhile{reason}; look at it, and {again}"),
        (status in (402, 413, 507), f"{host} has no more room for {repo}{reason}; free some storage there"),
        (status, f"{host} answers {status}{reason}; {again} later, or check the name and the options"),
        (UNREACHABLE & names, f"{local}the Hub cannot be reached; check the name and the network, or HF_ENDPOINT"),
        (CUT & names, f"the connection to {host} broke; {again}, and it goes on where it stopped"),
        (here, f"{here}: cannot be read or written here; mend that, and {again}"),
        (
            True,
            f"{repo}: {host} did not answer as a Hub does ({line(error)}); check the network, HF_ENDPOINT and logins",
        ),
    )
    return next(words for condition, words in failures if condition)


def reading_from(repo: str, revision: str | None, work: Callable[[], T], endpoint: str | None = None) -> T:
    from huggingface_hub import get_token

    with explained(repo, endpoint=endpoint, revision=revision, token=get_token()):
        return with_retries(work)


def check_name(repo: str) -> None:
    from huggingface_hub.utils import validate_repo_id

    with explained(repo):
        validate_repo_id(repo)


# Patterns of a repository's files other than weights.
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "README.md")


def download(source: str, subfolder: str | None, endpoint: str | None = None) -> tuple[Path, str]:
    """Fetch a repository's small files and the weights that transformers would load; return the local folder and its
    commit. source: a Hub id ``org/name[@revision]``. subfolder: the model's folder in the repository."""
    inside, (folder, commit) = f"{subfolder}/" if subfolder else "", fetched(source, SMALL_FILES, endpoint)
    modules = [f"{name}/*" for name in module_folders(folder)]
    for name in SINGLE_OR_SHARDED:
        names = [inside + name]
        if name.endswith(".index.json"):
            index = folder / inside / name
            if not index.exists():
                continue
            placed = read_json(index, "index").get("weight_map")
            names = [inside + str(shard) for shard in set(placed.values())] if isinstance(placed, dict) else names
        folder, _ = fetched(source, (*SMALL_FILES, *modules, *names), endpoint, commit)
        if (folder / names[0]).exists():
            break
    return folder, commit


def fetched(
    source: str, patterns: Sequence[str], endpoint: str | None = None, commit: str | None = None
) -> tuple[Path, str]:
    """Fetch the files of a repository that match the glob ``patterns``; return the local snapshot folder and its
    commit. source: a Hub id ``org/name[@revision]``. commit: replaces the revision, if given."""
    from huggingface_hub import snapshot_download

    repo, _, revision = source.partition("@")
    at = commit or revision or None
    fetch = partial(snapshot_download, repo, revision=at, allow_patterns=[*patterns], endpoint=endpoint)
    with quiet_downloads():
        folder = Path(reading_from(repo, at, fetch, endpoint))
    return folder, folder.name


def hub_files(source: str, folder: Path) -> list[str]:
    """Return the names of a repository's files; under HF_HUB_OFFLINE, only those in ``folder``, its local snapshot."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    repo = source.partition("@")[0]
    return reading_from(repo, folder.name, lambda: HfApi().list_repo_files(repo, revision=folder.name))


def module_folders(folder: Path) -> list[str]:
    try:
        listing = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        return [str(module["path"]) for module in listing if module["path"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
