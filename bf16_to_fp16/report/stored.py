"""Read the plan, source and hashes of a stored report."""

from __future__ import annotations

import base64
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from ..checkpoint.formats import SAFETENSORS_DTYPES
from ..checkpoint.recorded import NO_PLAN, REPORT, packed_data, recorded, recorded_plan
from ..errors import UserError
from ..families.layout import Layout
from ..rescaling.centred import centred_tensors
from ..rescaling.exponents import check_centred
from ..rescaling.plan import Plan
from .schema import Report, Source, WeightsEntry, typed

STORED = {"F64", "F32", "F16", "BF16"}  # dtypes of a source in safetensors' spelling


def read_plan(path: Path) -> Plan:
    return read_plan_and_target(path)[0]


def read_plan_and_target(path: Path, target: str | None = None) -> tuple[Plan, str]:
    report = read_parts(path, "plan", "target", target=target)
    assert report.plan is not None  # asked for
    return report.plan, report.target or target or "half"


def read_start(path: Path) -> Plan | None:
    """Return the plan by which a finetune rescaled the original before training; None for any other conversion."""
    run = read_parts(path, "finetune").finetune
    return None if run is None else run.start


def read_parts(path: Path, *keys: str, target: str | None = None) -> Report:
    file, data = recorded_plan(path, target)
    return typed({key: data[key] for key in keys if key in data}, file, {}, NO_PLAN)


@dataclass(frozen=True)
class Packed:
    layout: str
    plan: Plan
    source: Source
    weights: WeightsEntry


def read_packed(file: Path) -> Packed:
    way_back = packed_data(file)
    try:
        plan, source = Plan.model_validate(way_back["plan"]), Source.model_validate(way_back["source"])
        weights = WeightsEntry.model_validate(way_back["weights"])
    except ValidationError as error:
        raise UserError(f"{file}: the plan in its metadata is damaged; convert the source again") from error
    if not {source.dtype, *source.dtypes.values()} <= STORED:
        raise UserError(f"{file}: does not say what the source was; convert the source again")
    return Packed(way_back["layout"], plan, source, weights)


def read_origin(path: Path) -> Source:
    words = "does not say what the source was; take the one that convert wrote"
    origin = typed({"source": recorded(path)["source"]}, path / REPORT, {}, words).source
    if not {origin.dtype, *origin.dtypes.values()} <= STORED:
        raise UserError(f"{path / REPORT}: {words}")
    return origin


def originals(layout: Layout, plan: Plan, source: Source) -> dict[str, torch.Tensor]:
    """Return the source's tensors that a plan replaced, by name; raise UserError if ``source`` has other ones."""
    check_centred(layout, plan)
    names, tensors = centred_tensors(layout, plan.centred_keys), {}
    for name in sorted({*names, *source.replaced}):
        entry, dtype = source.replaced.get(name), SAFETENSORS_DTYPES.get(source.dtypes.get(name, str(source.dtype)))
        if entry is None or dtype is None or name not in names:
            raise UserError(
                f"the report does not hold what the plan replaced ({name}); take the one that convert wrote"
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
