"""Find a converted checkpoint on disk or on the Hub."""

from __future__ import annotations

import glob
from pathlib import Path

from ..checkpoint.hub import fetched
from ..checkpoint.recorded import REPORT, check_below
from ..checkpoint.sources import CONVERTED, local_folder, subfolder_of
from ..errors import UserError
from ..progress import Progress


def locate(
    source: str | Path, subfolder: str | None, endpoint: str | None, progress: Progress
) -> tuple[Path, str | None]:
    """Return a converted checkpoint's folder, and its commit if it is on the Hub, else None. From the Hub, all of its
    files are fetched. Raises UserError if a repository has no report."""
    folder = local_folder(source, CONVERTED)
    if folder is not None:
        return folder if subfolder is None else subfolder_of(folder, subfolder), None
    inside = "" if subfolder is None else subfolder.strip("/") + "/"
    snapshot, commit = fetched(str(source), [f"*{REPORT}"], endpoint)
    if not (snapshot / inside / REPORT).is_file():
        check_below(source, [f"--subfolder {path.parent.name}/{REPORT}" for path in snapshot.glob(f"*/{REPORT}")])
        raise UserError(
            f"{source} has no {inside}{REPORT}, so this program did not convert it; audit and certify can check it"
        )
    with progress.step(f"Fetching {source}"):
        snapshot, _ = fetched(str(source), [f"{glob.escape(inside)}*"], endpoint, commit)
    return snapshot / inside, commit
