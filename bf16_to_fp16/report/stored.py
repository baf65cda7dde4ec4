"""Read the plan, source and hashes of a stored report."""

from __future__ import annotations

import base64
import hashlib
import math
from pathlib import Path

import torch

from ..checkpoint.formats import SAFETENSORS_DTYPES
from ..checkpoint.recorded import REPORT, recorded, recorded_plan
from ..errors import UserError
from ..families.layout import Layout
from ..rescaling.centred import centred_tensors
from ..rescaling.exponents import check_centred
from ..rescaling.plan import Plan
from ..targets import TARGETS
from .schema import Report, Source, typed, unlike

STORED = {"F64", "F32", "F16", "BF16"}  # dtypes of a source in safetensors' spelling


def read_plan(path: Path, target: str | None = None) -> Report:
    """Return a report's plan, target and origin alone, from a file or folder. target: the only target to accept; None
    accepts any."""
    file, data = recorded_plan(path, target)
    report = typed({key: data[key] for key in ("plan", "target", "source", "finetune") if key in data}, file)
    if report.target not in (None, *TARGETS):
        raise UserError(unlike(file, "target"))
    return report


def read_written(folder: Path) -> Report:
    """Return the report in a folder that ``convert`` wrote. Raises UserError for a report that is not complete."""
    path = folder / REPORT
    report = typed(recorded(folder), path)
    if not {report.source.dtype, *report.source.dtypes.values()} <= STORED:
        raise UserError(unlike(path, "source.dtype"))
    if any(entry.nbytes is None or entry.sha256 is None for entry in report.output.files):
        raise UserError(unlike(path, "output.files"))
    return report


def originals(layout: Layout, plan: Plan, source: Source) -> dict[str, torch.Tensor]:
    """Return the source's tensors that a plan replaced, by name, from the copies in ``source``. Raises UserError for a
    copy that is missing, altered or not of this plan."""
    check_centred(layout, plan)
    names, tensors = centred_tensors(layout, plan.centred_keys), {}
    for name in sorted({*names, *source.replaced}):
        entry, dtype = source.replaced.get(name), SAFETENSORS_DTYPES.get(source.dtypes.get(name, str(source.dtype)))
        if entry is None or dtype is None or name not in names:
            raise UserError(
                f"the report's copy of the source's tensor {name} is missing or not of its plan; take"
                " the report that convert wrote"
            )
        shape = layout.tensors[name].shape
        try:
            values = base64.b64decode(entry.values, validate=True)
        except ValueError:
            values = b""
        if hashlib.sha256(values).hexdigest() != entry.sha256 or len(values) != math.prod(shape) * dtype.itemsize:
            raise UserError(f"the source's {name} in the report was changed; take the report that convert wrote")
        tensors[name] = torch.frombuffer(bytearray(values), dtype=dtype).view(shape)
    return tensors
