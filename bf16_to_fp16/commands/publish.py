"""Uploading a converted folder to the Hub: nothing leaves before it is what its report says.

The order: the files are hashed against the report, the repository is looked at, the audit is run again on the files
as stock code loads them, and only then is anything created. Then the large files go up one by one, and a single commit
makes all of them appear. The Hub knows what it already has, so a run that was interrupted goes on where it stopped, and
one that has nothing to add makes no commit. At the end the repository's hashes are compared with the folder's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..auditing.regimes import verdict
from ..bounds.arithmetic import MAX_LENGTH, Arithmetic
from ..bounds.tiers import bounded
from ..checkpoint.contents import INDEX, WEIGHTS
from ..checkpoint.files import read_json
from ..checkpoint.folder import is_weights, sha256_of
from ..checkpoint.hub import check_name, explained, status_of, token_of, with_retries
from ..checkpoint.packed import summary_of
from ..checkpoint.places import contained, written_folder
from ..checkpoint.reader import open_checkpoint
from ..devices import Device
from ..environment import SCHEMA
from ..errors import UserError
from ..json_text import as_json
from ..progress import Progress, shown_by
from ..quiet import quiet
from ..report.build import regimes_of
from ..report.card import listing_files, render_card, warned
from ..report.page import Result, render
from ..report.remedies import CONVERT_AGAIN, going_on_from, over_limits, unsafe_sites
from ..report.schema import CARD, PAGE, REPORT, CertificateEntry, FileEntry, Output, Report
from ..results import dump
from ..run.agreement import agreed_layout
from ..verification.files import check_hashes
from ..verification.locating import read_recorded
from .pipeline import check_no_pipeline
from .verify import certify_again, run_again

HUBS_OWN = (".gitattributes",)  # files that the Hub itself puts into a repository

MESSAGE = "Upload an fp16 checkpoint rescaled by bf16_to_fp16"

SMALL = 10_000_000  # bytes up to which a file is searched for the token and goes up together with others


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
class Upload:
    """A converted folder, checked and ready to upload: its report, what changes on the way, the card's text, and files
    from elsewhere that go up beside it, by their names."""

    folder: Path
    report: Report
    changed: dict[str, bytes] = field(default_factory=dict)
    card_edited: bool = False
    added: dict[str, Path] = field(default_factory=dict)

    @property
    def card(self) -> str:
        """The model card as it will be uploaded."""
        return (self.changed.get(CARD) or (self.folder / CARD).read_bytes()).decode("utf-8")

    def items(self) -> list[Item]:
        """Return the files to upload, by name."""
        digests = {entry.name: str(entry.sha256) for entry in self.report.output.files} | {REPORT: ""}
        items = []
        for name, digest in sorted(digests.items()):
            changed, path = self.changed.get(name), self.added.get(name) or contained(self.folder, name)
            if changed is not None:
                items.append(Item(name, len(changed), hashlib.sha256(changed).hexdigest(), changed))
            else:
                items.append(Item(name, path.stat().st_size, digest or sha256_of(path), path))
        return items

    def list_files(self, files: Sequence[FileEntry], **more: Any) -> None:
        """Have the report list files in the place of those with their names; more: other keys of its ``output``."""
        names = {entry.name for entry in files}
        kept = [entry for entry in self.report.output.files if entry.name not in names]
        output = self.report.output.model_copy(update={"files": [*kept, *files], **more})
        self.report = self.report.model_copy(update={"output": output})


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

    def others(self, items: Sequence[Item], *, weights: bool) -> list[str]:
        """Return the files that do not belong to what is uploaded: weights, as an original's in fp32 or bf16, which
        are never deleted, or all else, which may be replaced."""
        names = set(self.files) - {item.name for item in items} - set(HUBS_OWN)
        return sorted(name for name in names if is_weights(name) == weights)


def prepare(
    folder: str | Path,
    *,
    add: Sequence[str | Path] = (),
    allow_unsafe: bool = False,
    progress: Progress | bool | None = None,
) -> Upload:
    """Check that a converted folder is what its report says, and return it ready to upload, with the single files
    ``add`` beside it, which its card and its report then list.

    A card that was edited is taken as it is, and its hash put into the report. An unsafe checkpoint needs
    ``allow_unsafe``, and its card says so in its first line. Raises UserError otherwise.
    """
    progress = shown_by(progress)
    folder = written_folder(folder)
    check_no_pipeline(folder)
    upload = Upload(folder, read_recorded(folder))
    with progress.step("Hashing the files") as advance:
        problems = [*check_hashes(folder, upload.report, advance=advance)]
    upload.card_edited = any(name == CARD and (folder / CARD).is_file() for name, *_ in problems)
    for name, reason, *_ in problems:
        if name != CARD or not upload.card_edited:
            raise UserError(f"{folder} is not what its report says: {name}: {reason}; {CONVERT_AGAIN}")
    agreed_layout(open_checkpoint(folder))
    try:
        text = upload.card
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder / CARD}: not readable as UTF-8; convert the source again for a new card") from error
    if not upload.report.safe:
        check_safe(upload, "its report says so", allow_unsafe)
        text = warned(text, upload.report)
    if add:
        said = [added_file(upload, Path(file), allow_unsafe=allow_unsafe, progress=progress) for file in add]
        text = listing_files(text, said)
    restated(upload, text)
    return upload


def added_file(upload: Upload, file: Path, *, allow_unsafe: bool, progress: Progress) -> dict[str, Any]:
    """Take a file that ``convert --layout`` wrote into an upload, and return what it says of itself, with its name and
    size.

    A proof that it claims is computed again from its weights. Raises UserError for any other file, for a name that is
    taken, and for one that is unsafe unless that is allowed.
    """
    said = summary_of(file)
    if said is None:
        raise UserError(
            f"{file}: was not written by convert --layout, so nothing is known of it; leave it out of --add"
        )
    taken = {REPORT, *(entry.name for entry in upload.report.output.files)}
    if file.name in taken:
        raise UserError(f"{file}: {file.name} is the name of another file of the upload; rename it")
    if said["proof"] == "certified":
        checkpoint, device = open_checkpoint(file), Device("auto", progress)
        arithmetic = Arithmetic(int(said.get("max_length", MAX_LENGTH)))
        certificate, _ = bounded(checkpoint, agreed_layout(checkpoint), said["target"], arithmetic, device, progress)
        if not certificate.holds:
            raise UserError(f"{file}: its certificate, computed again, does not hold; convert the source again")
    if said["verdict"] != "safe" and not allow_unsafe:
        raise UserError(f"{file} is unsafe in fp16 (it says so itself) and is not published; leave it out of --add")
    upload.added[file.name] = file
    entry = FileEntry(name=file.name, nbytes=file.stat().st_size, sha256=sha256_of(file))
    upload.list_files([entry])
    return {**said, "name": file.name, "nbytes": entry.nbytes}


def check_safe(upload: Upload, why: str, allowed: bool) -> None:
    """Raise UserError for an unsafe checkpoint unless it is allowed."""
    if not allowed:
        what = "safe in fp16, but short of what was asked" if upload.report.short else "unsafe in fp16"
        raise UserError(
            f"{upload.folder} is {what} ({why}) and is not published; finetune it,"
            " or give --allow-unsafe, and the first line of its card will say so"
        )


def restated(upload: Upload, card: str) -> None:
    """Put the card's text, if it is not the recorded one, and then the report with its new hash into what changes."""
    recorded = {entry.name: entry.sha256 for entry in upload.report.output.files}
    data = card.encode("utf-8")
    if CARD in upload.changed or hashlib.sha256(data).hexdigest() != recorded.get(CARD):
        upload.changed[CARD] = data
    if upload.changed:
        files = [
            FileEntry(name=name, nbytes=len(content), sha256=hashlib.sha256(content).hexdigest())
            for name, content in sorted(upload.changed.items())
            if name != REPORT
        ]
        upload.list_files(files, **({"card_edited": True} if upload.card_edited else {}))
        upload.changed[REPORT] = as_json(dump(upload.report)).encode("utf-8")


def audit_again(upload: Upload, *, allow_unsafe: bool, progress: Progress) -> None:
    """Run the audit on the files as stock code loads them, or bound them where the conversion ran nothing.

    What breaks only now makes the report, the page and the card say so. Raises UserError where it is not allowed.
    """
    report, device = upload.report, Device("auto", progress)
    if report.regimes:
        regimes = run_again(open_checkpoint(upload.folder), report, None, None, device, progress).ran.regimes
        entries = regimes_of(regimes)
        broken = unsafe_sites(entries, converted=True)
        safe, why = verdict(regimes) == "safe", f"{broken[0].signal}: {broken[0].reason}" if broken else ""
        seen: dict[str, Any] = {"regimes": entries, "unsafe": [*report.unsafe, *broken]}
    else:
        checkpoint = open_checkpoint(upload.folder)
        certificate, _ = certify_again(checkpoint, agreed_layout(checkpoint), report, device, progress)
        entry = CertificateEntry.model_validate(certificate.to_json())
        safe, why = certificate.holds, "its certificate, computed again, does not hold"
        seen = {"certificate": entry, "uncertified": over_limits(entry, converted=True)}
    if safe or not report.safe:
        return
    check_safe(upload, why, allow_unsafe)
    then = going_on_from(upload.folder.name, report.regimes, converted=True)
    said: dict[str, Any] = {"verdict": "unsafe", "proof": "observed", "tiers": {}, "next": then}
    report = report.model_copy(update=seen | said)
    upload.report = report.model_copy(update={"certificate": beside_runs(report)})
    config = read_json(upload.folder / "config.json", "config")
    card, page = rendered(upload.report, upload.folder, config, upload.added)
    upload.changed[PAGE] = page.encode("utf-8")
    restated(upload, warned(upload.card, upload.report) if upload.card_edited else card)


def beside_runs(report: Report) -> CertificateEntry | None:
    """Return a report's certificate with the largest values that its regimes found beside the bounds."""
    if report.certificate is None:
        return None
    seen = found_values(report)
    sites = [site.model_copy(update={"observed": seen.get(site.name)}) for site in report.certificate.sites]
    return report.certificate.model_copy(update={"sites": sites})


def found_values(report: Report) -> dict[str, float]:
    """Return the largest value that was found at each site, by a run in ``half`` or a search."""
    half = report.regimes.get("half")
    seen = {} if half is None else {site.name: site.amax for site in half.sites}
    for site in report.attack.sites if report.attack is not None else ():
        seen[site.name] = max(seen.get(site.name, 0.0), site.worst)
    return seen


def rendered(
    report: Report, folder: Path, config: Mapping[str, Any], elsewhere: Mapping[str, Path] | None = None
) -> tuple[str, str]:
    """Return card and page of a converted folder, made again from its report as it was before it listed them.

    elsewhere: files that are not in the folder yet, by name.
    """
    places = {entry.name: (elsewhere or {}).get(entry.name, folder / entry.name) for entry in report.output.files}
    added = [entry for entry in report.output.files if is_added(places[entry.name], entry.name)]
    own = {CARD, PAGE, *(entry.name for entry in added)}
    files = [entry for entry in report.output.files if entry.name not in own]
    before = report.model_copy(update={"output": Output(files=files)})
    card = render_card(before, config)
    if added:
        said = [
            {**(summary_of(places[entry.name]) or {}), "name": entry.name, "nbytes": entry.nbytes} for entry in added
        ]
        card = listing_files(card, said)
    return card, render(before)


def is_added(file: Path, name: str) -> bool:
    """Return whether a file is one of those that ``publish --add`` puts beside the checkpoint's own."""
    return name.endswith(".safetensors") and "/" not in name and summary_of(file) is not None


def check_no_secrets(upload: Upload, token: str) -> None:
    """Raise UserError where the token itself stands in a file that would be uploaded."""
    for item in upload.items():
        if item.nbytes <= SMALL and token.encode() in item.read():
            raise UserError(f"{item.name} holds your token; take it out, and make a new token in your settings")


# --- the Hub ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Publication:
    """What is asked for: a repository, its branch (None for main), and how; ``publish`` says what each field means."""

    repo: str
    revision: str | None = None
    message: str = MESSAGE
    public: bool = False
    create_pr: bool = False
    allow_unsafe: bool = False
    force: bool = False


@dataclass(frozen=True)
class Target:
    """A repository of the Hub that a publication goes to, with the client that reaches it."""

    api: Any
    asked: Publication
    token: str
    progress: Progress

    @property
    def repo(self) -> str:
        """The repository's name."""
        return self.asked.repo

    @property
    def url(self) -> str:
        """The repository's page."""
        return f"{self.api.endpoint}/{self.repo}"

    def explained(self) -> AbstractContextManager[None]:
        """Return a context in which the client's exceptions become a UserError of one line."""
        return explained(
            self.repo, endpoint=self.api.endpoint, revision=self.asked.revision, token=self.token, writing=True
        )

    def look(self, revision: str | None = None) -> Remote | None:
        """Return what the repository holds at ``revision``, by default the target's; None where it does not exist or
        may not be seen."""
        from huggingface_hub.errors import RevisionNotFoundError
        from huggingface_hub.hf_api import RepoFile

        revision = revision or self.asked.revision
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
            url = f"{self.api.endpoint}/api/models/{self.repo}/xet-write-token/{self.asked.revision or 'main'}"
            answer = get_session().get(url, headers=build_hf_headers(token=self.token))
            # The client itself does not ask: with hf_xet installed it would look for a service that is not there.
            constants.HF_HUB_DISABLE_XET = answer.status_code == 404
        try:
            yield
        finally:
            constants.HF_HUB_DISABLE_XET = before


@quiet()
def publish(
    folder: str | Path,
    repo_id: str,
    *,
    public: bool = False,
    create_pr: bool = False,
    revision: str | None = None,
    message: str | None = None,
    allow_unsafe: bool = False,
    add: Sequence[str | Path] = (),
    force: bool = False,
    dry_run: bool = False,
    endpoint: str | None = None,
    token: str | None = None,
    audited: bool = False,
    confirm: Any = None,
    progress: Progress | bool | None = None,
) -> dict[str, Any]:
    """Upload a converted folder to a repository of the Hub and return what was done.

    Its many parameters are the command's options, as keywords. public: a new repository is private unless this is set,
    and an existing public one is refused without it. create_pr: propose the change instead of making it. revision: the
    branch. add: files that ``convert --layout`` wrote, to lie beside the folder's. force: replace other content, but
    for weights, which stay. dry_run: check the files and say what would be uploaded; nothing is sent or asked.
    endpoint: the Hub's address. token: by default that of the environment or the log-in. audited: the audit of these
    files has just been run. confirm: called with the ``Upload`` before anything is sent; uploads only where it returns
    true. Raises UserError, one line with the remedy, for whatever stands in the way; the token appears in no message.
    """
    asked = Publication(repo_id, revision, message or MESSAGE, public, create_pr, allow_unsafe, force)
    progress = shown_by(progress)
    check_name(repo_id)
    upload = prepare(folder, add=add, allow_unsafe=allow_unsafe, progress=progress)
    from huggingface_hub import HfApi, get_token

    if known := token or get_token():
        check_no_secrets(upload, known)  # before anything of it is shown
    confirmed = confirm is None or confirm(upload)
    if dry_run or not confirmed:
        return Result(outcome(upload, asked) | {"dry_run": dry_run})
    token = token_of(token, endpoint)
    client = HfApi(endpoint=endpoint, token=token, library_name="bf16_to_fp16")
    target = Target(client, asked, token, progress)
    with target.explained():
        if "/" not in repo_id:
            asked = replace(asked, repo=f"{with_retries(client.whoami, progress)['name']}/{repo_id}")
            target = replace(target, asked=asked)
        remote = with_retries(target.look, progress)
    check_remote(asked, remote, upload.items())
    there = already(target, remote, upload)
    if there is None and not audited:
        audit_again(upload, allow_unsafe=allow_unsafe, progress=progress)
        there = already(target, remote, upload)
    if there is not None:
        progress.say(f"{target.repo} has all of it already; nothing to upload")
        return Result(there)
    items = upload.items()
    result = outcome(upload, asked) | {"dry_run": False}
    with target.explained():
        if remote is None:
            create(target)
        return Result(result | upload_missing(target, upload, looked_again(target, items), items))


def already(target: Target, remote: Remote | None, upload: Upload) -> dict[str, Any] | None:
    """Return the result of a publication that has nothing to upload, None where there is something."""
    items = upload.items()
    if remote is None or not remote.listed or remote.others(items, weights=False) or not all(map(remote.has, items)):
        return None
    kept = remote.others(items, weights=True)
    known = {"kept": kept, "url": target.url, "commit": remote.commit, "private": remote.private, "compared": True}
    return outcome(upload, target.asked) | {"dry_run": False} | known


def outcome(upload: Upload, asked: Publication) -> dict[str, Any]:
    """Return the entries of the result that are known before anything is sent."""
    return {
        "schema": SCHEMA,
        "verdict": upload.report.verdict,
        "proof": upload.report.proof,
        "repo": asked.repo,
        "revision": asked.revision or "main",
        "create_pr": asked.create_pr,
        "files": [{"name": i.name, "nbytes": i.nbytes, "sha256": i.sha256} for i in upload.items()],
        "uploaded": [],
        "kept": [],
        "commit": None,
        "compared": False,
        "not_compared": "",
        "url": None,
        "pull_request": None,
    }


def check_remote(asked: Publication, remote: Remote | None, items: list[Item]) -> None:
    """Raise UserError where a repository is public and should not be, holds something else, or is not there."""
    repo = asked.repo
    if remote is None:
        if asked.revision not in (None, "main"):
            raise UserError(
                f"{repo} does not exist, so it has no revision {asked.revision!r}; publish to it without --revision"
            )
        return
    if remote.private is False and not asked.public:
        raise UserError(f"{repo} exists and is public; give --public to publish there, or choose another name")
    if asked.create_pr:
        return
    if remote.listed and not asked.force:
        check_same_content(repo, remote, items)
    if WEIGHTS in remote.others(items, weights=True) and INDEX in {item.name for item in items}:
        raise UserError(
            f"{repo} has a {WEIGHTS}, which from_pretrained would load instead of the shards; delete it"
            " there, choose another name, or convert with a --max-shard-size that makes one file"
        )


def looked_again(target: Target, items: list[Item]) -> Remote:
    """Return what a repository holds right before anything is sent to it; a server may make it public whatever it was
    asked, and an owner while the audit ran.

    Raises UserError where it is public unasked, or does not show whether it is.
    """
    asked, remote = target.asked, with_retries(target.look, target.progress)
    if remote is None or (remote.private is None and not asked.public):
        raise UserError(
            f"{target.repo} does not show whether it is private, so nothing was uploaded; look at it on the Hub, or"
            " give --public"
        )
    if remote.private is False and not asked.public:
        raise UserError(
            f"{target.repo} is public, though it was to be private, so nothing was uploaded; make it private on the"
            " Hub and run the same command again, or give --public"
        )
    check_remote(asked, remote, items)
    return remote


def check_same_content(repo: str, remote: Remote, items: list[Item]) -> None:
    """Raise UserError where a repository holds something else than an earlier or partial upload of the same files."""
    differing = [item.name for item in items if item.name in remote.files and not remote.has(item)]
    other = remote.others(items, weights=False)
    if REPORT in remote.files:
        # The three that people edit, or that another run of the same conversion writes anew.
        differing = [name for name in differing if name not in (CARD, REPORT, PAGE)]
    else:  # weights that stayed before stay again
        other = sorted([*other, *remote.others(items, weights=True)])
    if others := [*differing, *other]:
        more = f" and {len(others) - 2} more" if len(others) > 2 else ""
        raise UserError(
            f"{repo} exists with other content ({', '.join(others[:2])}{more});"
            " choose another name, propose the change with --create-pr, or replace it with --force"
        )


def create(target: Target) -> None:
    """Create a repository; raise UserError where one exists that cannot be seen."""
    public = target.asked.public
    try:
        with_retries(lambda: target.api.create_repo(target.repo, private=not public), target.progress)
    except Exception as error:
        if status_of(error) != 409:
            raise
        raise UserError(
            f"{target.repo} exists and this token may not see it; choose another name, or use a token with access"
        ) from None
    target.progress.say(f"Created {target.repo}, {'public' if public else 'private'}")


def upload_missing(target: Target, upload: Upload, remote: Remote, items: list[Item]) -> dict[str, Any]:
    """Upload what the repository does not have, in one commit, and compare its hashes with the folder's."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    asked = target.asked
    missing = [item for item in items if not remote.has(item)]
    removed = remote.others(items, weights=False) if asked.force else []
    additions = [CommitOperationAdd(path_in_repo=item.name, path_or_fileobj=item.content) for item in missing]
    total, sent = sum(item.nbytes for item in missing), 0

    def commit() -> tuple[str | None, str | None, str | None]:
        try:
            info = target.api.create_commit(
                target.repo,
                [*additions, *(CommitOperationDelete(path_in_repo=name) for name in removed)],
                commit_message=asked.message,
                commit_description=f"Verdict: {upload.report.verdict}. Check it with `bf16-to-fp16 verify`.",
                revision=asked.revision,
                create_pr=asked.create_pr,
                parent_commit=remote.commit,
            )
        except Exception as error:
            # Where the answer to a first try got lost, the second is refused as based on an old state.
            there = target.look() if status_of(error) in (409, 412) else None
            if there is None or not all(there.has(item) for item in items):
                raise
            return there.commit, None, asked.revision
        return info.oid, info.pr_url, info.pr_revision if asked.create_pr else asked.revision

    with target.transfers():
        with target.progress.step(f"Uploading {len(missing)} files") as advance:
            for item, addition in zip(missing, additions, strict=True):
                if not getattr(addition.upload_info, "is_hashed", True):
                    addition.upload_info.sha256 = bytes.fromhex(item.sha256)
            for group in groups(additions):
                # Ahead of the commit; nothing is sent that the Hub has. The client itself tries again here.
                target.api.preupload_lfs_files(
                    target.repo, group, revision=asked.revision or "main", create_pr=asked.create_pr
                )
                sent += sum(addition.upload_info.size for addition in group)
                advance(sent, total)
        with target.progress.step("Committing"):
            # After a broken connection nobody knows whether there is a pull request, and a second would be accepted.
            oid, pull_request, place = with_retries(commit, target.progress, cut=not asked.create_pr)
    seen, why = compare_hashes(target, place, items)
    return {
        "uploaded": [item.name for item in missing],
        "deleted": removed,
        "kept": remote.others(items, weights=True),
        "commit": oid,
        "private": seen.private if seen is not None else remote.private,
        "compared": not why,
        "not_compared": why,
        "pull_request": pull_request,
        "url": pull_request or target.url,
    }


def compare_hashes(target: Target, place: str | None, items: list[Item]) -> tuple[Remote | None, str]:
    """Compare a repository's hashes with the folder's, and return what it holds, and why they could not be compared,
    "" where they could.

    Raises UserError where they differ, and where everyone can read now what was to be private.
    """
    try:
        with target.explained():
            seen = with_retries(lambda: target.look(place), target.progress)
    except UserError as error:
        return None, str(error)
    if seen is None:
        return None, "the server does not show the repository any more"
    if seen.private is False and not target.asked.public:
        raise UserError(
            f"{target.repo} is public now, though it was to be private, and holds what was uploaded; make it private or"
            " delete it on the Hub"
        )
    if not seen.listed:
        return seen, "the server lists no files"
    if wrong := [item.name for item in items if not seen.has(item)]:
        raise UserError(
            f"{target.repo} does not hold what was uploaded ({', '.join(wrong[:2])}); run the same command again"
        )
    return seen, ""


def groups(additions: list[Any]) -> Iterator[list[Any]]:
    """Yield small files together and every large one alone, so that progress shows and what is done is done."""
    small = [addition for addition in additions if addition.upload_info.size <= SMALL]
    if small:
        yield small
    for addition in additions:
        if addition.upload_info.size > SMALL:
            yield [addition]
