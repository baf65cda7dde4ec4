"""Requests to the Hub: tried again where that helps, and one line with a remedy where it does not.

The client's dozens of kinds of exceptions become ``UserError``. What a server says is shown with the token cut out, and
the exception that carried the request, whose headers hold the token, is not kept.
"""

from __future__ import annotations

import contextlib
import errno
import json
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ..errors import UserError
from ..progress import Progress

T = TypeVar("T")
WAITS = (1.0, 2.0, 4.0, 8.0)  # seconds before each further try, where the server names none
LONGEST_WAIT = 600  # seconds that a server may ask to wait; beyond that the run ends and says so
LONGEST_MESSAGE = 200  # characters of what a server says that are shown
PASSING = (408, 429, 500, 502, 503, 504)  # Statuses that may be gone a moment later

CUT = ("ReadError", "WriteError", "RemoteProtocolError", "ReadTimeout", "WriteTimeout", "ChunkedEncodingError")
"""The client's exceptions for a connection that broke."""

UNREACHABLE = ("ConnectError", "ConnectTimeout", "ProxyError", "PoolTimeout", "ConnectionError", "Timeout")
"""The client's exceptions for a server that does not answer."""

LOG_IN = "log in with `hf auth login`, or put a token into HF_TOKEN"


def with_retries(work: Callable[[], T], progress: Progress | None = None, *, cut: bool = True) -> T:
    """Return what ``work`` does, tried again, after as long as ``Retry-After`` says, where the server is busy, fails or
    (``cut``) breaks the connection; the last exception is raised as it is."""
    for wait in (*WAITS, None):
        try:
            return work()
        except Exception as error:
            pause = None if wait is None else seconds_to_wait(error, wait, cut=cut)
            if pause is None:
                raise
            status = status_of(error)
            what = f"the Hub answered {status}" if status else "the connection broke"
            (progress or Progress(quiet=True)).say(f"{what}; trying again in {pause:g} s")
        time.sleep(pause)
    raise AssertionError("unreachable")


def seconds_to_wait(error: BaseException, wait: float, *, cut: bool = True) -> float | None:
    """Return the seconds after which to try again, None where that is of no use."""
    status = status_of(error)
    if status is None:
        return wait if cut and kind_in(error, CUT) else None
    if status not in PASSING:
        return None
    asked = asked_to_wait(error)
    if asked is None:
        return wait
    return asked if asked <= LONGEST_WAIT else None


def asked_to_wait(error: BaseException) -> float | None:
    """Return the seconds that a response's ``Retry-After`` asks for, None without one."""
    headers = getattr(response_of(error), "headers", {})
    value = str(headers.get("Retry-After") or "").strip()
    return float(value) if value.isdigit() else None


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that led to it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def response_of(error: BaseException) -> Any:
    """Return the response that an exception, or one that led to it, carries."""
    return next((r for e in chain(error) if (r := getattr(e, "response", None)) is not None), None)


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an exception, or one that led to it, carries."""
    status = getattr(response_of(error), "status_code", None)
    return status if isinstance(status, int) else None


def kind_in(error: BaseException, names: tuple[str, ...]) -> bool:
    """Return whether an exception, or one that led to it, is of a kind with one of these names."""
    return any(kind.__name__ in names for e in chain(error) for kind in type(e).__mro__)


def no_space(error: BaseException) -> bool:
    """Return whether the disk is full."""
    return any(isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT) for e in chain(error))


def redacted(text: object, token: str | None) -> str:
    """Return text in one line, with the token cut out."""
    line = " ".join(str(text).split())
    return line.replace(token, "…") if token else line


def server_message(error: BaseException, token: str | None) -> str:
    """Return what the server said, in one line with the token cut out; empty where it said nothing."""
    said = next((m for e in chain(error) if (m := getattr(e, "server_message", None))), "")
    line = redacted(said, token)
    return line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE]}…"


@contextlib.contextmanager
def explained(repo: str, *, endpoint: str | None = None, revision: str | None = None, token: str | None = None,
              writing: bool = False) -> Iterator[None]:  # fmt: skip
    """Turn the client's exceptions, which are dropped, into a UserError of one line with a remedy. writing: whether
    something is uploaded. token: what must not be shown."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        from huggingface_hub.errors import HfHubHTTPError

        # The client's transfers of large files raise RuntimeError and ValueError.
        kinds = (HfHubHTTPError.__mro__[1], OSError, RuntimeError, ValueError)
        if not isinstance(error, kinds) and not is_nonsense(error):
            raise
        message = explain(error, repo, endpoint, revision, token, writing=writing)
        # Its request has headers, and they have the token.
        raise UserError(message) from None


def is_nonsense(error: BaseException) -> bool:
    """Return whether the client could make nothing of an answer: no JSON, or not what a Hub's holds."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    ours = str(frame.f_globals["__name__"]).startswith(__name__.partition(".")[0])
    parsed = isinstance(error, LookupError | TypeError | AttributeError | ValueError) and not isinstance(error, OSError)
    return (parsed and not ours) or isinstance(error, json.JSONDecodeError | UnicodeDecodeError)


def refused_card(error: BaseException) -> str:
    """Return what the client says of a README.md whose front matter the Hub refuses, empty where it does not."""
    return next((str(e) for e in chain(error) if "metadata in README.md" in str(e)), "")


Condition = Callable[[BaseException], bool]


def raised(*names: str) -> Condition:
    """Return the condition that an exception, or one that led to it, is of a kind with one of these names."""
    return lambda error: kind_in(error, names)


def answered(*known: int) -> Condition:
    """Return the condition that the server answered with one of these statuses."""
    return lambda error: status_of(error) in known


NOT_THERE = (
    "{asked} is neither a folder here nor a repository on the Hub that you may read;"
    " check the name, or log in with `hf auth login`"
)

NOT_SEEN = "{repo} is not a repository on {host} that this token may see; check the name and the token's permissions"
NOT_REACHED = "{asked} is not a folder here, and the Hub cannot be reached; check the name and the network"
NO_REVISION = "{repo} has no revision {revision!r}; name a branch, a tag or a commit"

FAILURES: tuple[tuple[Condition, *tuple[str | None, ...]], ...] = (
    (raised("LocalTokenNotFoundError"), "not logged in to {host}; {log_in}"),
    (
        raised("HFValidationError"),
        "{repo!r} is neither a folder here nor a Hub id; check the name",
        "{repo!r} is not a name for a repository; use namespace/name with letters, digits, - _ and .",
    ),
    (lambda error: bool(refused_card(error)), None, "the Hub refuses README.md: {refusal}; mend its front matter"),
    (no_space, "the disk is full; free some space, or set HF_HOME to a folder on another disk, and {again}"),
    (
        raised("OfflineModeIsEnabled"),
        "{asked} is not a folder here, and HF_HUB_OFFLINE forbids asking the Hub; check the name, or unset it",
        "{repo}: HF_HUB_OFFLINE forbids the network; unset it",
    ),
    (raised("GatedRepoError"), "{repo} is gated; accept its terms on its page and log in with `hf auth login`"),
    (
        raised("RevisionNotFoundError"),
        NO_REVISION,
        NO_REVISION + ", or make it: `hf repos branch create {repo} {revision}`",
    ),
    # Without a token that may read, the Hub answers 401 for what does not exist, too.
    (raised("RepositoryNotFoundError"), NOT_THERE, None),
    (answered(401), "{host} does not accept the token{reason}; {log_in}"),
    (raised("RepositoryNotFoundError"), None, NOT_SEEN),
    (answered(404), NOT_THERE, NOT_SEEN),
    (answered(402, 413, 507), "{host} has no more room for {repo}{reason}; free some storage there"),
    (
        answered(403),
        "no permission to read {repo} with this token{reason}; ask for access, or use another token",
        "no permission to write to {repo} with this token{reason};"
        " use a token with write access, another name, or --create-pr",
    ),
    (
        answered(409, 412),
        "{repo} was changed by someone else meanwhile{reason}; look at it and run the same command again",
    ),
    (answered(429), "{host} asks for fewer requests (429); {again_then}"),
    (answered(*range(500, 1000)), "{host} fails ({status}) however often it is asked{reason}; {again_later}"),
    (
        lambda error: kind_in(error, UNREACHABLE) and status_of(error) is None,
        NOT_REACHED,
        "{host} cannot be reached; check the network and --endpoint (HF_ENDPOINT)",
    ),
    (is_nonsense, "{host} does not answer as a Hub does ({first}); check --endpoint (HF_ENDPOINT), proxies and logins"),
    (raised(*CUT), "the connection to {host} broke; {again}"),
    (raised("LocalEntryNotFoundError"), NOT_REACHED, None),
    (
        lambda error: status_of(error) is not None,
        "{host} answered {status}{reason}; check the name and the options, or {again_later}",
    ),
    (lambda error: True, "{repo}: {what} failed ({first}); check the network and free space, then {again}"),
)
"""What can go wrong, of which the first that holds is said: a condition and its words, or those for reading and those
for writing, None where it is not said."""


def explain(
    error: BaseException, repo: str, endpoint: str | None, revision: str | None, token: str | None, *, writing: bool
) -> str:
    """Return what went wrong and how to mend it, in one line."""
    from huggingface_hub import constants

    said, wait = server_message(error, token), asked_to_wait(error)
    suited = ((condition, words[-1 if writing else 0]) for condition, *words in FAILURES)
    return next(words for condition, words in suited if words is not None and condition(error)).format(
        repo=repo,
        asked=f"{repo}@{revision}" if revision else repo,
        revision=revision,
        host=(endpoint or constants.ENDPOINT).removeprefix("https://").rstrip("/"),
        status=status_of(error),
        reason=f" ({said})" if said else "",
        again=again(writing),
        again_later=again(writing, "later"),
        again_then=again(writing, f"in {wait:g} seconds" if wait else "in some minutes"),
        what="upload" if writing else "download",
        first=redacted(next(iter(str(error).strip().splitlines()), type(error).__name__), token),
        refusal=redacted(refused_card(error).partition("\n")[2], token).removeprefix("- "),
        log_in=LOG_IN,
    )


def again(writing: bool, when: str = "") -> str:
    """Return the advice to repeat a command, which sends nothing twice where it writes."""
    goes_on = "; it goes on where it stopped" if writing else ""
    return " ".join(filter(None, ("run the same command again", when))) + goes_on


def reading_from(repo: str, revision: str | None, work: Callable[[], T], endpoint: str | None = None) -> T:
    """Return what ``work`` fetches from the Hub, tried again where the server fails for a moment; raise UserError where
    the repository, the revision, the permission, the network or the space is missing."""
    from huggingface_hub import get_token

    with explained(repo, endpoint=endpoint, revision=revision, token=get_token()):
        return with_retries(work)


def check_name(repo: str) -> None:
    """Raise UserError for what cannot be the name of a repository."""
    from huggingface_hub.utils import validate_repo_id

    with explained(repo, writing=True):
        validate_repo_id(repo)


def token_of(token: str | None, endpoint: str | None) -> str:
    """Return the token that is given, or the one of the environment or the log-in; raise UserError without any."""
    from huggingface_hub import constants, get_token

    known = token or get_token()
    if not known:
        raise UserError(f"not logged in to {(endpoint or constants.ENDPOINT).removeprefix('https://')}; {LOG_IN}")
    return known
