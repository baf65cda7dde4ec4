"""Upload a converted folder to the Hub in one commit, after the checks of ``verify``. A stopped upload can continue."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.contents import WEIGHTS
from ..checkpoint.folder import is_weights
from ..checkpoint.hub import LOG_IN, check_name, explained, status_of, with_retries
from ..checkpoint.sources import written_folder
from ..devices import Device
from ..environment import SCHEMA
from ..errors import UserError
from ..json_text import as_json
from ..progress import Progress, progress_of
from ..quiet import quiet
from ..report.card import warned
from ..report.page import render
from ..report.remedies import CONVERT_AGAIN, TOWER_ALONE, tower_in_fp32
from ..report.schema import CARD, PAGE, REPORT, FileEntry, Output, Report, UnsafeEntry
from ..report.stored import read_written
from ..results import dump
from .file_checks import check_hashes
from .verify import Verified, check_contents

MESSAGE = "Upload an fp16 checkpoint rescaled by bf16_to_fp16"
HUBS_OWN = (".gitattributes",)  # the Hub itself adds them to a repository
UNSAFE = ("certificate", "audit", "tiers")  # failures here make a checkpoint unsafe; others mean that it is another one
SMALL = 10_000_000  # bytes; larger files are not searched for the token


@dataclass(frozen=True)
class Upload:
    report: Report
    files: dict[str, Path | bytes]
    card_edited: bool

    def items(self) -> list[FileEntry]:
        entries = [*self.report.output.files, entry_of(REPORT, self.files[REPORT])]
        return sorted(entries, key=lambda entry: entry.name)


def contents(file: Path | bytes) -> bytes:
    return file if isinstance(file, bytes) else file.read_bytes()


def entry_of(name: str, file: Path | bytes) -> FileEntry:
    data = contents(file)
    return FileEntry(name=name, nbytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def prepare(folder: str | Path, *, allow_unsafe: bool = False, progress: Progress | bool | None = None) -> Upload:
    """Check a converted folder as ``verify`` does, and return it ready for upload. A model card that the user edited is
    kept. allow_unsafe: accept an unsafe checkpoint, and say so in report, page and card. Raises UserError for a folder
    that is not what its report says, and for an unsafe checkpoint."""
    progress, folder = progress_of(progress), written_folder(folder)
    report = read_written(folder)
    verified = Verified(folder, report, Device("auto"), progress, run_model=bool(report.regimes))
    with progress.step("Hashing the files") as advance:
        problems = list(check_hashes(folder, report, advance=advance))
    edited = (folder / CARD).is_file() and any(name == CARD for name, *_ in problems)
    verified.add("files", (problem for problem in problems if not (edited and problem[0] == CARD)))
    if not verified.problems:
        check_contents(verified)
    broken, whole = verified.problems, report.output
    if other := next((problem for problem in broken if problem.check not in UNSAFE), None):
        raise UserError(f"{folder} is not what its report says: {other.name}: {other.reason}; {CONVERT_AGAIN}")
    alone = TOWER_ALONE if tower_in_fp32(report.family, report.regimes) else ""
    why = alone or "its report says so"
    if report.safe and broken:
        why = f"{broken[0].name}: {broken[0].reason}"
        unsafe = [UnsafeEntry(signal=p.name, kind="broke", reason=p.reason, remedy=p.remedy) for p in broken]
        changes: dict[str, Any] = {"verdict": "unsafe", "proof": "observed", "tiers": {}, "unsafe": unsafe}
        report = report.model_copy(update=changes | {"regimes": verified.sections.get("regimes") or report.regimes})
    if not report.safe and not allow_unsafe:
        what = "safe in fp16, but short of what was asked" if report.short else "unsafe in fp16"
        raise UserError(
            f"{folder} is {what} ({why}) and is not published; {'' if alone else 'finetune it, or '}give"
            " --allow-unsafe, and the first line of its card will say so"
        )
    try:
        card = (folder / CARD).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder / CARD}: not readable as UTF-8; convert the source again for a new card") from error
    told = card if report.safe else warned(card, report)
    changed: dict[str, bytes] = {CARD: told.encode()} if edited or told != card else {}
    if broken:
        changed[PAGE] = render(report.model_copy(update={"output": Output()})).encode()
    if changed:
        entries = [entry_of(e.name, changed[e.name]) if e.name in changed else e for e in whole.files]
        output = whole.model_copy(update={"files": entries} | ({"card_edited": True} if edited else {}))
        report = report.model_copy(update={"output": output})
        changed[REPORT] = as_json(dump(report)).encode()
    files = {name: folder / name for name in (REPORT, *(entry.name for entry in whole.files))}
    return Upload(report, {**files, **changed}, edited)


@quiet()
def publish(
    folder: str | Path,
    repo_id: str,
    *,
    public: bool = False,
    create_pr: bool = False,
    revision: str | None = None,
    allow_unsafe: bool = False,
    force: bool = False,
    dry_run: bool = False,
    endpoint: str | None = None,
    token: str | None = None,
    confirm: Any = None,
    progress: Progress | bool | None = None,
) -> dict[str, Any]:
    """Upload a converted folder to a Hub repository, and return a report on the upload.

    public: allow a public repository. Without it a new repository is private, and an existing public one is refused.
    force: replace files with other content. dry_run: check the folder and send nothing. confirm: a function that gets
    the ``Upload`` before anything is sent and returns whether to go on. Raises UserError; no message contains the
    token."""
    # As many parameters as the command has options.
    from huggingface_hub import HfApi, constants, get_token

    progress = progress_of(progress)
    check_name(repo_id)
    token = token or get_token()
    if not token and not dry_run:
        raise UserError(f"not logged in to {(endpoint or constants.ENDPOINT).removeprefix('https://')}; {LOG_IN}")
    upload = prepare(folder, allow_unsafe=allow_unsafe, progress=progress)
    for item in upload.items() if token else ():
        if (item.nbytes or 0) <= SMALL and str(token).encode() in contents(upload.files[item.name]):
            raise UserError(f"{item.name} holds your token; take it out, and make a new token in your settings")
    done = {
        "schema": SCHEMA,
        "verdict": upload.report.verdict,
        "proof": upload.report.proof,
        "repo": repo_id,
        "revision": revision or "main",
        "create_pr": create_pr,
        "files": [{"name": i.name, "nbytes": i.nbytes, "sha256": i.sha256} for i in upload.items()],
        "dry_run": dry_run,
        **{"uploaded": [], "kept": [], "commit": None, "url": None, "pull_request": None},
    }
    if (confirm is not None and not confirm(upload)) or dry_run:
        return done
    api = HfApi(endpoint=endpoint, token=token, library_name="bf16_to_fp16")
    how: dict[str, Any] = {"revision": revision, "public": public, "force": force}
    with explained(repo_id, endpoint=api.endpoint, revision=revision, token=token, writing=True), transfers(api):
        if create_pr:  # a second try could open a second pull request
            return done | send(api, repo_id, upload, progress, create_pr=True, **how)
        return done | with_retries(lambda: send(api, repo_id, upload, progress, create_pr=False, **how))


def send(
    api: Any, repo: str, upload: Upload, progress: Progress, *,
    revision: str | None, public: bool, create_pr: bool, force: bool,
) -> dict[str, Any]:  # fmt: skip
    """Upload in one commit the files that the repository lacks. The many parameters are those of ``publish``."""
    from huggingface_hub import CommitOperationAdd

    repo = repo if "/" in repo else f"{api.whoami()['name']}/{repo}"
    if revision in (None, "main") and not create_pr and not api.repo_exists(repo):
        api.create_repo(repo, private=not public)
        progress.say(f"Created {repo}, {'public' if public else 'private'}")
    there = with_retries(lambda: api.repo_info(repo, revision=revision))
    if there.private is not True and not public:
        raise UserError(f"{repo} is not private, so nothing was uploaded; give --public, or choose another name")
    held = files_held(api, repo, there.sha)
    names = [item.name for item in upload.items()]
    missing = [i.name for i in upload.items() if not is_held(i, held.get(i.name), upload.files[i.name])]
    kept = sorted(name for name in set(held) - set(names) - {*HUBS_OWN} if is_weights(name))
    done = {"repo": repo, "kept": kept, "private": there.private, "url": f"{api.endpoint}/{repo}"}
    if not missing:
        progress.say(f"{repo} has all of it already; nothing to upload")
        return done | {"commit": there.sha}
    if not create_pr:
        check_other_content(repo, held, names, missing, force)
    additions = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=upload.files[name]) for name in missing]
    with progress.step(f"Uploading {len(missing)} files"):
        commit = api.create_commit(
            repo,
            additions,
            commit_message=MESSAGE,
            commit_description=f"Verdict: {upload.report.verdict}. Check it with `bf16-to-fp16 verify`.",
            revision=revision,
            create_pr=create_pr,
            parent_commit=there.sha,
        )
    url = commit.pr_url or done["url"]
    return done | {"uploaded": missing, "commit": commit.oid, "pull_request": commit.pr_url, "url": url}


def check_other_content(repo: str, held: dict[str, Any], names: list[str], missing: list[str], force: bool) -> None:
    """Raise UserError if a repository has content that is not from an earlier upload of the same files, unless
    ``force``. Even then, raise it for weights that would be loaded instead of the shards. held: its files by name."""
    same = set(names) - set(missing)
    # People edit these, or another run of the same conversion writes them anew.
    renewed = {CARD, REPORT, PAGE} if REPORT in held else set()
    if (other := sorted(set(held) - same - renewed - {*HUBS_OWN})) and not force:
        raise UserError(
            f"{repo} exists with other content ({', '.join(other[:2])});"
            " choose another name, propose the change with --create-pr, or replace it with --force"
        )
    if WEIGHTS in other and WEIGHTS not in names:
        raise UserError(
            f"{repo} has a {WEIGHTS}, which from_pretrained would load instead of the shards; delete it there, or"
            " choose another name"
        )


def files_held(api: Any, repo: str, revision: str | None) -> dict[str, Any]:
    from huggingface_hub.hf_api import RepoFile

    try:
        entries = with_retries(lambda: list(api.list_repo_tree(repo, revision=revision, recursive=True)))
    except Exception as error:
        if status_of(error) == 404:  # an empty repository has no tree
            return {}
        raise
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def is_held(item: FileEntry, entry: Any, file: Path | bytes) -> bool:
    if entry is None or entry.size != item.nbytes:
        return False
    if entry.lfs is not None:
        return bool(entry.lfs.sha256 == item.sha256)
    data = contents(file)
    return bool(entry.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest())


@contextmanager
def transfers(api: Any) -> Iterator[None]:
    """Upload by Git LFS in the block, unless the server is the Hub. Others may lack Xet, the client's default."""
    from huggingface_hub import constants

    before = constants.HF_HUB_DISABLE_XET
    constants.HF_HUB_DISABLE_XET = before or api.endpoint.rstrip("/") != "https://huggingface.co"
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = before
