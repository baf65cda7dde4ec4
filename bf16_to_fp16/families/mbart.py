"""mBART and mBART-50: Pegasus with learned positions, and a norm between the embedding and each stack's stream. That
norm takes out any factor of its input, so the residual stream begins with the norm's gain and bias. The embedding, the
positions and a tied head carry no factor, and each stack's stream has an exponent of its own. The norm's eps, which no
config holds, does not drift, since its input is never scaled. The embedding multiplies itself by √d with
``scale_embedding``, and its table of positions has two rows before the first position's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from . import pegasus
from .nested import renamed_signals
from .parts import logits, states
from .pegasus import BODY, FINAL_NORM, HEAD, LOGITS_BIAS, PEGASUS, STYLE
from .signals import LOGITS, RESIDUAL, Kind, Signal, Tensor, input_of, multiplied_by, output_of
from .types import Part, Stack, StockClass


def stack_ends(at: str, *tensors: Tensor) -> Part:
    norm, positions = f"{at}.layernorm_embedding", f"{at}.embed_positions"
    return Part(
        signals=(
            Signal(f"{at}.embedding", Kind.FIXED, "model", (output_of(f"{at}.embed_tokens"), output_of(positions))),
            Signal(RESIDUAL, Kind.RESIDUAL, "model", (output_of(norm), input_of(f"{at}.layer_norm"))),
        ),
        tensors=(
            *tensors,
            Tensor(f"{positions}.weight", ("positions", "model"), (None, None), ahead=2),
            *STYLE.norm(norm, multiplied_by(RESIDUAL)),
        ),
        topology=pegasus.stack_ends(at, scales_itself=True, first_norm=norm),
    )


DECODER_RESIDUAL = "decoder.residual"  # the decoder's stream, which nothing ties to the encoder's


def of_decoder(part: Part) -> Part:
    return renamed_signals(part, lambda name: DECODER_RESIDUAL if name == RESIDUAL else name)


def decoder_block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    return [of_decoder(part) for part in pegasus.decoder_block(config, i)]


FINAL_STATES = states(FINAL_NORM, STYLE)

MBART = replace(
    PEGASUS,
    name="mbart",
    title="mBART, mBART-50",
    model_type="mbart",
    classes=(
        StockClass(("MBartForConditionalGeneration",), decodes=True, takes_decoder_ids=True, body=BODY),
        StockClass(
            ("MBartModel",),
            decodes=True,
            takes_decoder_ids=True,
            end=states("decoder.layer_norm", STYLE),
            gives=("last_hidden_state",),
        ),
    ),
    encoder_ends=stack_ends("encoder", Tensor("shared.weight", ("vocab", "model"), (None, None))),
    decoder=Stack("decoder_layers", decoder_block),
    decoder_ends=of_decoder(stack_ends("decoder")),
    tied_head=Part(
        (*FINAL_STATES.signals, logits(HEAD)), (*STYLE.norm(FINAL_NORM, multiplied_by(LOGITS)), LOGITS_BIAS), HEAD
    ),
    initialisation=pegasus.learned_positions(),
)
