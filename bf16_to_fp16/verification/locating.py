"""Where a converted checkpoint lies, on the disk or on the Hub, and what its report records."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from ..checkpoint.fetching import fetched
from ..checkpoint.hub import reading_from
from ..checkpoint.places import CONVERTED, contained, local_folder, subfolder_of
from ..checkpoint.staging import check_free_space
from ..environment import SCHEMA
from ..errors import UserError
from ..progress import Progress
from ..report.schema import REPORT, Report, read_report
from ..wording import bytes_in_words

LISTS_OTHER = "lists something that convert does not write; convert the source again"

NEEDED = {
    key: f"has no {key}, so convert did not write it; convert the source again"
    for key in ("verdict", "source.sha256", "source.config_changes", "output.files", "plan", "certificate.sites")
}
"""What a report must have to be checked, and what is said where it is missing."""

WRONG = {
    "plan.": "its plan is not one of this program; convert the source again",
    "target": "its certificate names no target and length; convert the source again",
    "certificate.max_length": "its certificate names no target and length; convert the source again",
    "certificate.splits": "its certificate names no target and length; convert the source again",
    "inputs.seed": "its seed is not a number; convert the source again",
}
"""What is said where something in it is not what convert writes."""


def locate(
    source: str | Path, subfolder: str | None, endpoint: str | None, progress: Progress
) -> tuple[Path, str | None, list[str]]:
    """Return the folder of a converted checkpoint, the commit that a Hub id stood for (else None), and the files of
    its repository that its report does not know."""
    folder = local_folder(source, CONVERTED)
    if folder is None:
        return fetch(str(source), subfolder, endpoint, progress)
    folder = folder if subfolder is None else subfolder_of(folder, subfolder)
    if not (folder / REPORT).exists():
        check_below(folder, [path.relative_to(folder).as_posix() for path in folder.glob(f"*/{REPORT}")])
    return folder, None, []


def check_below(source: str | Path, reports: Sequence[str]) -> None:
    """Raise UserError for a source without a report that has some in folders below it."""
    if reports:
        names = " or ".join(sorted(name.removesuffix(f"/{REPORT}") for name in reports))
        raise UserError(f"{source} has no {REPORT} of its own; give --subfolder {names}")


def fetch(source: str, subfolder: str | None, endpoint: str | None, progress: Progress) -> tuple[Path, str, list[str]]:
    """Download what a repository's report lists and nothing else; return the folder, the commit, and the names of the
    repository's other files.

    Raises UserError for a repository without a report, and where the disk has no room for it.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.hf_api import RepoFile

    repo, _, asked = source.partition("@")
    inside = "" if subfolder is None else subfolder.strip("/") + "/"
    api = HfApi(endpoint=endpoint)

    def tree() -> tuple[str, dict[str, int]]:
        commit = str(api.repo_info(repo, revision=asked or None).sha)
        entries = api.list_repo_tree(repo, revision=commit, recursive=True)
        files = [entry for entry in entries if isinstance(entry, RepoFile) and entry.path.startswith(inside)]
        return commit, {entry.path.removeprefix(inside): entry.size for entry in files}

    def download(*names: str) -> Path:
        return fetched(source, [glob.escape(inside + name) for name in names], endpoint, commit)[0] / inside

    commit, sizes = reading_from(repo, asked, tree, endpoint)
    if REPORT not in sizes:
        check_below(repo, [name for name in sizes if name.endswith(f"/{REPORT}")])
        raise UserError(
            f"{repo} has no {inside}{REPORT}, so this program did not convert it; audit and certify take any source"
        )
    folder = download(REPORT)
    listed = [entry.name for entry in read_recorded(folder).output.files]
    wanted = [name for name in listed if name in sizes]
    nbytes = sum(sizes[name] for name in wanted if not (folder / name).exists())  # what the cache has is not fetched
    check_free_space(repo, nbytes, Path(constants.HF_HUB_CACHE))
    with progress.step(f"Fetching {len(wanted)} files, {bytes_in_words(nbytes)}"):
        folder = download(REPORT, *wanted)
    return folder, commit, sorted(set(sizes) - {REPORT, *listed})


def read_recorded(folder: Path) -> Report:
    """Return the report of a converted folder.

    Raises UserError where there is none, or it lacks what can be checked.
    """
    path = folder / REPORT
    if not path.is_file():
        raise UserError(f"{folder}: has no {REPORT}, so convert did not write it; give a converted folder")
    contained(folder, REPORT)
    report = read_report(path, NEEDED, LISTS_OTHER, also=None, wrong=WRONG, version=SCHEMA)
    if any(entry.nbytes is None or entry.sha256 is None for entry in report.output.files):
        raise UserError(f"{path}: {LISTS_OTHER}")
    return report
