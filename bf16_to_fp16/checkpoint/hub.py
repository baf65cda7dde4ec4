"""Requests to the Hub: tried again where that helps; errors become one line with a remedy, without the token."""

from __future__ import annotations

import contextlib
import errno
import json
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ..errors import UserError

T = TypeVar("T")
WAITS = (1.0, 2.0, 4.0, 8.0)  # seconds before each further try, where the server names none
LONGEST_WAIT = 600  # seconds that a server may ask to wait; beyond that the run ends and says so
LONGEST_MESSAGE = 200  # characters of what a server says that are shown
PASSING = (408, 429, 500, 502, 503, 504)  # statuses that may be gone a moment later

# The client's exceptions by name, since its versions have several HTTP libraries.
CUT = {"ReadError", "WriteError", "RemoteProtocolError", "ReadTimeout", "WriteTimeout", "ChunkedEncodingError"}
UNREACHABLE = {
    *("ConnectError", "ConnectTimeout", "ProxyError", "PoolTimeout", "ConnectionError", "Timeout"),
    "LocalEntryNotFoundError",
}
LOG_IN = "log in with `hf auth login`, or put a token into HF_TOKEN"


def with_retries(work: Callable[[], T], *, cut: bool = True) -> T:
    """Return what ``work`` returns, tried again where the server is busy or fails, and (``cut``) where the connection
    breaks. ``Retry-After`` names the wait."""
    for wait in (*WAITS, None):
        try:
            return work()
        except Exception as error:
            status, asked = status_of(error), asked_to_wait(error)
            passing = status in PASSING if status else cut and bool(CUT & kinds(error))
            if wait is None or not passing or (asked or 0) > LONGEST_WAIT:
                raise
        time.sleep(wait if asked is None else asked)
    raise AssertionError("unreachable")


def asked_to_wait(error: BaseException) -> float | None:
    value = str(getattr(response_of(error), "headers", {}).get("Retry-After") or "").strip()
    return float(value) if value.isdigit() else None


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that led to it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def kinds(error: BaseException) -> set[str]:
    """Return the names of the classes of an exception and of those that led to it."""
    return {kind.__name__ for each in chain(error) for kind in type(each).__mro__}


def response_of(error: BaseException) -> Any:
    return next((r for e in chain(error) if (r := getattr(e, "response", None)) is not None), None)


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an exception, or one that led to it, carries."""
    status = getattr(response_of(error), "status_code", None)
    return status if isinstance(status, int) else None


@contextlib.contextmanager
def explained(repo: str, *, endpoint: str | None = None, revision: str | None = None, token: str | None = None,
              writing: bool = False) -> Iterator[None]:  # fmt: skip
    """Turn the client's exceptions into a UserError of one line, which does not show the token."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        from huggingface_hub.errors import HfHubHTTPError

        # The client's transfers of large files raise RuntimeError and ValueError.
        known = HfHubHTTPError.__mro__[1], OSError, RuntimeError, ValueError
        if not isinstance(error, known) and not is_nonsense(error):
            raise
        message = explain(error, repo, endpoint, revision, token, writing=writing)
        raise UserError(message) from None  # the client's exception holds the token in its request's headers


def is_nonsense(error: BaseException) -> bool:
    """Return whether the client could not read an answer: no JSON, or not what a Hub's holds."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    ours = str(frame.f_globals["__name__"]).startswith(__name__.partition(".")[0])
    parsed = isinstance(error, LookupError | TypeError | AttributeError | ValueError) and not isinstance(error, OSError)
    return (parsed and not ours) or isinstance(error, json.JSONDecodeError | UnicodeDecodeError)


def explain(
    error: BaseException, repo: str, endpoint: str | None, revision: str | None, token: str | None, *, writing: bool
) -> str:
    """Return what went wrong and how to mend it, in one line."""
    from huggingface_hub import constants

    def line(text: object) -> str:
        shown = " ".join(str(text).split())
        shown = shown.replace(token, "…") if token else shown
        return shown if len(shown) <= LONGEST_MESSAGE else f"{shown[:LONGEST_MESSAGE]}…"

    names, status, wait = kinds(error), status_of(error), asked_to_wait(error)
    said = next((m for e in chain(error) if (m := getattr(e, "server_message", None))), "")
    card = next((str(e) for e in chain(error) if "metadata in README.md" in str(e)), "")
    full = any(isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT) for e in chain(error))
    host = (endpoint or constants.ENDPOINT).removeprefix("https://").rstrip("/")
    asked, reason = f"{repo}@{revision}" if revision else repo, f" ({line(said)})" if said else ""
    first = line(next(iter(str(error).strip().splitlines()), type(error).__name__))
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
        (status in (402, 413, 507), f"{host} has no more room for {repo}{reason}; free some storage there"),
        (status in (409, 412), f"{repo} was changed by someone else meanwhile{reason}; look at it, and {again}"),
        (
            status == 429,
            f"{host} asks for fewer requests (429); {again} in {f'{wait:g} s' if wait else 'some minutes'}",
        ),
        ((status or 0) >= 500, f"{host} fails ({status}) however often it is asked{reason}; {again} later"),
        (status, f"{host} answered {status}{reason}; check the name and the options, or {again} later"),
        (UNREACHABLE & names, f"{local}the Hub cannot be reached; check the name and the network, or HF_ENDPOINT"),
        (
            error.__traceback__ and is_nonsense(error),
            f"{host} does not answer as a Hub does ({first}); check HF_ENDPOINT, proxies and logins",
        ),
        (CUT & names, f"the connection to {host} broke; {again}, and it goes on where it stopped"),
        (True, f"{repo}: failed ({first}); check the network and free space, then {again}"),
    )
    return next(words for condition, words in failures if condition)


def reading_from(repo: str, revision: str | None, work: Callable[[], T], endpoint: str | None = None) -> T:
    """Return what ``work`` fetches from the Hub; raise UserError where it cannot."""
    from huggingface_hub import get_token

    with explained(repo, endpoint=endpoint, revision=revision, token=get_token()):
        return with_retries(work)


def check_name(repo: str) -> None:
    """Raise UserError for what cannot be the name of a repository."""
    from huggingface_hub.utils import validate_repo_id

    with explained(repo):
        validate_repo_id(repo)


def token_of(token: str | None, endpoint: str | None) -> str:
    """Return the token that is given, or that of the environment or the log-in; raise UserError without any."""
    from huggingface_hub import constants, get_token

    known = token or get_token()
    if not known:
        raise UserError(f"not logged in to {(endpoint or constants.ENDPOINT).removeprefix('https://')}; {LOG_IN}")
    return known
