"""Read byte ranges of weight files as tensors, and find the tensors in a ``torch.save`` file. Weights are not
memory-mapped, because a mapping kills the process if the file shrinks."""

from __future__ import annotations

import struct
import sys
import zipfile
from pathlib import Path

import torch

from ..errors import UserError
from .files import read_exactly, reading
from .headers import TensorInfo
from .sources import RESTORE, shown

SAFETENSORS_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}

SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}

FileState = tuple[int, int, int, int, int]  # device, inode, size in bytes, mtime and ctime in ns


def state_of(file: Path) -> FileState:
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


# --- bytes ---------------------------------------------------------------------------------------------------------


def bytes_of(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(bytearray())
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def read_range(info: TensorInfo, shape: tuple[int, ...], skip: int) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=SAFETENSORS_DTYPES[info.dtype])
    with reading(info.file) as source:
        read_exactly(source, bytes_of(tensor), info.offset + skip)
    return tensor


# --- pytorch_model.bin ---------------------------------------------------------------------------------------------


def record_sizes(file: Path) -> dict[int, int]:
    """Return the size in bytes of each record in a zip file. Keys are the offsets of the records' data. Raises
    ValueError for a compressed record, and if the tensors have another byte order than this machine."""
    sizes = {}
    with reading(file) as raw, zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED:
                raise ValueError("a record is compressed")
            if record.filename.endswith("/byteorder") and archive.read(record).decode() != sys.byteorder:
                raise ValueError("torch crashes as it turns the bytes of tensors on the meta device")
            raw.seek(record.header_offset + 26)
            name, extra = struct.unpack("<HH", raw.read(4))
            sizes[record.header_offset + 30 + name + extra] = record.file_size
    return sizes


def read_pickle(file: Path) -> dict[str, TensorInfo]:
    """Return the ``TensorInfo`` (dtype, shape, position in the file) of every tensor in a ``torch.save`` file, by name.
    Tensors can share bytes. Raises UserError if the file is incomplete or holds more than tensors."""
    resave = "load it with torch and save it with safetensors"
    unreadable = UserError(
        f"{file} cannot be read safely: it is damaged, compressed, saved by torch before 1.6, or holds more than"
        f" tensors; {RESTORE}, or, if you trust it, {resave}"
    )
    try:
        records = record_sizes(file)
        # With ``weights_only`` no code runs. torch gives offsets, but does not check that all bytes are there.
        content = torch.load(file, map_location="meta", weights_only=True)
    except UserError:  # no regular file, or no permission
        raise
    except Exception as error:  # the unpickler can raise any exception, by the file's content
        raise unreadable from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: holds a {type(content).__name__}, not a dict of tensors; {resave}")
    tensors = {}
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise UserError(f"{file}: entry {shown(name)} is not a tensor; {resave}")
        dtype = SAFETENSORS_NAMES.get(tensor.dtype, str(tensor.dtype))
        if dtype not in SAFETENSORS_DTYPES or not tensor.is_contiguous() or tensor.is_sparse:
            raise UserError(
                f"{file}: tensor {shown(name)} is sparse, not contiguous or of an unknown dtype ({dtype}); {resave}"
            )
        begin = int(getattr(tensor.untyped_storage(), "_checkpoint_offset", None) or 0)
        skip, nbytes = int(tensor.storage_offset()) * tensor.itemsize, tensor.numel() * tensor.itemsize
        if skip + nbytes > records.get(begin, 0):
            raise unreadable
        tensors[name] = TensorInfo(name, dtype, tuple(tensor.shape), file, begin + skip, nbytes)
    return tensors
