"""``rescale``: a stock model in memory, rescaled in place by the best plan for what it shows."""

from __future__ import annotations

from typing import Any

from ..errors import UserError
from ..families.resolve import resolve
from ..observe.meter import observe_ranges
from ..quiet import quiet
from ..rescaling.apply import apply
from ..rescaling.plan import Plan
from ..rescaling.planner import MARGIN_BITS, make_plan
from ..rescaling.weights import ModelTensors, source_weights
from ..run.agreement import check_modules
from ..run.probe import Batch, batches, chosen_ids, config_of


@quiet()
def rescale(
    model: Any, inputs: list[Batch] | None = None, *, target: str = "half", margin_bits: float = MARGIN_BITS
) -> Plan:
    """Rescale a stock fp32 model in place, exactly, by the best plan for what it shows on ``inputs``, and return
    the plan.

    inputs: batches as ``run.probe.batches`` makes them, by default the built-in probe. The head stays as tied as it is.
    The model's outputs keep every bit in fp32; norm eps attributes are scaled with the residual stream, so
    ``model.config`` must say so too before saving (``plan.eps``). Raises UserError for a model of no
    known family, or whose modules do not do what its config says.
    """
    source = ModelTensors(model)
    layout = resolve(source)
    check_modules(layout, model, source.source)
    narrow = sorted({t.dtype for t in source.tensors.values()} & {"F16", "BF16"})
    if narrow:
        raise UserError(f"{source.source} holds {narrow[0]} parameters; load it with dtype=torch.float32 to rescale it")
    if inputs is None:
        config = config_of(model)
        inputs = batches(config, None, None, chosen=chosen_ids(config, source, layout))
    ranges = observe_ranges(model, inputs)
    planned = make_plan(layout, source_weights(source, layout), ranges, target=target, margin_bits=margin_bits)
    apply(model, layout, planned.plan)
    return planned.plan
