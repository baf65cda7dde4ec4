"""Open a diffusion pipeline in diffusers' layout, and bring over the files that are not converted. Large files become
hard links, which take no space and survive moves. Small files, which people edit, are copied."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..progress import Advance
from .files import read_json
from .folder import copy, is_weights
from .hub import SMALL_FILES, fetched, hub_files
from .sources import RESTORE, contained, local_source

MODEL_INDEX = "model_index.json"
PIPELINE = "fp16_pipeline.json"  # in a converted pipeline: the converted sub-folders and their sources
LINKED_FROM = 1 << 20  # bytes; a smaller file is copied
NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@dataclass(frozen=True)
class Pipeline:
    """An opened diffusion pipeline. ``kind``: its class. ``loaded``: the library and class of each component (a model,
    tokenizer or the like), by name. ``encoders``: the components to convert. ``others``: the files outside the
    encoders, which are linked or copied. ``left_out``: the hidden folders, which are skipped."""

    folder: Path
    source: str
    revision: str | None
    kind: str
    loaded: Mapping[str, tuple[str, str]]
    encoders: tuple[str, ...]
    others: tuple[str, ...]
    left_out: tuple[str, ...]


def is_pipeline(folder: Path) -> bool:
    return (folder / MODEL_INDEX).is_file()


def open_pipeline(source: str | Path, wanted: Callable[[Mapping[str, Any]], bool]) -> Pipeline | None:
    """Open a diffusion pipeline; return None for any other source. From the Hub, only small files are fetched. wanted:
    a function that decides by a component's config.json whether to convert the component. Raises UserError if the
    pipeline is converted already or has no component to convert."""
    folder, revision = local_source(source), None
    if folder is not None and not (folder.is_dir() and is_pipeline(folder)):
        return None
    names: Sequence[str] | None = None
    if folder is None:
        folder, revision = fetched(str(source), SMALL_FILES)
        if not is_pipeline(folder):
            return None
        names = hub_files(str(source), folder)
    if (folder / PIPELINE).is_file():
        raise UserError(f"{source} is a converted pipeline already; convert what it was made from")
    index = read_json(contained(folder, MODEL_INDEX), "index of the pipeline")
    parts = components(folder, index)
    encoders = [name for name in parts if (config := config_of(folder, name)) is not None and wanted(config)]
    if not encoders:
        names = ", ".join(parts) or "none"
        raise UserError(
            f"{source}: this pipeline has no text encoder that convert knows (components: {names}); use it as it is"
        )
    named = index.get("_class_name")
    kind = str((named[-1] if isinstance(named, list) and named else named) or "a pipeline without a class")
    there, left_out = files_below(folder) if names is None else (names, [])
    others = there if names is None else files_loaded(names, parts)
    return Pipeline(
        folder,
        str(source),
        revision,
        kind,
        parts,
        tuple(encoders),
        tuple(name for name in others if name.partition("/")[0] not in encoders),
        tuple(left_out),
    )


def components(folder: Path, index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the library and class of each component that has a folder, by name. index: what model_index.json holds."""
    parts = {
        name: (kind[0], kind[1])
        for name, kind in index.items()
        if not name.startswith("_") and isinstance(kind, list) and [*map(type, kind)] == [str, str]
    }
    for name in parts:
        if Path(name).parts != (name,) or name.startswith("."):
            raise UserError(f"{folder / MODEL_INDEX}: {name!r} is not the name of a folder; {RESTORE}")
    return {name: kind for name, kind in parts.items() if (folder / name).is_dir()}


def config_of(folder: Path, name: str) -> dict[str, Any] | None:
    path = f"{name}/config.json"
    return read_json(contained(folder, path), "config") if (folder / path).exists() else None


def files_below(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of all files below ``folder``, and the names of its hidden folders, whose files are skipped.
    Raises UserError for a link to a folder, or to a file outside ``folder``."""
    files, hidden = [], []
    for root, folders, names in os.walk(folder):
        here = Path(root).relative_to(folder)
        for name in sorted(folders):
            if (folder / here / name).is_symlink():
                raise UserError(f"{folder / here / name} is a link to a folder; put the folder itself there")
            if name.startswith("."):
                hidden.append(f"{(here / name).as_posix()}/")
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [(here / name).as_posix() for name in sorted(names)]
    for name in files:
        contained(folder, name)
    return files, hidden


def variant_of(name: str) -> str | None:
    pieces = re.sub(r"-\d+-of-\d+", "", name).split(".")[1:]
    return next((piece for piece in pieces if piece not in ("safetensors", "bin", "index", "json")), None)


def files_loaded(paths: Iterable[str], parts: Iterable[str]) -> list[str]:
    """Return the ``paths`` that a pipeline with the components ``parts`` needs. If possible, a component's weights
    are safetensors without a variant, such as ``fp16`` in the file's name."""
    kept: list[str] = []
    by_folder: dict[str, list[str]] = {name: [] for name in parts}
    for path in sorted(paths):
        folder, _, name = path.partition("/")
        if not name:
            if any(fnmatch(path, pattern) for pattern in (*SMALL_FILES, "LICENSE*")):
                kept.append(path)
        elif folder in by_folder and "/" not in name:
            by_folder[folder].append(name)
    for folder, names in by_folder.items():
        weights = [name for name in names if is_weights(name)]
        kept += [f"{folder}/{name}" for name in names if name not in weights]
        for ending in ("safetensors", "bin"):
            files = [name for name in weights if re.search(rf"\.{ending}(\.index\.|$)", name)]
            if chosen := [name for name in files if variant_of(name) is None] or files:
                kept += [f"{folder}/{name}" for name in chosen]
                break
    return sorted(kept)


def bring(
    folder: Path, names: Sequence[str], target: Path, *, advance: Advance = lambda done, total: None
) -> dict[str, int]:
    """Link large files of ``folder`` into ``target``, copy the others, and return each linked file's size in bytes, by
    name. advance: called with the number of files done and of all files."""
    links: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        file, place = contained(folder, name), target / name
        nbytes = file.stat().st_size if file.is_file() else 0
        place.parent.mkdir(parents=True, exist_ok=True)
        if nbytes >= LINKED_FROM and linked_to(file, place):
            links[name] = nbytes
        else:
            copy(file, place, folder)
        advance(number, len(names))
    return links


def linked_to(file: Path, place: Path) -> bool:
    try:
        os.link(file.resolve(), place)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        return False
    return True
