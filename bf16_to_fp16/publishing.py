"""Uploading a converted folder to the Hub: nothing leaves before it is what its report says.

The order: the files are hashed against the report, the repository is looked at, the audit is run again on the files
as stock code loads them, and only then is anything created. Then the large files go up one by one, and a single commit
makes all of them appear. The Hub knows what it already has, so a run that was interrupted goes on where it stopped, and
one that has nothing to add makes no commit. At the end the repository's hashes are compared with the folder's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .auditing import RegimeResult, verdict
from .card import warned
from .checkpoint import contained, open_checkpoint
from .conversion import PAGE, REPORT
from .environment import SCHEMA
from .errors import UserError
from .families import resolve
from .folder import finite, sha256_of
from .hub import LOG_IN, explained, patiently, status_of
from .page import render
from .talk import Talk
from .verifying import Problem, check_audit, check_files, listed_files, read_report, recompute, repeat_audit

CARD = "README.md"

HUBS_OWN = (".gitattributes",)
"""Files that the Hub itself puts into a repository."""

MESSAGE = "Upload an fp16 checkpoint rescaled by bf16_to_fp16"

SMALL = 10_000_000
"""Bytes up to which a file is searched for the token and goes up together with others."""


@dataclass(frozen=True)
class Item:
    """A file to upload: its name in the repository, its size in bytes, its SHA-256, and where it or its bytes are."""

    name: str
    nbytes: int
    sha256: str
    content: Path | bytes

    def read(self) -> bytes:
        """Return the whole file."""
        return self.content if isinstance(self.content, bytes) else self.content.read_bytes()


@dataclass
class Parcel:
    """A converted folder, checked and ready: its report, what of it changes on the way, and the card's text."""

    folder: Path
    report: dict[str, Any]
    changed: dict[str, bytes] = field(default_factory=dict)
    card_edited: bool = False

    @property
    def safe(self) -> bool:
        """Return whether the verdict is safe."""
        return self.report["verdict"] == "safe"

    @property
    def card(self) -> str:
        """The model card as it will be uploaded."""
        return (self.changed.get(CARD) or (self.folder / CARD).read_bytes()).decode("utf-8")

    def items(self) -> list[Item]:
        """Return the files to upload, by name."""
        names = {str(entry["name"]): str(entry["sha256"]) for entry in listed_files(self.report)} | {REPORT: ""}
        found = []
        for name, digest in sorted(names.items()):
            changed, path = self.changed.get(name), contained(self.folder, name)
            if changed is not None:
                found.append(Item(name, len(changed), hashlib.sha256(changed).hexdigest(), changed))
            else:
                found.append(Item(name, path.stat().st_size, digest or sha256_of(path), path))
        return found


@dataclass(frozen=True)
class Remote:
    """What a repository holds at a revision: its commit, whether it is private, and size and hash of each file.

    The hash is the SHA-256 of a large file and git's SHA-1 of a small one. ``listed``: whether the server lists files.
    """

    commit: str | None
    private: bool | None
    files: Mapping[str, tuple[int, str]]
    listed: bool = True

    def has(self, item: Item) -> bool:
        """Return whether a file is there with the same content."""
        known = self.files.get(item.name)
        if known is None or known[0] != item.nbytes:
            return False
        if len(known[1]) == 64:
            return known[1] == item.sha256
        header = f"blob {item.nbytes}\0".encode()
        return known[1] == hashlib.sha1(header + item.read(), usedforsecurity=False).hexdigest()


def prepare(folder: str | Path, *, allow_unsafe: bool = False, talk: Talk | None = None) -> Parcel:
    """Check that a converted folder is what its report says, and return it ready to upload.

    A card that was edited is taken as it is, and its hash put into the report. An unsafe checkpoint needs
    ``allow_unsafe``, and its card says so in its first line. Raises UserError otherwise.
    """
    talk = talk or Talk(quiet=True)
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder that convert wrote")
    parcel = Parcel(folder, read_report(folder))
    with talk.step("Hashing the files") as advance:
        problems = check_files(folder, parcel.report, progress=advance)
    parcel.card_edited = any(problem.name == CARD and (folder / CARD).is_file() for problem in problems)
    problems = [problem for problem in problems if problem.name != CARD or not parcel.card_edited]
    if problems:
        raise UserError(f"{folder} is not what its report says: {first_of(problems)}")
    try:
        text = parcel.card
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder / CARD}: not readable as UTF-8; convert the source again for a new card") from error
    if not parcel.safe:
        refuse_unsafe(parcel, "its report says so", allow_unsafe)
        text = warned(text, parcel.report)
    restated(parcel, text)
    return parcel


def first_of(problems: list[Problem]) -> str:
    """Return the first of some problems, and how many there are more."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0].name}: {problems[0].reason}{more}; {problems[0].remedy}"


def refuse_unsafe(parcel: Parcel, why: str, allowed: bool) -> None:
    """Raise UserError for an unsafe checkpoint unless it is allowed."""
    if not allowed:
        raise UserError(
            f"{parcel.folder} is unsafe in fp16 ({why}) and is not published; finetune it,"
            " or give --allow-unsafe, and the first line of its card will say so"
        )


def restated(parcel: Parcel, card: str) -> None:
    """Put the card's text, if it is not the recorded one, and then the report with its new hash into what changes."""
    data = card.encode("utf-8")
    records = [dict(entry) for entry in listed_files(parcel.report)]
    before = {entry["name"]: entry["sha256"] for entry in records}
    for name, content in ((CARD, data), *((n, d) for n, d in parcel.changed.items() if n not in (CARD, REPORT))):
        digest = hashlib.sha256(content).hexdigest()
        if before.get(name) == digest and name not in parcel.changed:
            continue
        parcel.changed[name] = content
        records = [entry for entry in records if entry["name"] != name]
        records.append({"name": name, "nbytes": len(content), "sha256": digest})
    if parcel.changed:
        parcel.report = {**parcel.report, "output": {**parcel.report["output"], "files": records}}
        written = json.dumps(finite(parcel.report), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        parcel.changed[REPORT] = written.encode("utf-8")


def audit_again(parcel: Parcel, *, allow_unsafe: bool, talk: Talk) -> None:
    """Run the audit on the files as stock code loads them, or bound them where the conversion ran nothing.

    What breaks only now makes the report, the page and the card say so. Raises UserError where it is not allowed.
    """
    if not parcel.report.get("regimes"):
        checkpoint = open_checkpoint(parcel.folder)
        if recompute(checkpoint, resolve(checkpoint), parcel.report, talk).holds or not parcel.safe:
            return
        refuse_unsafe(parcel, "its certificate, computed again, does not hold", allow_unsafe)
        unsafe = {**parcel.report, "verdict": "unsafe", "proof": "observed"}
    else:
        regimes: Mapping[str, RegimeResult] = repeat_audit(parcel.folder, parcel.report, talk)
        if verdict(regimes) == "safe" or not parcel.safe:
            return
        problems = check_audit(regimes)
        refuse_unsafe(parcel, f"{problems[0].name}: {problems[0].reason}", allow_unsafe)
        unsafe = {
            **parcel.report,
            "verdict": "unsafe",
            "proof": "observed",
            "regimes": {name: result.to_json() for name, result in regimes.items()},
        }
    card = warned(parcel.card, unsafe)
    parcel.report = unsafe
    parcel.changed[PAGE] = render(unsafe).encode("utf-8")
    restated(parcel, card)


def refuse_secrets(parcel: Parcel, token: str) -> None:
    """Raise UserError where the token itself stands in a file that would be uploaded."""
    for item in parcel.items():
        if item.nbytes <= SMALL and token.encode() in item.read():
            raise UserError(f"{item.name} holds your token; take it out, and make a new token in your settings")


# --- the Hub ---------------------------------------------------------------------------------------------------------


def check_name(repo: str) -> None:
    """Raise UserError for what cannot be the name of a repository."""
    from huggingface_hub.utils import validate_repo_id

    with explained(repo, writing=True):
        validate_repo_id(repo)


def token_of(token: str | None, endpoint: str | None) -> str:
    """Return the token that is given, or the one of the environment or the log-in; raise UserError without any."""
    from huggingface_hub import constants, get_token

    found = token or get_token()
    if not found:
        raise UserError(f"not logged in to {(endpoint or constants.ENDPOINT).removeprefix('https://')}; {LOG_IN}")
    return found


@dataclass(frozen=True)
class Target:
    """Where to upload: the client, the repository, the branch (None for main), and whether as a pull request."""

    api: Any
    repo: str
    revision: str | None
    create_pr: bool
    token: str
    talk: Talk

    @property
    def url(self) -> str:
        """The repository's page."""
        return f"{self.api.endpoint}/{self.repo}"

    def explained(self) -> AbstractContextManager[None]:
        """Return a context in which the client's exceptions become a UserError of one line."""
        return explained(self.repo, endpoint=self.api.endpoint, revision=self.revision, token=self.token, writing=True)

    def look(self, revision: str | None = None) -> Remote | None:
        """Return what the repository holds at ``revision``, by default the target's; None where it does not exist or
        may not be seen."""
        from huggingface_hub.errors import RevisionNotFoundError
        from huggingface_hub.hf_api import RepoFile

        revision = revision or self.revision
        try:
            info = self.api.repo_info(self.repo, revision=revision)
        except Exception as error:
            if status_of(error) == 404 and not isinstance(error, RevisionNotFoundError):
                return None
            raise
        try:
            tree = list(self.api.list_repo_tree(self.repo, revision=info.sha or revision, recursive=True))
        except Exception as error:
            # An empty repository has no tree, and a small server of one's own may not list one.
            if status_of(error) == 404:
                return Remote(info.sha, info.private, {}, listed=False)
            raise
        files = {e.path: (e.size, e.lfs.sha256 if e.lfs else e.blob_id) for e in tree if isinstance(e, RepoFile)}
        return Remote(info.sha, info.private, files)

    @contextmanager
    def transfers(self) -> Iterator[None]:
        """Let the client upload as the server can: by Xet, or where a server of one's own has none, by LFS."""
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers, get_session

        before = constants.HF_HUB_DISABLE_XET
        if self.api.endpoint.rstrip("/") != "https://huggingface.co" and not before:
            url = f"{self.api.endpoint}/api/models/{self.repo}/xet-write-token/{self.revision or 'main'}"
            answer = get_session().get(url, headers=build_hf_headers(token=self.token))
            # The client itself does not ask: with hf_xet installed it would look for a service that is not there.
            constants.HF_HUB_DISABLE_XET = answer.status_code == 404
        try:
            yield
        finally:
            constants.HF_HUB_DISABLE_XET = before


def publish(
    folder: str | Path,
    repo_id: str,
    *,
    public: bool = False,
    create_pr: bool = False,
    revision: str | None = None,
    message: str | None = None,
    allow_unsafe: bool = False,
    force: bool = False,
    dry_run: bool = False,
    endpoint: str | None = None,
    token: str | None = None,
    audited: bool = False,
    confirm: Any = None,
    talk: Talk | None = None,
) -> dict[str, Any]:
    """Upload a converted folder to a repository of the Hub and return what was done.

    public: a new repository is private unless this is set, and an existing public one is refused without it.
    create_pr: propose the change instead of making it. revision: the branch. force: replace other content.
    dry_run: check the files and say what would be uploaded; nothing is sent or asked. endpoint: the Hub's address.
    token: by default that of the environment or the log-in. audited: the audit of these files has just been run.
    confirm: called with the ``Parcel`` before anything is sent; uploads only where it returns true. Raises UserError,
    one line with the remedy, for whatever stands in the way; the token appears in no message.
    """
    talk = talk or Talk(quiet=True)
    check_name(repo_id)
    parcel = prepare(folder, allow_unsafe=allow_unsafe, talk=talk)
    from huggingface_hub import HfApi, get_token

    if known := token or get_token():
        refuse_secrets(parcel, known)  # before anything of it is shown
    result = outcome(parcel, repo_id, revision, create_pr) | {"dry_run": dry_run}
    if confirm is not None and not confirm(parcel):
        return result
    if dry_run:
        return result
    token = token_of(token, endpoint)
    client = HfApi(endpoint=endpoint, token=token, library_name="bf16_to_fp16")
    target = Target(client, repo_id, revision, create_pr, token, talk)
    with target.explained():
        if "/" not in repo_id:
            target = replace(target, repo=f"{patiently(client.whoami, talk)['name']}/{repo_id}")
        remote = patiently(target.look, talk)
    refuse_what_is_there(target, remote, parcel.items(), public=public, force=force)
    there = already(target, remote, parcel)
    if there is None and not audited:
        audit_again(parcel, allow_unsafe=allow_unsafe, talk=talk)
        there = already(target, remote, parcel)
    if there is not None:
        talk.say(f"{target.repo} has all of it already; nothing to upload")
        return there
    items = parcel.items()
    result = outcome(parcel, target.repo, revision, create_pr) | {"dry_run": False}
    with target.explained():
        if remote is None:
            remote = create(target, public)
        return result | upload(target, parcel, remote, items, message or MESSAGE, force=force)


def already(target: Target, remote: Remote | None, parcel: Parcel) -> dict[str, Any] | None:
    """Return the result of a publication that has nothing to upload, None where there is something."""
    items = parcel.items()
    if remote is None or not remote.listed or stale(remote, items) or not all(remote.has(item) for item in items):
        return None
    result = outcome(parcel, target.repo, target.revision, target.create_pr)
    return result | {"dry_run": False, "url": target.url, "commit": remote.commit, "private": remote.private}


def outcome(parcel: Parcel, repo: str, revision: str | None, create_pr: bool) -> dict[str, Any]:
    """Return the entries of the result that are known before anything is sent."""
    return {
        "schema": SCHEMA,
        "verdict": parcel.report["verdict"],
        "proof": parcel.report.get("proof"),
        "repo": repo,
        "revision": revision or "main",
        "create_pr": create_pr,
        "files": [{"name": i.name, "nbytes": i.nbytes, "sha256": i.sha256} for i in parcel.items()],
        "uploaded": [],
        "commit": None,
        "url": None,
        "pull_request": None,
    }


def refuse_what_is_there(
    target: Target, remote: Remote | None, items: list[Item], *, public: bool, force: bool
) -> None:
    """Raise UserError where a repository is public and should not be, holds something else, or is not there."""
    if remote is None and target.revision not in (None, "main"):
        raise UserError(
            f"{target.repo} does not exist, so it has no revision {target.revision!r}; publish to it without --revision"
        )
    if remote is not None:
        refuse_public(target.repo, remote, public)
        if remote.listed and not target.create_pr and not force:
            refuse_other_content(target.repo, remote, items)


def refuse_public(repo: str, remote: Remote, public: bool) -> None:
    """Raise UserError where everyone could read what was not meant to be public."""
    if remote.private is False and not public:
        raise UserError(f"{repo} exists and is public; give --public to publish there, or choose another name")


def stale(remote: Remote, items: list[Item]) -> list[str]:
    """Return the names of files in a repository that do not belong to what is uploaded."""
    return sorted(set(remote.files) - {item.name for item in items} - set(HUBS_OWN))


def refuse_other_content(repo: str, remote: Remote, items: list[Item]) -> None:
    """Raise UserError where a repository holds something else than an earlier or partial upload of the same files."""
    differing = [item.name for item in items if item.name in remote.files and not remote.has(item)]
    if REPORT in remote.files:
        # The three that people edit, or that another run of the same conversion writes anew.
        differing = [name for name in differing if name not in (CARD, REPORT, PAGE)]
    if others := [*differing, *stale(remote, items)]:
        more = f" and {len(others) - 2} more" if len(others) > 2 else ""
        raise UserError(
            f"{repo} exists with other content ({', '.join(others[:2])}{more});"
            " choose another name, propose the change with --create-pr, or replace it with --force"
        )


def create(target: Target, public: bool) -> Remote:
    """Create a repository and return what it holds; raise UserError where one exists that cannot be seen."""
    try:
        patiently(lambda: target.api.create_repo(target.repo, private=not public), target.talk)
    except Exception as error:
        if status_of(error) != 409:
            raise
        raise UserError(
            f"{target.repo} exists and this token may not see it; choose another name, or use a token with access"
        ) from None
    target.talk.say(f"Created {target.repo}, {'public' if public else 'private'}")
    return patiently(target.look, target.talk) or Remote(None, not public, {}, listed=False)


def upload(
    target: Target, parcel: Parcel, remote: Remote, items: list[Item], message: str, *, force: bool
) -> dict[str, Any]:
    """Upload what the repository does not have, in one commit, and compare its hashes with the folder's."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    missing = [item for item in items if not remote.has(item)]
    removed = stale(remote, items) if force else []
    additions = [CommitOperationAdd(path_in_repo=item.name, path_or_fileobj=item.content) for item in missing]
    total, sent = sum(item.nbytes for item in missing), 0

    def commit() -> tuple[str | None, str | None, str | None]:
        try:
            info = target.api.create_commit(
                target.repo,
                [*additions, *(CommitOperationDelete(path_in_repo=name) for name in removed)],
                commit_message=message,
                commit_description=f"Verdict: {parcel.report['verdict']}. Check it with `bf16-to-fp16 verify`.",
                revision=target.revision,
                create_pr=target.create_pr,
                parent_commit=remote.commit,
            )
        except Exception as error:
            # Where the answer to a first try got lost, the second is refused as based on an old state.
            there = target.look() if status_of(error) in (409, 412) else None
            if there is None or not all(there.has(item) for item in items):
                raise
            return there.commit, None, target.revision
        return info.oid, info.pr_url, info.pr_revision if target.create_pr else target.revision

    with target.transfers():
        with target.talk.step(f"Uploading {len(missing)} files") as advance:
            for item, addition in zip(missing, additions, strict=True):
                if not getattr(addition.upload_info, "is_hashed", True):
                    addition.upload_info.sha256 = bytes.fromhex(item.sha256)
            for group in groups(additions):
                # Ahead of the commit; nothing is sent that the Hub has. The client itself tries again here.
                target.api.preupload_lfs_files(
                    target.repo, group, revision=target.revision or "main", create_pr=target.create_pr
                )
                sent += sum(addition.upload_info.size for addition in group)
                advance(sent, total)
        with target.talk.step("Committing"):
            # After a broken connection nobody knows whether there is a pull request, and a second would be accepted.
            oid, pull_request, place = patiently(commit, target.talk, cut=not target.create_pr)
    seen = patiently(lambda: target.look(place), target.talk)
    if seen is not None and seen.listed and (wrong := [item.name for item in items if not seen.has(item)]):
        raise UserError(
            f"{target.repo} does not hold what was uploaded ({', '.join(wrong[:2])}); run the same command again"
        )
    return {
        "uploaded": [item.name for item in missing],
        "deleted": removed,
        "commit": oid,
        "private": seen.private if seen is not None else remote.private,
        "pull_request": pull_request,
        "url": pull_request or target.url,
    }


def groups(additions: list[Any]) -> Iterator[list[Any]]:
    """Yield small files together and every large one alone, so that progress shows and what is done is done."""
    small = [addition for addition in additions if addition.upload_info.size <= SMALL]
    if small:
        yield small
    for addition in additions:
        if addition.upload_info.size > SMALL:
            yield [addition]
