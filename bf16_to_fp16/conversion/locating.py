"""Find a converted checkpoint on disk or on the Hub."""

from __future__ import annotations

import glob
from pathlib import Path

from rich.filesize import decimal

from ..checkpoint.files import check_free_space
from ..checkpoint.hub import fetched, reading_from
from ..checkpoint.recorded import REPORT, check_below
from ..checkpoint.sources import CONVERTED, local_folder, subfolder_of
from ..errors import UserError
from ..progress import Progress
from ..report.stored import read_written


def locate(
    source: str | Path, subfolder: str | None, endpoint: str | None, progress: Progress
) -> tuple[Path, str | None, list[str]]:
    """Return a converted checkpoint's folder, its Hub commit or None, and the repository's unlisted files. From the
    Hub, the files that the report lists are fetched. Raises UserError where there is no report or no room."""
    folder = local_folder(source, CONVERTED)
    if folder is not None:
        return folder if subfolder is None else subfolder_of(folder, subfolder), None, []
    from huggingface_hub import HfApi, constants
    from huggingface_hub.hf_api import RepoFile

    repo, _, asked = str(source).partition("@")
    inside = "" if subfolder is None else subfolder.strip("/") + "/"
    api = HfApi(endpoint=endpoint)

    def tree() -> tuple[str, dict[str, int]]:
        commit = str(api.repo_info(repo, revision=asked or None).sha)
        entries = api.list_repo_tree(repo, revision=commit, recursive=True)
        files = [entry for entry in entries if isinstance(entry, RepoFile) and entry.path.startswith(inside)]
        return commit, {entry.path.removeprefix(inside): entry.size for entry in files}

    def download(*names: str) -> Path:
        return fetched(str(source), [glob.escape(inside + name) for name in names], endpoint, commit)[0] / inside

    commit, sizes = reading_from(repo, asked, tree, endpoint)
    if REPORT not in sizes:
        check_below(repo, [f"--subfolder {name}" for name in sizes if name.endswith(f"/{REPORT}")])
        raise UserError(
            f"{repo} has no {inside}{REPORT}, so this program did not convert it; audit and certify take any source"
        )
    folder = download(REPORT)
    listed = [entry.name for entry in read_written(folder).output.files]
    wanted = [name for name in listed if name in sizes]
    nbytes = sum(sizes[name] for name in wanted if not (folder / name).exists())  # cached files are not fetched
    check_free_space(repo, nbytes, Path(constants.HF_HUB_CACHE))
    with progress.step(f"Fetching {len(wanted)} files, {decimal(nbytes)}"):
        folder = download(REPORT, *wanted)
    return folder, commit, sorted(set(sizes) - {REPORT, *listed})
