"""Open and check a checkpoint, and read its tensors on request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from . import files, formats, headers
from .contents import read_config, weight_files
from .hub import download
from .naming import names_in_files
from .single_file import open_single_file
from .sources import RESTORE, local_source, own_name, shown, subfolder_of


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint, whose weights stay on disk."""

    folder: Path
    source: str
    revision: str | None  # the commit of a Hub id
    config: dict[str, Any]
    tensors: dict[str, headers.TensorInfo]  # by the name that a tensor has in transformers' modules
    weight_files: tuple[Path, ...]
    index: dict[str, Any] | None  # the index file's content; None for a single weight file
    states: Mapping[Path, formats.FileState] = field(default_factory=dict)  # of each weight file when it was opened
    subfolder: str | None = None
    notes: tuple[str, ...] = ()  # what was assumed on opening a single file
    stored_names: Mapping[str, str] = field(default_factory=dict)  # names in files that differ, by name in ``tensors``
    own_folder: Path | None = None  # the source's, if ``folder`` is a temporary copy

    @property
    def home(self) -> Path:
        """The source's own folder, even where ``folder`` is a temporary copy."""
        return self.own_folder or self.folder

    def check_unchanged(self) -> None:
        for file, before in self.states.items():
            if formats.state_of(file) != before:
                raise UserError(f"{file} changed while it was read; wait until nothing writes to it and start again")

    @property
    def name(self) -> str:
        """The source's name in reports: a Hub id, or a local folder without its parents."""
        if self.revision is not None:
            return self.source
        return "/".join(filter(None, (own_name(self.source), self.subfolder)))

    def file_name(self, file: Path) -> str:
        return file.relative_to(self.home).as_posix() if file.is_relative_to(self.home) else file.name

    def read(self, name: str) -> torch.Tensor:
        info = self.tensors[name]
        return formats.read_range(info, info.shape, 0)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        info = self.tensors[name]
        if not info.shape or not 0 <= start <= stop <= info.shape[0]:
            raise IndexError(f"{name} has shape {info.shape}, which does not hold the rows {start} to {stop}")
        row = info.nbytes // info.shape[0] if info.shape[0] else 0
        return formats.read_range(info, (stop - start, *info.shape[1:]), start * row)

    def read_some_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        info = self.tensors[name]
        if not info.shape or not all(0 <= row < info.shape[0] for row in rows):
            raise IndexError(f"{name} has shape {info.shape}, and not all of the rows {min(rows)} to {max(rows)}")
        values = torch.empty((len(rows), *info.shape[1:]), dtype=formats.SAFETENSORS_DTYPES[info.dtype])
        size = info.nbytes // info.shape[0]
        with files.reading(info.file) as source:
            for row, place in zip(rows, values, strict=True):
                files.read_exactly(source, formats.bytes_of(place), info.offset + row * size)
        return values


VIEWS: dict[Path, Checkpoint] = {}  # checkpoints opened from one file, by their scratch folder


def open_checkpoint(source: str | Path, subfolder: str | None = None, *, endpoint: str | None = None) -> Checkpoint:
    """Open a local folder, one file of weights, or a Hub id ``org/name[@revision]``; raise UserError for anything else.
    subfolder: the model's folder inside the source. endpoint: the Hub's address."""
    folder, revision = local_source(source), None
    if folder in VIEWS and subfolder is None:
        return VIEWS[folder]
    if folder is not None and not folder.is_dir():
        if subfolder is not None:
            raise UserError(f"{folder} is one file of weights, which has no folders; leave out --subfolder")
        states = {folder: formats.state_of(folder)}
        scratch, own_config, tensors, notes = open_single_file(folder)
        one = Checkpoint(scratch, str(source), None, own_config, tensors, (folder,), None, states, notes=notes)
        return VIEWS.setdefault(scratch, one)
    if folder is None:
        folder, revision = download(str(source), subfolder, endpoint)
    if subfolder is not None:
        folder = subfolder_of(folder, subfolder)
    own_config = read_config(folder)
    files, index = weight_files(folder)
    tensors = collect(files, index, folder)
    states = {file: formats.state_of(file) for file in files}
    for info in tensors.values():
        headers.check_not_quantised(info.dtype, info.name, info.file)
    classes = own_config.get("architectures")
    stored = names_in_files(tensors, str(source), classes if isinstance(classes, list) else ())
    modules = {name: module for module, name in stored.items()}
    tensors = dict(sorted((modules.get(name, name), info) for name, info in tensors.items()))
    return Checkpoint(
        folder, str(source), revision, own_config, tensors, files, index, states, subfolder, stored_names=stored
    )


def collect(files: tuple[Path, ...], index: Mapping[str, Any] | None, folder: Path) -> dict[str, headers.TensorInfo]:
    tensors: dict[str, headers.TensorInfo] = {}
    for file in files:
        for name, info in (headers.read_header if file.suffix == ".safetensors" else formats.read_pickle)(file).items():
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
                    f"{folder / shard}: tensor {shown(name)} is missing, though the index lists it there; {RESTORE}"
                )
        for name, info in tensors.items():
            if name not in placed:
                raise UserError(
                    f"{info.file}: tensor {shown(name)} is not in the index;"
                    " fetch the index from the original checkpoint"
                )
    return dict(sorted(tensors.items()))
