"""Reading a checkpoint: where every tensor lies, and its bytes on request.

The files are someone else's, so nothing in them is believed: stock readers take an index that points out of its
folder, or a missing tensor without a word. Everything is checked when the checkpoint is opened, and after that a tensor
is a range of bytes in a file (``formats``). A source that is one file of weights (``single_file``) is a checkpoint
like any other: its folder, in scratch space, holds all but the weights, which stay where they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from ..json_text import loads
from .formats import (
    RESTORE,
    SAFETENSORS_DTYPES,
    FileState,
    RunningHash,
    TensorInfo,
    bytes_of,
    check_not_quantised,
    clipped,
    read_exactly,
    read_header,
    read_json,
    read_pickle,
    read_range,
    reading,
    regular_size,
    shown,
    state_of,
)
from .hub import reading_from
from .naming import names_in_files
from .places import local_source, own_name
from .single_file import SingleFile, open_single_file

SINGLE_OR_SHARDED = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Where stock code looks for weights, in its order."""


SMALL_FILES = ("*.json", "*.txt", "*.model", "README.md")
"""Patterns of what a Hub repository has besides weights."""


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its config and where each tensor lies; the weights stay on the disk.

    ``source``: what the user typed. ``revision``: the commit that a Hub id stood for, else None. ``tensors``: by
    name, sorted. ``weight_files``: in shard order. ``index``: the parsed index file, None for a single file.
    ``subfolder``: the folder below the source that was asked for. ``notes``: what was assumed of a source that is one
    file, in sentences for its user. ``stored_names``: what files call those tensors whose names are another in modules;
    ``tensors`` has the latter.
    """

    folder: Path
    source: str
    revision: str | None
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    weight_files: tuple[Path, ...]
    index: dict[str, Any] | None
    states: Mapping[Path, FileState] = field(default_factory=dict)
    subfolder: str | None = None
    notes: tuple[str, ...] = ()
    stored_names: Mapping[str, str] = field(default_factory=dict)

    def check_unchanged(self) -> None:
        """Raise UserError for a weight file that is not as it was when the checkpoint was opened.

        Told by inode, size and times of the last change, so that no byte is read again; whatever writes to a file
        changes them.
        """
        for file, before in self.states.items():
            if state_of(file) != before:
                raise UserError(f"{file} changed while it was read; wait until nothing writes to it and start again")

    @property
    def name(self) -> str:
        """The source as a report may name it: a Hub id as typed, of a local folder only its own name."""
        if self.revision is not None:
            return self.source
        return "/".join(filter(None, (own_name(self.source), self.subfolder)))

    def file_name(self, file: Path) -> str:
        """Return what a report calls a file of weights: its path in the folder, or of a single file its own name."""
        return file.relative_to(self.folder).as_posix() if file.is_relative_to(self.folder) else file.name

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor in its own dtype and in memory of its own.

        Raises UserError where the file cannot be read or has changed since it was opened.
        """
        info = self.tensors[name]
        return read_range(info, info.shape, 0)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows ``start`` to ``stop`` (exclusive) of the first axis of a tensor, reading only their bytes.

        Raises UserError as ``read`` does, IndexError for rows that the tensor does not have.
        """
        info = self.tensors[name]
        if not info.shape or not 0 <= start <= stop <= info.shape[0]:
            raise IndexError(f"{name} has shape {info.shape}, not rows {start} to {stop}")
        row = info.nbytes // info.shape[0] if info.shape[0] else 0
        return read_range(info, (stop - start, *info.shape[1:]), start * row)

    def read_some_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        """Return the rows of these numbers of a tensor, reading only their bytes.

        Raises as ``read_rows`` does.
        """
        info = self.tensors[name]
        if not info.shape or not all(0 <= row < info.shape[0] for row in rows):
            raise IndexError(f"{name} has shape {info.shape}, and not all of the rows {min(rows)} to {max(rows)}")
        found = torch.empty((len(rows), *info.shape[1:]), dtype=SAFETENSORS_DTYPES[info.dtype])
        size = info.nbytes // info.shape[0]
        with reading(info.file) as descriptor:
            for row, place in zip(rows, found, strict=True):
                read_exactly(descriptor, bytes_of(place), info.offset + row * size, info.file)
        return found

    def sha256(self, file: Path) -> str:
        """Return the SHA-256 of a file in hexadecimal, read in pieces of 1 MB."""
        with reading(file) as descriptor:
            running = RunningHash(descriptor, file)
            running.catch_up(regular_size(descriptor, file))
        return running.digest.hexdigest()


VIEWS: dict[Path, Checkpoint] = {}
"""The checkpoints that are one file of weights, by the folders in scratch space that hold all else of them. Only this
process makes such folders, so that no file of a folder can lead to weights outside it."""


def open_checkpoint(
    source: str | Path,
    subfolder: str | None = None,
    *,
    config: Path | Mapping[str, Any] | None = None,
    endpoint: str | None = None,
) -> Checkpoint:
    """Open the checkpoint in a local folder, in one file of weights or, where neither exists, under a Hub id
    ``org/name[@revision]``.

    subfolder: the model's folder below it, as in diffusers layouts, or in a file the prefix of its tensors' names.
    config: the config.json, or what it holds, that describes one file of weights, instead of the one inferred.
    endpoint: the Hub's address, by default the environment's. Raises UserError for anything that is not a complete
    checkpoint with plain weights.
    """
    folder, revision = local_source(source), None
    if folder in VIEWS and subfolder is None:
        return VIEWS[folder]
    if folder is not None and not folder.is_dir():
        return view(open_single_file(folder, subfolder, config), source, subfolder)
    if config is not None:
        raise UserError(f"{source} has a config.json of its own; leave out --config, which is for single files")
    if folder is None:
        folder, revision = download(str(source), subfolder, endpoint)
    if subfolder is not None:
        folder = subfolder_of(folder, subfolder)
    found = read_config(folder)
    files, index = weight_files(folder)
    states = {file: state_of(file) for file in files}
    tensors = collect(files, index, folder)
    for info in tensors.values():
        check_not_quantised(info.dtype, info.name, info.file)
    tensors, stored = by_modules(tensors, str(source))
    return Checkpoint(
        folder, str(source), revision, found, tensors, files, index, states, subfolder, stored_names=stored
    )


def by_modules(tensors: dict[str, TensorInfo], source: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return tensors under the names that modules have for them, and the names in files of those where they differ."""
    try:
        stored = names_in_files(tensors)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    modules = {name: module for module, name in stored.items()}
    return dict(sorted((modules.get(name, name), info) for name, info in tensors.items())), stored


def view(opened: SingleFile, source: str | Path, subfolder: str | None) -> Checkpoint:
    """Return one file of weights as a checkpoint, which its folder in scratch space then stands for."""
    made = Checkpoint(
        folder=opened.folder,
        source=str(source),
        revision=None,
        config=opened.config,
        tensors=opened.tensors,
        weight_files=(opened.file,),
        index=None,
        states=opened.states,
        subfolder=subfolder,
        notes=opened.notes,
    )
    VIEWS[opened.folder] = made
    return made


def read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's ``config.json``; raise UserError where it is missing, broken, or not of plain weights."""
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"{folder} is an adapter (adapter_config.json);"
            " merge it into its base model with peft's merge_and_unload and give the result"
        )
    file = folder / "config.json"
    if not file.exists():
        if (folder / "model_index.json").exists():
            models = sorted(path.parent.name for path in folder.glob("*/config.json"))
            names = " or ".join([name for name in models if "text_encoder" in name] or models) or "its folder"
            raise UserError(f"{folder} is a pipeline of several models; name one with --subfolder: {names}")
        raise UserError(f"{folder}: no config.json; give the folder of a checkpoint, or --subfolder for one below it")
    config = read_json(contained(folder, "config.json"), "config")
    if config.get("quantization_config"):
        raise UserError(
            f"{file}: the checkpoint is quantised (quantization_config); give the one it was quantised from"
        )
    if config.get("configuration_files", ["config.json"]) not in ([], ["config.json"]):
        raise UserError(
            f"{file}: names other configs by the version of transformers (configuration_files), and that decides what"
            " runs; put the one that is meant in its place, without the key"
        )
    if config.get("auto_map"):
        raise UserError(
            f"{file}: the model runs code of its own (auto_map), of which nothing is known here;"
            " give a checkpoint of a stock class"
        )
    return config


# --- which files ---------------------------------------------------------------------------------------------------


def subfolder_of(folder: Path, name: str) -> Path:
    """Return a folder's sub-folder; raise UserError where it is missing or the name leaves the folder."""
    path = Path(name)
    if path.anchor or ".." in path.parts:
        raise UserError(f"subfolder {name!r} leaves {folder}; name a folder inside it")
    if not (folder / path).is_dir():
        raise UserError(f"{folder} has no folder {name!r}; name one that it has")
    return folder / path


def contained(folder: Path, name: str) -> Path:
    """Return the path of a folder's file; raise UserError where the name or a link leads out of the folder.

    The Hub's cache links ``snapshots/<commit>/…`` to ``blobs/…`` of the same repository, which counts as inside.
    """
    path = Path(name)
    if path.anchor or ".." in path.parts or not path.parts or "\0" in name:
        raise UserError(f"{folder}: file name {shown(name)} leaves the folder; {RESTORE}")
    try:
        inside = folder.resolve()
        real = (folder / path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name too long or not of text
        raise UserError(f"{folder}: file name {shown(name)} cannot be followed; {RESTORE}") from error
    if real.is_relative_to(inside):
        return folder / path
    for snapshot in (inside, *inside.parents):
        if snapshot.parent.name == "snapshots" and real.is_relative_to(snapshot.parent.parent / "blobs"):
            return folder / path
    raise UserError(f"{folder / path} is a link to {real}, outside the folder; put the file itself there")


def weight_files(folder: Path) -> tuple[tuple[Path, ...], dict[str, Any] | None]:
    """Return the weight files that stock code would read from a folder, and their index (None for a single file)."""
    found = next((name for name in SINGLE_OR_SHARDED if (folder / name).exists()), None)
    if found is None:
        endings = (".safetensors", ".bin", ".h5", ".msgpack", ".gguf", ".ckpt", ".pt", ".ot")
        others = sorted(p.name for p in folder.iterdir() if p.name.endswith(endings))
        if (variant := next((n for n in others if re.fullmatch(r"model\.[^.]+\.safetensors", n)), None)) is not None:
            raise UserError(f"{folder}: has weights as a variant alone; rename {variant} to model.safetensors")
        hint = f" (it has {', '.join(others[:3])})" if others else ""
        raise UserError(
            f"{folder}: no model.safetensors, pytorch_model.bin or index of shards{hint};"
            " load and save the model with transformers to get one"
        )
    if not found.endswith(".index.json"):
        return (contained(folder, found),), None
    index = read_json(contained(folder, found), "index")
    placed = index.get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise UserError(f"{folder / found}: no weight_map; {RESTORE}")
    for name, shard in placed.items():
        if not isinstance(shard, str):
            raise UserError(f"{folder / found}: the place of tensor {shown(name)} is not a file name; {RESTORE}")
    files = tuple(contained(folder, shard) for shard in sorted(set(placed.values())))
    for file in files:
        if not os.path.exists(file):  # False for names that no file can have, too
            raise UserError(
                f"{folder / clipped(file.name)} is missing, but {found} names it; fetch it from the original checkpoint"
            )
    return files, index


def collect(files: tuple[Path, ...], index: Mapping[str, Any] | None, folder: Path) -> dict[str, TensorInfo]:
    """Return where every tensor of ``files`` lies, sorted by name; raise UserError where files and index disagree."""
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in (read_header if file.suffix == ".safetensors" else read_pickle)(file).items():
            if name in tensors:
                raise UserError(f"{file}: tensor {shown(name)} is in {tensors[name].file.name} too; {RESTORE}")
            tensors[name] = info
    if not tensors:
        raise UserError(f"{files[0]}: no tensors in it; {RESTORE}")
    if index is not None:
        placed = index["weight_map"]
        for name, shard in placed.items():
            if name not in tensors or tensors[name].file != folder / shard:
                raise UserError(
                    f"{folder / shard}: tensor {shown(name)} is not in it, but the index says so; {RESTORE}"
                )
        for name, info in tensors.items():
            if name not in placed:
                raise UserError(
                    f"{info.file}: tensor {shown(name)} is not in the index;"
                    " fetch the index from the original checkpoint"
                )
    return dict(sorted(tensors.items()))


# --- Hub -----------------------------------------------------------------------------------------------------------


def download(source: str, subfolder: str | None, endpoint: str | None = None) -> tuple[Path, str]:
    """Fetch a Hub repository's small files and the weights that stock code would use; return the snapshot's folder
    and its commit.

    Raises UserError where the repository, the revision, the permission, the network or the space is missing.
    """
    inside, (folder, commit) = f"{subfolder}/" if subfolder else "", fetched(source, SMALL_FILES, endpoint)
    modules = [f"{name}/*" for name in module_folders(folder)]
    for name in SINGLE_OR_SHARDED:
        names = [inside + name]
        if name.endswith(".index.json"):
            index = folder / inside / name
            if not index.exists():
                continue
            placed = read_json(index, "index").get("weight_map")
            names = [inside + str(shard) for shard in set(placed.values())] if isinstance(placed, dict) else names
        folder, _ = fetched(source, (*SMALL_FILES, *modules, *names), endpoint, commit)
        if (folder / names[0]).exists():
            break
    return folder, commit


def fetched(
    source: str, patterns: Sequence[str], endpoint: str | None = None, commit: str | None = None
) -> tuple[Path, str]:
    """Fetch the files of a Hub repository that ``patterns`` describe, at ``commit`` or at what ``source`` names; return
    the snapshot's folder and its commit. Raises UserError as ``download`` does."""
    from huggingface_hub import snapshot_download

    repo, _, revision = source.partition("@")
    at = commit or revision or None
    folder = reading_from(
        repo,
        at,
        lambda: Path(snapshot_download(repo, revision=at, allow_patterns=list(patterns), endpoint=endpoint)),
        endpoint,
    )
    return folder, folder.name


def hub_files(source: str, folder: Path, endpoint: str | None = None) -> dict[str, int]:
    """Return the files of a Hub repository with their sizes in bytes, at the commit of the snapshot ``folder``; without
    a network those that the snapshot has. Raises UserError as ``download`` does."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.hf_api import RepoFile

    if constants.HF_HUB_OFFLINE:
        return {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    repo = source.partition("@")[0]

    def tree() -> dict[str, int]:
        entries = HfApi(endpoint=endpoint).list_repo_tree(repo, revision=folder.name, recursive=True)
        return {entry.path: entry.size for entry in entries if isinstance(entry, RepoFile)}

    return reading_from(repo, folder.name, tree, endpoint)


def module_folders(folder: Path) -> list[str]:
    """Return the sub-folders that a sentence encoder's ``modules.json`` names; none where it cannot be understood."""
    try:
        listing = loads((folder / "modules.json").read_text(encoding="utf-8"))
        return [str(module["path"]) for module in listing if module["path"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
