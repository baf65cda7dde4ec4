"""Apply a plan to the writer's tensors, a model in memory, and the config. No other module scales weights by a plan."""

from __future__ import annotations

import torch

from ..bounds.factored import chunks
from ..checkpoint.recorded import CONVERTED_KEY
from ..checkpoint.shards import Write
from ..families.configs import with_value
from ..families.from_config import DTYPE_KEYS
from ..families.layout import Layout, TensorSource
from ..families.older_versions import with_older_keys
from ..families.resolve import eps_attribute, source_weights
from ..families.types import OutputScale
from .centred import centred_tensor, centred_tensors
from .exponents import check_plan_fits, correction_of, exponents_of, norm_exponents
from .plan import Plan, mark_of


def writes(source: TensorSource, layout: Layout, plan: Plan) -> list[Write]:
    check_plan_fits(layout, plan)
    replaced, weights = centred_tensors(layout, plan.centred_keys), source_weights(source, layout)
    result = []
    for name in sorted(layout.tensors):
        tensor, data = layout.tensors[name], None
        exponents = exponents_of(tensor, plan)
        if name in replaced:
            data = centred_tensor(weights, layout, name, replaced[name])
        elif tensor.generate:
            data = tensor.generate(tensor.shape[0], tensor.shape[1])
        result.append(
            Write(
                name=name,
                shape=tensor.shape,
                source=tensor.source if data is None else None,
                data=data,
                exponent=exponents.scalar,
                row_exponents=exponents.rows,
                column_exponents=exponents.columns,
                gain=tensor.gain * correction_of(tensor, plan),
                offset=tensor.offset,
                dtype=torch.float32 if tensor.in_fp32 else torch.float16,
            )
        )
    return result


def apply(model: torch.nn.Module, layout: Layout, plan: Plan) -> torch.nn.Module:
    """Rescale ``model`` in place by ``plan`` and return it. The fp32 logits keep every bit if the plan is ``exact`` and
    has no edits. The model must have the parameter names and tied or separate head of ``layout``. A norm whose input is
    scaled by 2^r gets its eps times 4^r."""
    check_plan_fits(layout, plan)
    stored: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    stored |= dict(model.named_buffers(remove_duplicate=False))
    done: set[int] = set()
    with torch.no_grad():
        # Computed from weights that are not scaled yet.
        replaced = centred_tensors(layout, plan.centred_keys).items()
        centred = {name: centred_tensor(stored.__getitem__, layout, name, part) for name, part in replaced}
        for name, values in centred.items():
            stored[name].copy_(values)
        for name, tensor in layout.tensors.items():
            parameter = stored[name]
            if id(parameter) in done:
                continue
            done.add(id(parameter))
            scale(parameter, exponents_of(tensor, plan).full(tensor.shape), tensor.offset, correction_of(tensor, plan))
    for path, exponent in norm_exponents(layout, plan).items():
        norm = model.get_submodule(path)
        attribute = eps_attribute(norm)
        setattr(norm, attribute, getattr(norm, attribute) * 4.0**exponent)
    return model


def scale(tensor: torch.Tensor, exponents: torch.Tensor, offset: float = 0.0, gain: float = 1.0) -> None:
    """Set ``tensor`` to (tensor + ``offset``) · ``gain`` · 2^exponents − ``offset``, in place."""
    if offset:
        if gain != 1.0 or bool((exponents != 0).any()):
            tensor.copy_(torch.ldexp((tensor.double() + offset) * gain, exponents.double()) - offset)
        return
    if gain != 1.0:
        tensor.mul_(gain)
    # Two factors, each a normal fp32 number, so that no intermediate loses bits.
    half = torch.div(exponents, 2, rounding_mode="floor")
    for part in (half, exponents - half):
        dtype = torch.float64 if part.is_floating_point() else torch.float32
        tensor.mul_(torch.ldexp(torch.ones_like(part, dtype=dtype), part).to(tensor.dtype))


def through_fp16(weight: torch.Tensor, exponents: torch.Tensor, offset: float = 0.0, gain: float = 1.0) -> torch.Tensor:
    """Return a weight in fp32 with the rounding that it gets in fp16 after rescaling. It is scaled as by ``scale``,
    rounded, and scaled back with −``exponents`` and ``offset``; ``gain`` stays in it. Arguments: as in ``scale``."""
    result = torch.empty(weight.shape)
    matrices = (x.reshape(len(weight), -1) for x in (weight, exponents.expand(weight.shape), result))
    for part, here, place in zip(*map(chunks, matrices), strict=True):
        block = part.double()
        scale(block, here, offset, gain)
        block = block.half().double()
        scale(block, -here, offset)
        place.copy_(block)
    return result


def edited_config(layout: Layout, plan: Plan, *, moved: bool = False) -> dict[str, object]:
    """Return the converted checkpoint's config: the source's with the plan's eps, the output's tie flag and dtype, and
    the rotary keys of transformers 4. moved: whether the source was already rescaled; the config is then marked as
    converted even if ``plan`` moves nothing."""
    # transformers 5 would write true for T5's ``tie_word_embeddings``, and version 4 then ties an untied head.
    config = dict(layout.config)
    eps = plan.eps if plan.eps_held else layout.eps * 4.0**plan.residual_exponent
    for key in layout.family.eps_keys if eps != layout.eps else ():
        config = with_value(config, key, eps)
    # The tie flag stays where it also switches on a scale that the head needs.
    scaled_by_flag = layout.family.output_scale is OutputScale.CONFIG and layout.head_scale != 1.0
    if layout.tied is False and not scaled_by_flag:
        for key in layout.family.tie_keys:
            config = with_value(config, key, False)
        if (switch := layout.family.output_scale_key) and switch in config:
            config[switch] = False
    if layout.tied:  # MT5Config says true by default in transformers 5, and false in 4
        config.setdefault("tie_word_embeddings", True)
    set_dtype(config, "float16")
    if plan.moves or moved:
        config[CONVERTED_KEY] = mark_of(plan)
    return with_older_keys(layout.family, config)


def set_dtype(config: dict[str, object], dtype: str) -> None:
    keys = [key for key in DTYPE_KEYS if key in config] or ["torch_dtype"]
    for key in keys:
        config[key] = dtype
    for name, inner in config.items():
        if isinstance(inner, dict) and any(inner.get(key) for key in DTYPE_KEYS):
            config[name] = inner | {key: dtype for key in DTYPE_KEYS if key in inner}
