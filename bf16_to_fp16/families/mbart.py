"""mBART and mBART-50: Pegasus with learned positions, and a norm between the embedding and each stack's stream.

That norm takes out whatever factor its input had, so the residual stream begins with its gain and bias; the embedding,
the positions and a head that is the embedding carry none, and each stack's stream has an exponent of its own. The
norm's eps, which no config holds, does not drift: what it reads is never scaled. The embedding multiplies itself by √d
with ``scale_embedding``, and its table of positions has two rows before the first one's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from . import pegasus
from .pegasus import BODY, LOGITS, LOGITS_BIAS, PEGASUS, states
from .types import (
    RESIDUAL,
    Axis,
    Head,
    HeadLinear,
    Kind,
    Part,
    Signal,
    Stack,
    StackEnds,
    StockClass,
    Tensor,
    input_of,
    multiplied_by,
    output_of,
)


def stack_ends(at: str) -> Part:
    """Return the records of both ends of a stack, without the embedding's tensor."""
    norm, positions = f"{at}.layernorm_embedding", f"{at}.embed_positions"
    return Part(
        signals=(
            Signal(f"{at}.embedding", Kind.FIXED, "model", (output_of(f"{at}.embed_tokens"), output_of(positions))),
            Signal(RESIDUAL, Kind.RESIDUAL, "model", (output_of(norm), input_of(f"{at}.layer_norm"))),
        ),
        tensors=(
            Tensor(f"{positions}.weight", ("positions", "model"), (None, None), ahead=2),
            Tensor(f"{norm}.weight", ("model",), (multiplied_by(RESIDUAL),)),
            Tensor(f"{norm}.bias", ("model",), (multiplied_by(RESIDUAL),)),
        ),
        topology=StackEnds(
            at=at,
            embedding=f"{at}.embed_tokens",
            positions=f"{positions}.weight",
            scale="scale_embedding",
            norm=f"{at}.layer_norm",
            scales_itself=True,
            first_norm=norm,
        ),
    )


DECODER_RESIDUAL = "decoder.residual"
"""Name of the decoder's residual signal: nothing ties it to the encoder's, whose output is fixed."""


def of_decoder(part: Part) -> Part:
    """Return a part of the decoder with its own residual signal."""

    def axis(of: Axis | None) -> Axis | None:
        return of if of is None or of.signal != RESIDUAL else replace(of, signal=DECODER_RESIDUAL)

    return Part(
        tuple(replace(s, name=DECODER_RESIDUAL) if s.name == RESIDUAL else s for s in part.signals),
        tuple(replace(t, axes=tuple(map(axis, t.axes))) for t in part.tensors),
        part.topology,
    )


def decoder_block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    """Return the parts of decoder layer ``i``."""
    return [of_decoder(part) for part in pegasus.decoder_block(config, i)]


ENCODER_ENDS = stack_ends("encoder")


FINAL_STATES = states(pegasus.FINAL_NORM)


MBART = replace(
    PEGASUS,
    name="mbart",
    title="mBART, mBART-50",
    model_type="mbart",
    classes=(
        StockClass(("MBartForConditionalGeneration",), decodes=True, takes_decoder_ids=True, end=None, body=BODY),
        StockClass(
            ("MBartModel",),
            decodes=True,
            takes_decoder_ids=True,
            end=states("decoder.layer_norm"),
            gives=("last_hidden_state",),
        ),
    ),
    encoder_ends=replace(
        ENCODER_ENDS, tensors=(Tensor("shared.weight", ("vocab", "model"), (None, None)), *ENCODER_ENDS.tensors)
    ),
    decoder=Stack("decoder_layers", decoder_block),
    decoder_ends=of_decoder(stack_ends("decoder")),
    tied_head=Part(
        signals=(*FINAL_STATES.signals, LOGITS),
        tensors=(*FINAL_STATES.tensors, LOGITS_BIAS),
        topology=Head("lm_head", (HeadLinear("lm_head", f"{BODY}.shared.weight"),)),
    ),
    initialisation=replace(
        PEGASUS.initialisation,
        title="mBART",
        modules={name: rule for name, rule in PEGASUS.initialisation.modules.items() if rule is not None},
    ),
)
