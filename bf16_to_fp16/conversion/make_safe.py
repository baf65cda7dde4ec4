"""``make_fp16_safe``: rescale a model in memory before fp16 AMP training, by the smallest exponents that certify it."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..bounds.arithmetic import MAX_LENGTH, Arithmetic, full_precision
from ..bounds.certificate import bound, is_certified
from ..bounds.spectral import Spectra
from ..checkpoint.contents import read_config
from ..checkpoint.recorded import CONVERTED_KEY, REPORT
from ..errors import UserError
from ..families.configs import with_value
from ..families.known import FAMILIES, class_named, names_of
from ..families.layout import Layout, TensorReader
from ..families.resolve import ModelTensors, effective, resolve, source_weights, stored
from ..measuring.agreement import check_modules
from ..measuring.batch import Batch
from ..measuring.meter import observe_ranges
from ..measuring.probe import batches, chosen_ids
from ..measuring.stock import config_of, set_attention
from ..numerics import FP16_MAX
from ..progress import Progress
from ..quiet import quiet
from ..ranges import ModuleRange
from ..report.steps import signals_of
from ..report.stored import originals as stored_originals
from ..report.stored import read_plan, read_written
from ..rescaling.apply import apply, scale
from ..rescaling.centred import centred, centred_tensors, tables_of
from ..rescaling.channels import folded
from ..rescaling.exponents import exponents_of, norm_exponents, output_factors
from ..rescaling.plan import Plan, composed, mark_of
from ..rescaling.planner import make_plan, with_smaller_gradients
from ..targets import MARGIN_BITS, TARGETS
from .adapter import head_gain
from .made_safe import EMBEDDINGS, MARK, MadeSafe, check_plain, on_the_cpu, set_eps_of_configs
from .options import check_margin
from .undo import with_start


@quiet()
def make_fp16_safe(
    model: Any, *, target: str = "train", margin_bits: float = MARGIN_BITS, max_length: int = MAX_LENGTH
) -> MadeSafe:
    """Rescale a transformers model in fp32 in memory, so that it can be trained under fp16 AMP, and return the result.

    ``undo`` of the result restores every weight bit for bit; after training it keeps the trained function exactly. The
    fp32 outputs keep every bit, except that gains stored minus an offset (Gemma's) are rounded to fp32. The config's
    eps changes with the weights. A Pegasus has no eps in its config, so call ``undo`` before you save a Pegasus. With
    ``train``, norms that read a linear's output can get an eps that differs from the config's. A saved model can then
    compute other bits than the model in memory, unless you call ``undo`` before you save it.

    target: as in ``convert``; ``train`` leaves room for dropout, gradients and moving weights. margin_bits: the
    headroom that values of the built-in probe keep. max_length: the most positions for which the certificate holds. A
    model that was made safe before, or is certified as it is, is not changed. Raises UserError for a model of no known
    family, in 16 bits, with an adapter, or spread over devices."""
    check_asked(target, margin_bits)
    check_plain(model, "call make_fp16_safe before get_peft_model")
    check_known(model)
    if MARK in model.__dict__:
        return model.__dict__[MARK]
    with on_the_cpu(model):
        source, layout = opened(model)
        arithmetic, spectra = Arithmetic(max_length), Spectra(source_weights(source, layout))
        moved, passed = plan_of(model, source, layout, arithmetic, spectra, target, margin_bits)
        after = layout_under(layout, moved)
        weights = rounded(source, layout, moved)
        proof = bound(after, weights, arithmetic, target=target, spectra=spectra.for_others())
        worst = min(proof.sites, key=lambda site: site.headroom_bits)
        kept_for_undo = fields_for_undo(model, source, layout, moved)
        plan: Plan = kept_for_undo["plan"]
        if moved.moves or moved.centred_keys:
            apply(model, layout, moved)
            if layout.family.eps_key is not None:
                set_eps_of_configs(model, layout, after.eps)
        tables = (name for name, at in centred_tensors(layout, plan.centred_keys).items() if tables_of(at))
        kept = {name: model.get_parameter(name).detach().clone() for name in tables}
    table = after.tensors[after.table(after.stacks()[0].ends)]
    safe = MadeSafe(
        target=target,
        certified=proof.holds,
        headroom_bits=worst.headroom_bits,
        tightest=worst.name,
        tables=kept,
        outputs=output_factors(after, plan),
        inputs={EMBEDDINGS: folded(exponents_of(table, plan).full(table.shape)[0])},
        passed=passed,
        layout=layout,
        **kept_for_undo,
    )
    safe.mark(model)
    return safe


def plan_of(
    model: Any,
    source: ModelTensors,
    layout: Layout,
    arithmetic: Arithmetic,
    spectra: Spectra,
    target: str,
    margin_bits: float,
) -> tuple[Plan, str]:
    """Return the plan for a model, and the name of an observed signal that the plan leaves over 65504, or "". The plan
    has no exponents if the weights are certified as they are."""
    if is_certified(layout, rounded(source, layout), arithmetic, target, spectra.for_others()):
        return Plan(family=layout.family.name, eps=layout.eps), ""
    unscaled, weights = replace(arithmetic, planned={}), source_weights(source, layout)
    bounds = bound(layout, weights, unscaled, target=target, spectra=spectra).ranges
    ranges = observed(model, source, layout)
    plan = observed_plan(source, layout, ranges, target=target, margin_bits=margin_bits, bounds=bounds)
    over = (signal.module for signal in signals_of(layout, plan, ranges) if signal.after > FP16_MAX)
    return plan, next(over, "")


def fields_for_undo(model: Any, source: ModelTensors, layout: Layout, moved: Plan) -> dict[str, Any]:
    """Return the fields of ``MadeSafe`` with which ``undo`` and ``adapter`` restore the source's scale. For a model
    loaded from a converted folder, that is the scale before the conversion."""
    originals = {name: source.read(name).clone() for name in centred_tensors(layout, moved.centred_keys)}
    mark, name = getattr(model.config, CONVERTED_KEY, None), str(model.name_or_path)
    if mark is None:
        return {"plan": moved, "originals": originals, "eps": layout.eps, "original": name}
    report = Path(name) / REPORT
    if not report.is_file() or mark_of(read_plan(report.parent).of_plan) != mark:
        raise UserError(
            f"{name} is a converted model, and its {REPORT} is not beside it, so nobody knows its scale; load it from"
            " the folder that convert wrote"
        )
    folder, written = report.parent, read_written(report.parent)
    origin, first = written.source, with_start(layout, written.of_plan, written.start, Progress(quiet=True))
    return {
        "plan": composed(first, moved),
        "originals": originals | {n: t.float() for n, t in stored_originals(layout, first, origin).items()},
        "eps": layout.eps * 4.0**-first.residual_exponent,
        "original": origin.path or "",
        "head_gain": head_gain(layout, first, read_config(folder), origin),
    }


def rounded(source: ModelTensors, layout: Layout, plan: Plan | None = None) -> TensorReader:
    """Return a function that reads a weight, rescaled by ``plan`` if given, and rounded to fp16 as autocast does."""

    def own(name: str) -> torch.Tensor:
        return stored(source, layout.tensors[name])

    weights = own if plan is None else centred(own, layout, plan.centred_keys)

    def read(name: str) -> torch.Tensor:
        tensor, weight = layout.tensors[name], weights(name).to(own(name).dtype)
        if plan is not None:
            weight = weight.clone()
            scale(weight, exponents_of(tensor, plan).full(tensor.shape), tensor.offset)
        return effective(tensor, weight.half())

    return read


def layout_under(layout: Layout, plan: Plan) -> Layout:
    eps = {path: layout.eps * 4.0**exponent for path, exponent in norm_exponents(layout, plan).items()}
    config = layout.config
    for key in layout.family.eps_keys:
        config = with_value(config, key, layout.eps * 4.0**plan.residual_exponent)
    return replace(layout, config=config, eps_in_memory=eps)


def check_known(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{type(model).__name__} is no model; load it with from_pretrained first (convert takes folders and files)"
        )
    if class_named(type(model).__name__) is None:
        known = ", ".join(name for family in FAMILIES for name in names_of(family))
        raise UserError(
            f"{type(model).__name__} is not of a family that can be rescaled ({known}); train it in bf16 or fp32, or"
            " hold its activations down with ActivationPenalty, which takes any model"
        )
    if (whole := model_around(model)) is not None:
        around = type(whole).__name__
        mend = f"give the {around}" if class_named(around) else "train it in bf16, or keep it in fp32"
        raise UserError(
            f"this {type(model).__name__} is a part of a {around}, whose other modules would not be rescaled; {mend}"
        )


def model_around(model: Any) -> Any:
    """Return the model that contains ``model``; None without one, or if it reads only the last states of ``model``."""
    from transformers import PreTrainedModel

    config = model.config
    gc.collect()  # a larger model from which it was taken may be left in a cycle
    for each in gc.get_objects():
        if isinstance(each, PreTrainedModel) and each is not model and any(part is model for part in each.modules()):
            # One with another config reads only the last states.
            inner = vars(each.config).values()
            if each.config is config or any(type(value) is type(config) for value in inner):
                return each
    return None


@quiet()
def rescale(
    model: Any, inputs: list[Batch] | None = None, *, target: str = "half", margin_bits: float = MARGIN_BITS
) -> Plan:
    """Rescale a transformers model in fp32 in place, exactly, by the best plan for ``inputs``, and return the plan.

    inputs: batches of ``measuring.probe.batches``; by default the built-in probe. The fp32 outputs keep every bit,
    except that gains stored minus an offset (Gemma's) are rounded to fp32. The norms' eps attributes are scaled; before
    you save the model, set ``plan.eps`` in ``model.config`` too. Raises UserError for a model of no known family, or
    whose modules do not match its config."""
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
    parameters = dict(model.named_parameters(remove_duplicate=False))
    known = {id(parameters[name]) for name in layout.tensors if name in parameters}
    for name in layout.dropped:
        # A copy of the embedding that is not tied to it in memory: the plan would not scale it.
        if name in parameters and name not in layout.family.ignorable and id(parameters[name]) not in known:
            raise UserError(
                f"{source.source}: {name} has the values of {layout.family.embedding} and is not tied to it; call"
                " model.tie_weights(), or set model.config.tie_word_embeddings = False to keep them separate"
            )
    narrow = sorted({t.dtype for t in source.tensors.values()} & {"F16", "BF16"})
    if narrow:
        raise UserError(f"{source.source} holds {narrow[0]} parameters; load it with dtype=torch.float32 to rescale it")
    return source, layout


def observed(
    model: Any, source: ModelTensors, layout: Layout, inputs: list[Batch] | None = None
) -> Mapping[str, ModuleRange]:
    if inputs is None:
        config = config_of(model)
        inputs = batches(config, None, None, chosen=chosen_ids(config, source, layout))
    training = [module for module in model.modules() if module.training]
    attention = str(config_of(model)._attn_implementation)
    set_attention(model.eval(), "eager")
    try:
        with full_precision():
            return observe_ranges(model, inputs)
    finally:
        set_attention(model, attention)
        for module in training:
            module.training = True


def observed_plan(
    source: ModelTensors,
    layout: Layout,
    ranges: Mapping[str, ModuleRange],
    *,
    target: str,
    margin_bits: float,
    bounds: Mapping[str, ModuleRange] | None = None,
) -> Plan:
    """Return the best exact plan for observed ``ranges`` and, if ``bounds`` are given, for any input. A plan can be
    exact here, because every norm's eps can be rescaled in memory."""
    weights = source_weights(source, layout)
    plan = make_plan(layout, weights, ranges, target=target, margin_bits=margin_bits, bounds=bounds).plan
    if target == "train":
        plan = with_smaller_gradients(plan, layout, weights, ranges, bounds)
    return plan.model_copy(update={"gain_correction": {}, "drift": None})
