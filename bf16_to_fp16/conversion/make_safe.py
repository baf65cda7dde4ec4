"""``make_fp16_safe`` and its ``undo``, around a training under fp16 AMP. The model's config is changed as well, so that
``save_pretrained`` writes matching weights and eps."""

from __future__ import annotations

import copy
import math
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import nn

from ..bounds.arithmetic import MAX_LENGTH, Arithmetic
from ..bounds.certificate import bound, is_certified
from ..bounds.spectral import Spectra
from ..checkpoint.adapters import adapter_config
from ..checkpoint.contents import read_config
from ..checkpoint.recorded import CONVERTED_KEY, REPORT
from ..checkpoint.staging import check_out
from ..errors import UserError
from ..families.configs import with_value
from ..families.known import FAMILIES, class_named, names_of
from ..families.layout import Layout, TensorReader
from ..families.resolve import effective, resolve, stored
from ..numerics import FP16_MAX
from ..progress import Progress
from ..quiet import quiet
from ..report.coverage import tower_aside
from ..report.signals import signals_of
from ..report.stored import originals as stored_originals
from ..report.stored import read_origin, read_plan
from ..rescaling.adapters import scaled_adapter
from ..rescaling.apply import apply, eps_attribute, scale
from ..rescaling.centred import centred, centred_tensors, tables_of
from ..rescaling.exponents import OfChannels, exponents_of, norm_exponents
from ..rescaling.follow import check_whole, exponents_by_parameter, follow
from ..rescaling.outputs import input_factor, output_factors
from ..rescaling.plan import Plan, composed, inverse, mark_of
from ..rescaling.weights import ModelTensors, source_weights
from ..targets import MARGIN_BITS, WHERE
from .adapter import check_tying, head_gain, rescale_adapter
from .planning import bound_source
from .rescale import check_asked, observed, observed_plan, opened

EMBEDDINGS = "inputs_embeds"
MARK = "_made_fp16_safe"  # attribute of a rescaled model: its ``MadeSafe``
SAVES = "save_pretrained"  # method of a rescaled model that warns
WRAPPED = {"base_layer", "original_module"}  # under what names PEFT's wrappers keep a model's own layer


@dataclass(frozen=True)
class MadeSafe:
    """The result of ``make_fp16_safe``; ``str`` says it in a sentence or two.

    plan: the powers of two, all 0 where nothing had to be done. certified: whether no input can overflow the present
    weights, rounded to fp16; training moves them. headroom_bits: log2(limit / bound) at ``tightest``, the site with the
    least. eps: of the norms before. again: the model had been made safe before, and nothing was done. converted: the
    converted folder that the model was loaded from, whose plan is part of this one. originals: by name, the former
    values of key biases and position-bias tables that were centred; tables: the centred tables. outputs: by name, log2
    of the factor by which an output of the class is larger than before, for all channels or for each; logits are
    unchanged. inputs: log2 of the factor that ``inputs_embeds`` must be multiplied by. passed: an observed signal over
    65504 that no exponent moves, or "". layout, head_gain, original: for ``adapter``.
    """

    plan: Plan
    target: str
    certified: bool
    headroom_bits: float
    tightest: str
    eps: float
    again: bool = False
    converted: str = ""
    originals: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False)
    tables: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False)
    outputs: Mapping[str, OfChannels] = field(default_factory=dict, compare=False)
    inputs: Mapping[str, OfChannels] = field(default_factory=dict, compare=False)
    passed: str = ""
    layout: Layout | None = field(default=None, compare=False, repr=False)
    head_gain: float = 1.0
    original: str = ""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "layout": None}  # its functions cannot be pickled with a model

    @property
    def changed(self) -> bool:
        return self.plan.moves or bool(self.plan.centred_keys)

    def __str__(self) -> str:
        exponents = self.plan.residual_exponents
        streams, signals = " and ".join(f"2^{r}" for r in exponents), len(self.plan.exponents) - len(exponents) + 1
        if self.again:
            done = "made safe before; nothing was done"
        elif self.converted:
            done = (
                f"loaded from the converted folder {self.converted}; its stream is now {streams} times the original's"
            )
        elif not self.changed:
            done = "nothing to rescale; the weights are as they were"
        else:
            done = f"rescaled in memory: the residual stream by {streams}, channels of {signals} other signals"
        at = f"{self.headroom_bits:.2f} bits at {self.tightest}"
        over = (
            f"is {-self.headroom_bits:.2f} bits over its limit" if math.isfinite(self.headroom_bits) else "is infinite"
        )
        observed = (
            f"what was observed of {self.passed} is over 65504, and no exact exponent moves that: convert its"
            " checkpoint, which can edit it, or train it in bf16"
            if self.passed
            else "safe on what was observed only"
        )
        proof = (
            f"certified {WHERE[self.target]}: no input overflows these weights in fp16"
            f"{tower_aside(self.plan.family)} (least headroom {at}); training moves them, so certify what you save"
            if self.certified
            else f"not certified {WHERE[self.target]}: the bound of {self.tightest} {over}; {observed}"
        )
        scale = " adapter(model, OUT) writes a LoRA of it for the original." if self.plan.moves else ""
        if factor := self.inputs.get(EMBEDDINGS):
            scale += f" {own_embeddings(factor)}."
        return f"{done}. {proof[0].upper()}{proof[1:]}.{scale}"

    def __repr__(self) -> str:
        proof = f"{'' if self.certified else 'not '}certified {WHERE[self.target]}"
        return f"<MadeSafe: {proof}, {self.headroom_bits:.2f} bits at {self.tightest}>"

    def undo(self, model: Any) -> Any:
        """Take ``model`` back to the source's scale in place, exactly, whether it was trained or not, and return it.

        Its config gets its eps back. model: the model made safe, a copy of it, one loaded by ``from_pretrained`` from
        a folder saved before ``undo``, which the eps in its config shows, or a PEFT model with one LoRA around it,
        whose adapter follows. Raises UserError for any other model.
        """
        if hasattr(model, "get_base_model"):
            return self.undo_adapted(model)
        check_plain(model, "give the PEFT model around it, or merge it with merge_and_unload() and undo that")
        return self.undo_plain(model)

    def undo_plain(self, model: Any) -> Any:
        check_whole(model)
        if self.changed:
            self.check_made_safe(model)
            source = ModelTensors(model)
            if "F16" in {t.dtype for t in source.tensors.values()}:
                raise UserError(
                    f"{source.source} is in fp16, which may not hold the source's scale; undo before half()"
                )
            layout = resolve(source)
            with on_the_cpu(model):
                # No output depends on a centred key bias, so it is restored even if trained. Trained tables stay: a
                # softmax ignores the offset that they lost.
                trained = any(not torch.equal(model.get_parameter(name), t) for name, t in self.tables.items())
                apply(model, layout, inverse(self.plan))
                for name, bias in self.originals.items():
                    if name not in self.tables or not trained:
                        model.get_parameter(name).data.copy_(bias)
            set_eps(model, layout, self.eps)
            vars(model.config).pop(CONVERTED_KEY, None)
        for name in (MARK, SAVES):
            model.__dict__.pop(name, None)
        for module in takers_of_embeddings(model):
            hooks = module._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if getattr(hook, "func", None) is warn_of_embeddings]:
                del hooks[key], module._forward_pre_hooks_with_kwargs[key]
        return model

    def save(self, model: Any, out: str | Path, **options: Any) -> None:
        """Save a copy of ``model`` at the source's scale to ``out``, by its own ``save_pretrained``.

        options: of ``save_pretrained``. Memory holds the weights twice. Raises UserError as ``undo`` does.
        """
        self.undo(copy.deepcopy(model)).save_pretrained(out, **options)

    def undo_adapted(self, model: Any) -> Any:
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        base = self.adapted(model)
        state = get_peft_model_state_dict(model)
        with without_adapters(base):
            back = scaled_adapter(state, resolve(ModelTensors(base)), inverse(self.plan), 1 / self.head_gain)
            if lost := next((name for name, tensor in back.items() if tensor.widened), None):
                raise UserError(f"{lost} is in 16 bits and would lose some; adapter(model, OUT) writes it in fp32")
            self.undo_plain(base)
        set_peft_model_state_dict(model, {name: tensor.values for name, tensor in back.items()})
        return model

    def adapted(self, model: Any) -> Any:
        """Return the base model of a PEFT model. Raises UserError unless it has one adapter and this plan's scale."""
        if not hasattr(model, "get_base_model") or len(model.peft_config) != 1:
            raise UserError(
                f"{type(model).__name__} is no PEFT model with one adapter; delete_adapter takes others away"
            )
        base = model.get_base_model()
        mark = base.__dict__.get(MARK)
        if mark is None or mark.plan != self.plan:
            raise UserError(
                "the adapter's model is not at this plan's scale; it was undone already, or not made safe so"
            )
        return base

    def adapter(self, model: Any, out: str | Path, *, force: bool = False) -> Path:
        """Write the adapter of a PEFT model around the model made safe to ``out``, rescaled for the original, and
        return ``out``. PEFT's own ``save_pretrained`` writes it at the plan's scale. Raises UserError as
        ``convert_adapter`` does, and unless the model has one adapter and is at this plan's scale."""
        if self.layout is None:
            raise UserError("what came back from a pickle or a copy writes no adapter; keep what make_fp16_safe gave")
        self.adapted(model)
        out, adapters = Path(out), list(model.peft_config)
        check_out(out, force=force)
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / ("" if adapters == ["default"] else adapters[0])  # as PEFT places it
            model.save_pretrained(folder)
            config = adapter_config(saved) | {"base_model_name_or_path": self.original}
            check_tying(saved, config, self.plan)
            gain = 1 / self.head_gain
            rescale_adapter(saved, out, self.layout, inverse(self.plan), gain, config, back=True, force=force)
        return out

    def check_made_safe(self, model: Any) -> None:
        mark = model.__dict__.get(MARK)
        if mark is not None and mark.plan == self.plan:
            return
        layout = resolve(ModelTensors(model))
        told_by_eps = layout.family.eps_key is not None and self.plan.residual_exponent != 0
        if mark is None and told_by_eps and layout.eps == self.plan.eps:
            return
        raise UserError(
            f"{type(model).__name__} is not at this plan's scale; it was undone already, or not made safe so"
        )

    def follow(
        self, optimizer: torch.optim.Optimizer, model: Any, *, max_grad_norm: float | None = None
    ) -> torch.optim.Optimizer:
        """Make ``optimizer`` take exactly the steps that it would take without the rescaling, and return it.

        Around each step gradients and weights are brought to the source's scale, so that learning rate, epsilon, decay
        and second moments keep their meaning. max_grad_norm: the L2 norm to which the optimizer's gradients are clipped
        there, summed in the optimizer's order; leave out any clipping of your own. Call it once, before the first step.
        Parameters that were not rescaled, such as an adapter's, are stepped as they are. Raises UserError where
        ``model`` is not at the plan's scale, for a norm that is not positive, and, from a step, for sharded parameters
        (FSDP, ZeRO-3), copies of them (ZeRO-1 and 2), and after a step that failed.
        """
        check_plain(model, "follow needs the weights themselves; an adapter's own are not rescaled")
        exponents = {}
        if self.changed:
            self.check_made_safe(model)
            exponents = exponents_by_parameter(model, resolve(ModelTensors(model)), self.plan)
        if exponents or max_grad_norm is not None:
            follow(optimizer, exponents, model, max_grad_norm)
        return optimizer


@quiet()
def make_fp16_safe(
    model: Any, *, target: str = "train", margin_bits: float = MARGIN_BITS, max_length: int = MAX_LENGTH
) -> MadeSafe:
    """Rescale a stock fp32 model in memory so that it can be trained under fp16 AMP, and return the result, with
    ``undo``.

    Nothing is copied or printed. The fp32 outputs keep every bit. ``undo`` restores every weight bit for bit, and after
    training exactly the trained function; moved gains that are stored less an offset, as far as fp32 holds them. The
    config's eps changes with the weights, so that ``save_pretrained`` writes a matching pair at any time. Undo before
    you save a Pegasus, which has no eps in its config, or, for equal bits, a model with norms behind linears: for
    ``train`` their eps changes in memory only. target: as in ``convert``; ``train`` leaves room for dropout, gradients
    and moving weights. margin_bits: headroom kept to each limit on the built-in probe. max_length: positions for which
    the certificate holds. A model that was made safe before, or has a certificate as it is, stays as it is. Raises
    UserError for a model of no known family, in 16 bits, with an adapter, or spread over devices.
    """
    check_asked(target, margin_bits)
    check_plain(model, "call make_fp16_safe before get_peft_model")
    check_known(model)
    mark = model.__dict__.get(MARK)
    if mark is not None:
        return replace(mark, again=True)
    with on_the_cpu(model):
        source, layout = opened(model)
        weights, arithmetic = source_weights(source, layout), Arithmetic(max_length)
        spectra, passed = Spectra(weights), ""
        if is_certified(layout, rounded(source, layout), arithmetic, target, spectra.for_others()):
            moved = Plan(family=layout.family.name, eps=layout.eps)
        else:
            bounds = bound_source(layout, {}, weights, target, max_length, Progress(quiet=True), spectra).ranges
            options: dict[str, Any] = {"target": target, "margin_bits": margin_bits, "bounds": bounds}
            ranges = observed(model, source, layout)
            moved = observed_plan(source, layout, ranges, **options)
            over = (signal.module for signal in signals_of(layout, moved, ranges) if signal.after > FP16_MAX)
            passed = next(over, "")
        known = spectra.for_others()
        planned = layout_under(layout, moved)
        proof = bound(planned, rounded(source, layout, moved), arithmetic, target=target, spectra=known)
        worst = min(proof.sites, key=lambda site: site.headroom_bits)
        originals = {name: source.read(name).clone() for name in centred_tensors(layout, moved.centred_keys)}
        plan, folder, original, gain = moved, converted_folder(model), str(model.name_or_path), 1.0
        if folder is not None:
            first, origin = read_plan(folder), read_origin(folder)
            plan = composed(first, moved)
            originals |= {n: t.float() for n, t in stored_originals(layout, first, origin).items()}
            original, gain = origin.path or "", head_gain(layout, first, read_config(folder), origin)
        eps = layout.eps if folder is None else layout.eps * 4.0**-first.residual_exponent
        if moved.moves or moved.centred_keys:
            apply(model, layout, moved)
            if layout.family.eps_key is not None:
                set_eps_of_configs(model, layout, planned.eps)
        tables = (name for name, at in centred_tensors(layout, plan.centred_keys).items() if tables_of(at))
        kept = {name: model.get_parameter(name).detach().clone() for name in tables}
    safe = MadeSafe(
        plan=plan,
        target=target,
        certified=proof.holds,
        headroom_bits=worst.headroom_bits,
        tightest=worst.name,
        eps=eps,
        converted="" if folder is None else folder.name,
        originals=originals,
        tables=kept,
        outputs=output_factors(planned, plan),
        inputs={EMBEDDINGS: input_factor(planned, plan)},
        passed=passed,
        layout=layout,
        head_gain=gain,
        original=original,
    )
    model.__dict__[MARK] = safe
    if plan.moves:
        model.__dict__[SAVES] = partial(save_as_it_is, model)
    if factor := safe.inputs[EMBEDDINGS]:
        for module in takers_of_embeddings(model):
            module.register_forward_pre_hook(partial(warn_of_embeddings, own_embeddings(factor)), with_kwargs=True)
    return safe


@contextmanager
def without_adapters(base: Any) -> Iterator[None]:
    """Put the layers that PEFT wrapped in the places of its wrappers for the block."""
    wrappers = {name: module for name, module in base.named_modules() if {*module._modules} & WRAPPED}
    parents = {name: base.get_submodule(name.rpartition(".")[0]) for name in wrappers}
    try:
        for name, wrapper in wrappers.items():
            layer = next(child for key, child in wrapper.named_children() if key in WRAPPED)
            setattr(parents[name], name.rpartition(".")[2], layer)
        yield
    finally:
        for name, wrapper in wrappers.items():
            setattr(parents[name], name.rpartition(".")[2], wrapper)


def takers_of_embeddings(model: Any) -> list[nn.Module]:
    """Return the modules that may be given ``inputs_embeds``: the model, and the encoder, which ``generate`` calls."""
    encoder = model.get_encoder() if model.config.is_encoder_decoder else model
    return [model] if encoder is model or not isinstance(encoder, nn.Module) else [model, encoder]


def own_embeddings(factor: OfChannels) -> str:
    by = f"2^{factor}" if isinstance(factor, int) else f"powers of two, one for each channel (inputs[{EMBEDDINGS!r}])"
    return f"Multiply {EMBEDDINGS} that its own embedding did not make by {by}"


def save_as_it_is(model: Any, *args: Any, **options: Any) -> Any:
    warnings.warn(
        "make_fp16_safe rescaled this model, and it is saved at that scale; safe.save(model, OUT) saves it at the"
        " original's",
        stacklevel=2,
    )
    return type(model).save_pretrained(model, *args, **options)


def warn_of_embeddings(advice: str, module: nn.Module, args: Any, named: Mapping[str, Any]) -> None:
    if named.get(EMBEDDINGS) is not None:
        warnings.warn(f"this model was rescaled by make_fp16_safe. {advice}", stacklevel=2)


def converted_folder(model: Any) -> Path | None:
    """Return the converted folder that a model came from, or None; raise UserError where its report is missing."""
    mark = getattr(model.config, CONVERTED_KEY, None)
    if mark is None:
        return None
    name = str(model.name_or_path)
    report = Path(name) / REPORT
    if not report.is_file():
        with suppress(HFValidationError):  # raised for a path
            cached = try_to_load_from_cache(name, REPORT)
            report = Path(cached) if isinstance(cached, str) else report
    if not report.is_file() or mark_of(read_plan(report.parent)) != mark:
        raise UserError(
            f"{name} is a converted model, and its {REPORT} is not beside it, so nobody knows its scale; load it from"
            " the folder that convert wrote"
        )
    return report.parent


def rounded(source: ModelTensors, layout: Layout, plan: Plan | None = None) -> TensorReader:
    """Return a reader of tensors under a plan, rounded to fp16 as autocast and ``half`` round them."""

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


def set_eps(model: Any, layout: Layout, eps: float) -> None:
    for path in layout.norms:
        norm = model.get_submodule(path)
        setattr(norm, eps_attribute(norm), eps)
    set_eps_of_configs(model, layout, eps)


def set_eps_of_configs(model: Any, layout: Layout, eps: float) -> None:
    for key in layout.family.eps_keys:
        *inside, last = key.split(".")
        for module in model.modules():
            config = getattr(module, "config", None)
            for part in inside:
                config = getattr(config, part, None)
            if config is not None and hasattr(config, last):
                setattr(config, last, eps)


def check_plain(model: Any, remedy: str) -> None:
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    if hasattr(model, "peft_config") or any(name.rpartition(".")[2] == "base_layer" for name, _ in modules):
        raise UserError(f"{type(model).__name__} has an adapter in it; {remedy}")


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


@contextmanager
def on_the_cpu(model: Any) -> Iterator[None]:
    """Keep a model on the CPU for the block; raise UserError if it is spread over devices or lacks values."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise UserError(
            f"{type(model).__name__} is not on one device with its values; load it without device_map, and leave moving"
            " it to the Trainer"
        )
    (device,) = devices
    model.to("cpu")
    try:
        yield
    finally:
        model.to(device)
