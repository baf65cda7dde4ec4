"""A model rescaled by ``make_fp16_safe``: train it, undo the rescaling, save the model, and write its LoRA adapters."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.adapter_config import adapter_config
from ..checkpoint.recorded import CONVERTED_KEY
from ..checkpoint.staging import check_out
from ..errors import UserError
from ..families.layout import Layout
from ..families.resolve import ModelTensors, eps_attribute, resolve
from ..report.coverage import tower_aside
from ..rescaling.apply import apply
from ..rescaling.follow import check_whole, exponents_by_parameter, follow
from ..rescaling.plan import OfChannels, Plan, inverse
from ..targets import WHERE
from .adapter import rescale_adapter

EMBEDDINGS = "inputs_embeds"
MARK = "_made_fp16_safe"  # attribute of a rescaled model: its ``MadeSafe``
SAVES = "save_pretrained"  # method of a rescaled model that warns
OTHER_SCALE = "use the result of the last make_fp16_safe call, or call make_fp16_safe again after undo"


@dataclass(frozen=True)
class MadeSafe:
    """The result of ``make_fp16_safe``; ``str`` gives a summary.

    plan: the powers of two that scale the weights. If the model was loaded from a converted folder, the conversion's
    powers of two are included. certified: whether no input can overflow the fp16 model before training. headroom_bits:
    log2(limit / bound) at ``tightest``, the site with the least headroom. eps: the eps of norms in the source.
    originals: the source's key biases and position-bias tables that were centred (a part that softmax ignores was
    subtracted). tables: these tables after centring. outputs: for each output by name, the log2 of the factor that the
    rescaling puts on the output: one number, or one for each channel. Logits keep their values. inputs: the log2 of the
    factor that ``inputs_embeds`` needs. passed: the name of an observed signal that stays over 65504, or "". original:
    the name of the source."""

    plan: Plan = field(repr=False)
    target: str
    certified: bool
    headroom_bits: float
    tightest: str
    eps: float
    originals: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)
    tables: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)
    outputs: Mapping[str, OfChannels] = field(default_factory=dict, compare=False, repr=False)
    inputs: Mapping[str, OfChannels] = field(default_factory=dict, compare=False, repr=False)
    passed: str = ""
    layout: Layout | None = field(default=None, compare=False, repr=False)
    head_gain: float = 1.0  # factor that convert multiplied into the head's weight, if it untied a tied head
    original: str = ""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "layout": None}  # its functions cannot be pickled with a model

    @property
    def changed(self) -> bool:
        return self.plan.moves or bool(self.plan.centred_keys)

    def __str__(self) -> str:
        streams = " and ".join(f"2^{r}" for r in self.plan.residual_exponents)
        done = f"the residual stream is {streams} times the original's" if self.changed else "nothing to rescale"
        at = f"{self.headroom_bits:.2f} bits at {self.tightest}"
        if self.certified:
            proof = (
                f"Certified {WHERE[self.target]}: no input overflows these weights in fp16"
                f"{tower_aside(self.plan.family)} (least headroom {at}); training moves them, so certify what you save."
            )
        else:
            observed = "safe on what was observed only"
            if self.passed:
                observed = (
                    f"the values observed at {self.passed} exceed 65504, and rescaling alone cannot prevent that:"
                    " use convert, which can also edit weights, or train the model in bf16"
                )
            proof = f"Not certified {WHERE[self.target]} ({at}); {observed}."
        scale = " adapter(model, OUT) writes a LoRA of it for the original." if self.plan.moves else ""
        if factor := self.inputs.get(EMBEDDINGS):
            scale += f" {own_embeddings(factor)}."
        return f"{done}. {proof}{scale}"

    def mark(self, model: Any) -> None:
        """Attach this result to the model, which then warns when it is saved rescaled or is given ``inputs_embeds``."""
        model.__dict__[MARK] = self
        if self.plan.moves:
            model.__dict__[SAVES] = partial(save_as_it_is, model)
        if factor := self.inputs[EMBEDDINGS]:
            warn = partial(warn_of_embeddings, own_embeddings(factor))
            for module in takers_of_embeddings(model):
                module.register_forward_pre_hook(warn, with_kwargs=True)

    def undo(self, model: Any) -> Any:
        """Undo the rescaling of ``model`` in place, exactly, whether it was trained or not, and return ``model``. The
        config gets the source's eps back.

        model: the model that was made safe, a copy of it, or one loaded from a folder to which it was saved. Raises
        UserError for any other model, and for one in fp16 or with an adapter."""
        check_plain(model, "adapter(model, OUT) saves a LoRA; call undo on what unload() or merge_and_unload() returns")
        check_whole(model)
        if self.changed:
            self.check_made_safe(model)
            source = ModelTensors(model)
            if "F16" in {t.dtype for t in source.tensors.values()}:
                raise UserError(
                    f"{source.source} is in fp16, where undo could make weights overflow; call undo before half(), or"
                    " load the model in another dtype"
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
        """Save a copy of ``model`` at the source's scale by ``save_pretrained``. Raises UserError as ``undo`` does."""
        self.undo(copy.deepcopy(model)).save_pretrained(out, **options)

    def adapter(self, model: Any, out: str | Path, *, force: bool = False) -> Path:
        """Rescale the adapter of ``model`` for the original model, write it to ``out`` and return ``out``. model: the
        PEFT model around the model that was made safe. Raises UserError as ``convert_adapter`` does, for several
        adapters or none, and for a model that this plan did not scale."""
        if self.layout is None:
            raise UserError(
                "a pickled or copied result cannot write an adapter; use the one that make_fp16_safe returned"
            )
        if not hasattr(model, "get_base_model") or len(model.peft_config) != 1:
            raise UserError(
                f"{type(model).__name__} is not a PEFT model with a single adapter; load one, or remove others"
                " with delete_adapter"
            )
        mark = model.get_base_model().__dict__.get(MARK)
        if mark is None or mark.plan != self.plan:
            raise UserError(f"the adapter's model was not rescaled by this result's plan; {OTHER_SCALE}")
        out, adapters = Path(out), list(model.peft_config)
        check_out(out, force=force)
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / ("" if adapters == ["default"] else adapters[0])  # as PEFT places it
            model.save_pretrained(folder)
            config = adapter_config(saved) | {"base_model_name_or_path": self.original}
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
        raise UserError(f"{type(model).__name__} was not rescaled by this result's plan; {OTHER_SCALE}")

    def follow(
        self, optimizer: torch.optim.Optimizer, model: Any, *, max_grad_norm: float | None = None
    ) -> torch.optim.Optimizer:
        """Make ``optimizer`` take exactly the steps that it would take without the rescaling, and return it.

        Call this once, before the first step. max_grad_norm: clip the gradients to this L2 norm at the source's scale,
        summed in the optimizer's order; do not clip them elsewhere. Parameters that were not rescaled are stepped as
        usual. Raises UserError if this plan did not scale ``model``, or if the norm is not positive. A step raises
        UserError if parameters are sharded (FSDP, ZeRO-3), if the optimizer holds copies of the parameters (ZeRO-1 and
        2), if the step is given a closure, and after a step that failed."""
        check_plain(model, "use the optimizer without follow, since an adapter's weights are not rescaled")
        exponents = {}
        if self.changed:
            self.check_made_safe(model)
            exponents = exponents_by_parameter(model, resolve(ModelTensors(model)), self.plan)
        if exponents or max_grad_norm is not None:
            follow(optimizer, exponents, model, max_grad_norm)
        return optimizer


def takers_of_embeddings(model: Any) -> list[nn.Module]:
    """Return the modules that may get ``inputs_embeds``: the model, and its encoder, which ``generate`` calls first."""
    encoder = model.get_encoder() if model.config.is_encoder_decoder else model
    return [model] if encoder is model or not isinstance(encoder, nn.Module) else [model, encoder]


def own_embeddings(factor: OfChannels) -> str:
    by = f"2^{factor}" if isinstance(factor, int) else f"powers of two, one for each channel (inputs[{EMBEDDINGS!r}])"
    return f"Multiply {EMBEDDINGS} by {by}, unless the model's own embedding made them"


def warn_of_embeddings(advice: str, module: nn.Module, args: Any, named: Mapping[str, Any]) -> None:
    if named.get(EMBEDDINGS) is not None:
        warnings.warn(f"this model was rescaled by make_fp16_safe. {advice}", stacklevel=2)


def save_as_it_is(model: Any, *args: Any, **options: Any) -> Any:
    warnings.warn(
        "make_fp16_safe rescaled this model, and it is saved at that scale; safe.save(model, OUT) saves it at the"
        " original's",
        stacklevel=2,
    )
    return type(model).save_pretrained(model, *args, **options)


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


@contextmanager
def on_the_cpu(model: Any) -> Iterator[None]:
    """Move a model to the CPU for the block. Raises UserError if it is on several devices or its values are missing."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise UserError(
            f"{type(model).__name__} is spread over several devices, or its weights are not loaded; load it without"
            " device_map, and let the Trainer move it"
        )
    (device,) = devices
    model.to("cpu")
    try:
        yield
    finally:
        model.to(device)
