"""``rescale``: rescale a stock model in memory by the best plan for its observed ranges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..bounds.arithmetic import full_precision
from ..errors import UserError
from ..families.layout import Layout
from ..families.resolve import resolve
from ..measuring.agreement import check_modules
from ..measuring.batch import Batch
from ..measuring.interface import config_of
from ..measuring.meter import observe_ranges
from ..measuring.probe import batches, chosen_ids
from ..measuring.stock import set_attention
from ..quiet import quiet
from ..ranges import ModuleRange
from ..rescaling.apply import apply
from ..rescaling.before_norms import with_smaller_gradients
from ..rescaling.plan import Plan
from ..rescaling.planner import make_plan
from ..rescaling.weights import ModelTensors, source_weights
from ..targets import MARGIN_BITS, TARGETS
from .options import check_margin

FULL_PRECISION = "load it with dtype=torch.float32 to rescale it"


@quiet()
def rescale(
    model: Any, inputs: list[Batch] | None = None, *, target: str = "half", margin_bits: float = MARGIN_BITS
) -> Plan:
    """Rescale a stock fp32 model in place, exactly, by the best plan for ``inputs``, and return the plan.

    inputs: from ``measuring.probe.batches``; by default the built-in probe. fp32 outputs keep every bit, as far
    as fp32 holds gains that are stored less an offset. Norm eps attributes are scaled; set them in ``model.config``
    too before saving (``plan.eps``), as ``make_fp16_safe`` does. Raises UserError for a model of no known family, or
    whose modules do not match its config.
    """
    check_asked(target, margin_bits)
    source, layout = opened(model)
    ranges = observed(model, source, layout, inputs)
    plan = observed_plan(source, layout, ranges, target=target, margin_bits=margin_bits)
    apply(model, layout, plan)
    return plan


def check_asked(target: str, margin_bits: float) -> None:
    if target not in TARGETS:
        raise UserError(f"target {target!r} is unknown; choose one of {', '.join(TARGETS)}")
    check_margin(margin_bits)


def opened(model: Any) -> tuple[ModelTensors, Layout]:
    source = ModelTensors(model)
    layout = resolve(source)
    check_modules(layout, model, source.source)
    check_tied(model, layout, source.source)
    narrow = sorted({t.dtype for t in source.tensors.values()} & {"F16", "BF16"})
    if narrow:
        raise UserError(f"{source.source} holds {narrow[0]} parameters; {FULL_PRECISION}")
    return source, layout


def check_tied(model: Any, layout: Layout, where: str) -> None:
    """Raise UserError for a tensor tied to another that the plan would not scale with it."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    known = {id(parameters[name]) for name in layout.tensors if name in parameters}
    for name in layout.dropped:
        if name in parameters and name not in layout.family.ignorable and id(parameters[name]) not in known:
            raise UserError(
                f"{where}: {name} has the values of {layout.family.embedding} and is not tied to it; call"
                " model.tie_weights(), or set model.config.tie_word_embeddings = False for a head of its own"
            )


def observed(
    model: Any, source: ModelTensors, layout: Layout, inputs: list[Batch] | None = None
) -> Mapping[str, ModuleRange]:
    if inputs is None:
        config = config_of(model)
        inputs = batches(config, None, None, chosen=chosen_ids(config, source, layout))
    with full_precision(), evaluating(model):
        return observe_ranges(model, inputs)


def observed_plan(
    source: ModelTensors,
    layout: Layout,
    ranges: Mapping[str, ModuleRange],
    *,
    target: str,
    margin_bits: float,
    bounds: Mapping[str, ModuleRange] | None = None,
) -> Plan:
    """Return the best plan for observed ranges and, with ``bounds``, any input; eps are scaled, so nothing drifts."""
    weights = source_weights(source, layout)
    plan = make_plan(layout, weights, ranges, target=target, margin_bits=margin_bits, bounds=bounds).plan
    if target == "train":
        plan = with_smaller_gradients(plan, layout, weights, ranges, bounds)
    return plan.model_copy(update={"gain_correction": {}, "drift": None})


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    attention = str(config_of(model)._attn_implementation)
    set_attention(model.eval(), "eager")
    try:
        yield
    finally:
        set_attention(model, attention)
        for module in training:
            module.training = True
