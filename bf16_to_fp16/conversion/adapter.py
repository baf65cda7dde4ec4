"""Rescale a LoRA adapter by a converted checkpoint's plan, or back by the plan's inverse. No model is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..checkpoint.adapter_config import CONFIG, NOTE, TENSORS, config_for
from ..checkpoint.folder import carry_over, records
from ..checkpoint.reader import open_checkpoint
from ..checkpoint.sources import written_folder
from ..checkpoint.staging import check_out, staged
from ..errors import UserError, first_line
from ..families.layout import Layout
from ..families.resolve import head_scale, resolve
from ..json_text import write_json
from ..report.schema import Source
from ..report.stored import read_written
from ..report.uses import whole_plan
from ..rescaling.adapters import scaled_adapter
from ..rescaling.edits import edits_of
from ..rescaling.plan import Plan, inverse
from .undo import config_before


@dataclass(frozen=True)
class ConvertedAdapter:
    """The result of ``convert_adapter``. ``base``: the checkpoint that the adapter is now for. ``notes``: warnings."""

    out: Path
    base: str
    tensors: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"out": str(self.out), "base": self.base, "tensors": len(self.tensors), "notes": list(self.notes)}


def convert_adapter(
    adapter: str | Path, out: str | Path, base: str | Path, *, back: bool = False, force: bool = False
) -> ConvertedAdapter:
    """Rescale a LoRA adapter that was trained on the source of ``base`` so that it fits ``base``, and write it to
    ``out``.

    base: a folder that ``convert`` wrote. back: the adapter was trained on ``base``; rescale it for the source instead.
    With an exact plan both checkpoints with their adapters compute the same function. No certificate covers them.
    Raises UserError for another kind of adapter, a pickle, an adapter that needs no rescaling, or a tensor that cannot
    be rescaled; ``out`` is then not written."""
    adapter, out, base = Path(adapter), Path(out), written_folder(base)
    config = config_for(adapter, base, back=back)
    check_out(out, adapter, base, force=force)
    checkpoint, report = open_checkpoint(base), read_written(base)
    origin, run = report.source, report.finetune
    layout, plan = resolve(checkpoint), whole_plan(report.of_plan, run)
    gain = head_gain(layout, plan, checkpoint.config, origin)
    applied, gain = (inverse(plan), 1 / gain) if back else (plan, gain)
    on = (origin.path or str(base)) if back else str(base)
    place = {"base_model_name_or_path": on, "revision": origin.revision if back else None}
    rescaled = rescale_adapter(adapter, out, layout, applied, gain, config | place, back=back, force=force)
    notes = []
    if run is not None:
        notes.append("the converted checkpoint was finetuned: with the adapter, its outputs differ from the original's")
    if edits_of(layout, plan).exponents:
        notes.append("the conversion has edits, measured without an adapter: compare the outputs with the original's")
    return ConvertedAdapter(out, on, rescaled, tuple(notes))


def rescale_adapter(
    adapter: Path,
    out: Path,
    layout: Layout,
    plan: Plan,
    head_gain: float,
    config: Mapping[str, Any],
    *,
    back: bool,
    force: bool,
) -> dict[str, Tensor]:
    try:
        tensors = load_file(adapter / TENSORS)
        if not tensors:
            raise UserError("holds no tensors; save the adapter again")
        rescaled = scaled_adapter(tensors, layout, plan, head_gain)
    except UserError as error:
        raise UserError(f"{adapter / TENSORS}: {error}") from None
    except (SafetensorError, OSError) as error:
        reason = f"cannot be read ({first_line(error)}); save the adapter again"
        raise UserError(f"{adapter / TENSORS}: {reason}") from error
    with staged(out, force=force) as work:
        carry_over(adapter, work, back=back)
        save_file({n: t.contiguous() for n, t in rescaled.items()}, work / TENSORS, metadata={"format": "pt"})
        write_json(work / CONFIG, config)
        note = {"for": "original" if back else "converted", "base": config["base_model_name_or_path"]}
        write_json(work / NOTE, note | {"output": {"files": records(work, {NOTE})}})
    return rescaled


def head_gain(layout: Layout, plan: Plan, config: Mapping[str, Any], origin: Source) -> float:
    if not plan.untied_head or layout.family.untie != "scaled":
        return 1.0
    return head_scale(layout.family, config_before(config, origin), True)
