"""Check the names of sources and files before torch is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError, shortened

REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
RESTORE = "fetch the file again from the original checkpoint"
CHECKPOINT = "the folder of a checkpoint or a Hub id like org/name"

SHIPPED = "shipped:"  # prefix for this package's own data: ``shipped:t5-gated-bytes``

CONVERTED = "a converted folder or a Hub id like org/name"


def own_name(path: str | Path) -> str:
    return os.path.basename(os.path.abspath(os.path.expanduser(path))) or "checkpoint"


def local_path(name: str | Path) -> Path:
    if not str(name).startswith(SHIPPED):
        return Path(name).expanduser()
    shipped = {path.name: path for path in sorted((Path(__file__).parents[1] / "demo_data").iterdir())}
    path = shipped.get(str(name).removeprefix(SHIPPED))
    if path is None:
        raise UserError(f"{shortened(name)} is not shipped; choose {', '.join(SHIPPED + each for each in shipped)}")
    return path


def local_folder(source: str | Path, wanted: str = CHECKPOINT) -> Path | None:
    """Return the local folder that ``source`` names, or None if ``source`` is a Hub id. Raises UserError for anything
    else. wanted: a description of what to give, for error messages."""
    folder = local_path(source)
    if folder.is_dir():
        return folder
    if folder.exists() or REPO_ID.fullmatch(str(source).partition("@")[0]) is None:
        raise UserError(f"{source} {'is not a folder' if folder.exists() else 'does not exist'}; give {wanted}")
    return None


def local_source(source: str | Path) -> Path | None:
    file = local_path(source)
    if file.name.endswith((".safetensors", ".sft", ".pth", ".pt", ".bin", ".ckpt", ".gguf")) and file.is_file():
        check_not_gguf([file])
        return file
    return local_folder(source)


def check_not_gguf(files: Sequence[Path]) -> None:
    if files and all(file.suffix == ".gguf" for file in files):
        raise UserError(
            f"{files[0]}: GGUF holds quantised weights; give the file in bf16 or fp32 that it was made from"
        )


def written_folder(folder: str | Path) -> Path:
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder that convert wrote")
    return folder


def leaves(name: str) -> bool:
    path = Path(name)
    return bool(path.anchor) or ".." in path.parts


def subfolder_of(folder: Path, name: str) -> Path:
    if leaves(name):
        raise UserError(f"subfolder {name!r} is not inside {folder}; name one that is")
    if not (folder / name).is_dir():
        raise UserError(f"{folder} has no folder {name!r}; name one that it has")
    return folder / name


def contained(folder: Path, name: str) -> Path:
    """Return the path of the file ``name`` in ``folder``. Raises UserError if the name or a link leads outside. In the
    Hub's cache, the folder ``blobs`` of the same repository counts as inside."""
    path = Path(name)
    if leaves(name) or not path.parts or "\0" in name:
        raise UserError(
            f"{folder}: a file there names {shown(name)}, which is not inside the folder; fetch all files again"
        )
    try:
        inside = folder.resolve()
        real = (folder / path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or a name too long or not Unicode
        raise UserError(
            f"{folder}: file name {shown(name)} is too long, or a link that leads nowhere; {RESTORE}"
        ) from error
    if real.is_relative_to(inside):
        return folder / path
    for snapshot in (inside, *inside.parents):
        if snapshot.parent.name == "snapshots" and real.is_relative_to(snapshot.parent.parent / "blobs"):
            return folder / path
    raise UserError(f"{folder / path} is a link to {real}, outside the folder; put the file itself there")


def shown(value: object) -> str:
    return repr(shortened(value)) if isinstance(value, str) else shortened(repr(value))


def shown_in_a_command(word: str | Path) -> str:
    """Return a command-line word as reports show it: a local path without its folders, which may be private."""
    return own_name(word) if Path(word).exists() else str(word)
