"""LongT5: T5 v1.1 whose encoder attends locally and, with ``transient-global``, to sums of all blocks of positions.
Local attention differs from T5's in its mask alone. In transient-global attention the output of the sublayer's norm is
summed over blocks of positions, the sums go through a norm of their own, and keys and values are made of both. That
norm has the eps of all others, scaled by the square of the residual stream's factor. So the sums, and with them the
output of the first norm, must carry the stream's factor too, the same in every channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..errors import UserError
from . import t5
from .signals import RESIDUAL, Axis, Kind, Signal, Tensor, input_of, multiplied_by, output_of
from .t5 import DEFAULTS, INPUTS, T5
from .types import Deviation, Part, Stack
from .wiring import Attention

TYPE = "encoder_attention_type"
LOCAL, GLOBAL = "local", "transient-global"
MODULES = {LOCAL: "LocalSelfAttention", GLOBAL: "TransientGlobalSelfAttention"}


def attention(at: str, config: Mapping[str, object], i: int) -> Part:
    module = MODULES.get(str(config[TYPE]))
    if module is None:
        raise UserError(
            f"config.json: {TYPE!r} is {config[TYPE]!r}; it is {' or '.join(map(repr, MODULES))} in stock code"
        )
    first = f"encoder.block.0.layer.0.{module}"
    part = t5.attention(at, module, bias=i == 0, shared=first)
    wiring = part.topology
    assert isinstance(wiring, Attention)
    wiring = replace(wiring, radius="local_radius")
    if module != MODULES[GLOBAL]:
        return replace(part, topology=wiring)
    norm, inner = wiring.norm, f"{wiring.at}.global_input_layer_norm"
    bias = f"{first}.global_relative_attention_bias.weight"

    def of_the_stream(axis: Axis | None) -> Axis | None:
        return replace(axis, signal=RESIDUAL) if axis is not None and axis.signal == norm else axis

    tensors = [replace(t, axes=tuple(map(of_the_stream, t.axes))) for t in part.tensors]
    tensors.append(Tensor(f"{inner}.weight", ("model",), (multiplied_by(RESIDUAL),)))
    carried = Signal(RESIDUAL, Kind.RESIDUAL, "model", (output_of(norm), input_of(inner), output_of(inner)))
    signals = tuple(carried if signal.name == norm else signal for signal in part.signals)
    wiring = replace(wiring, block="global_block_size", block_norm=inner, block_bias=bias)
    full = Part(signals, tuple(tensors), wiring)
    return t5.with_table(full, bias) if i == 0 else full


def encoder_block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    at = f"encoder.block.{i}.layer"
    return (attention(f"{at}.0", config, i), t5.neurons(f"{at}.1", str(config["feed_forward_proj"])))


LONGT5 = replace(
    T5,
    name="longt5",
    title="LongT5",
    model_type="longt5",
    classes=t5.classes("LongT5")[:3],
    defaults=DEFAULTS | {"feed_forward_proj": "relu", TYPE: LOCAL, "local_radius": 127, "global_block_size": 16},
    encoder=Stack("num_layers", encoder_block),
    kept_in_fp32=(),
    initialisation=replace(
        T5.initialisation,
        modules={
            **T5.initialisation.modules,
            "global_relative_attention_bias": INPUTS,
            "global_input_layer_norm": Deviation(),
        },
    ),
    variants=({TYPE: GLOBAL},),
)
