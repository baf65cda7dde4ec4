"""BigBird-Pegasus: Pegasus with learned positions, other modules in the encoder's attention, and biases by the config.

Its embedding multiplies itself by √d, its final norms are called ``layernorm_embedding``, and the encoder's scores are
divided by √head_dim. Each of its checkpoints asks for attention over blocks, whose context is summed of four products
and rounded each time; stock code takes full attention instead for inputs of up to (5 + 2·num_random_blocks)·block_size
positions, and for all of them with ``attention_type: original_full``, which is what is supported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from . import pegasus
from .pegasus import BODY, PEGASUS, states
from .types import (
    RESIDUAL,
    Attention,
    Kind,
    Part,
    Signal,
    Stack,
    StackEnds,
    StockAttributes,
    StockClass,
    Tensor,
    divided_by,
    input_of,
    multiplied_by,
    output_of,
)

BLOCKS = (
    'attention over blocks has no bound yet; write "original_full" there: the weights are the same, and stock code'
    " does so by itself for short inputs, while long ones are then attended as a whole"
)


def with_biases(part: Part, config: Mapping[str, object]) -> Part:
    """Return the records of an attention, without the biases of its linears unless the config has them."""
    w = part.topology
    assert isinstance(w, Attention)
    biases = {f"{path}.bias" for path in (w.query, w.key, w.value, w.output)} if not config["use_bias"] else set()
    return replace(part, tensors=tuple(t for t in part.tensors if t.name not in biases))


def attention(at: str) -> Part:
    """Return the records of the encoder's attention, with biases."""
    norm, outer = f"{at}.self_attn_layer_norm", f"{at}.self_attn"
    m = f"{outer}.self"
    qk, value = f"{m}.query_key", f"{m}.value"
    return Part(
        signals=(
            Signal(RESIDUAL, Kind.RESIDUAL, "model", (input_of(norm), output_of(f"{outer}.output"))),
            Signal(norm, Kind.NORM, "model", (output_of(norm),)),
            Signal(qk, Kind.QUERY_KEY, "model", (output_of(f"{m}.query"), output_of(f"{m}.key", -1))),
            Signal(value, Kind.VALUE, "model", (output_of(f"{m}.value"), input_of(f"{outer}.output"))),
        ),
        tensors=(
            Tensor(f"{norm}.weight", ("model",), (multiplied_by(norm),)),
            Tensor(f"{norm}.bias", ("model",), (multiplied_by(norm),)),
            Tensor(f"{m}.query.weight", ("model", "model"), (multiplied_by(qk), divided_by(norm))),
            Tensor(f"{m}.query.bias", ("model",), (multiplied_by(qk),)),
            Tensor(f"{m}.key.weight", ("model", "model"), (divided_by(qk), divided_by(norm))),
            Tensor(f"{m}.key.bias", ("model",), (divided_by(qk),)),
            Tensor(f"{m}.value.weight", ("model", "model"), (multiplied_by(value), divided_by(norm))),
            Tensor(f"{m}.value.bias", ("model",), (multiplied_by(value),)),
            Tensor(f"{outer}.output.weight", ("model", "model"), (multiplied_by(RESIDUAL), divided_by(value))),
            Tensor(f"{outer}.output.bias", ("model",), (multiplied_by(RESIDUAL),)),
        ),
        topology=Attention(
            at=m,
            norm=norm,
            query=f"{m}.query",
            key=f"{m}.key",
            value=f"{m}.value",
            output=f"{outer}.output",
            memory=False,
            bias="",
            heads="encoder_attention_heads",
            scaled=True,
            add=f"{at}:add",
            divides=True,
            weights_dropout=f"{m}.dropout",
            attributes=StockAttributes(heads="num_attention_heads", head_size="attention_head_size"),
        ),
    )


def encoder_block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    """Return the parts of encoder layer ``i``."""
    at = f"encoder.layers.{i}"
    return (with_biases(attention(at), config), pegasus.feed_forward(at, "encoder_ff", config))


def decoder_block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    """Return the parts of decoder layer ``i``."""
    *attentions, feed_forward = pegasus.decoder_block(config, i)
    return (*(with_biases(part, config) for part in attentions), feed_forward)


def stack_ends(at: str) -> Part:
    """Return the records of both ends of a stack, without the embedding's tensor."""
    positions, norm = f"{at}.embed_positions", f"{at}.layernorm_embedding"
    seen = (output_of(f"{at}.embed_tokens"), output_of(positions), input_of(norm))
    return Part(
        signals=(Signal(RESIDUAL, Kind.RESIDUAL, "model", seen),),
        tensors=(Tensor(f"{positions}.weight", ("positions", "model"), (None, multiplied_by(RESIDUAL))),),
        topology=StackEnds(
            at=at,
            embedding=f"{at}.embed_tokens",
            positions=f"{positions}.weight",
            scale="scale_embedding",
            norm=norm,
            scales_itself=True,
        ),
    )


ENCODER_ENDS = stack_ends("encoder")


FINAL_NORM = f"{BODY}.decoder.layernorm_embedding"


BIGBIRD_PEGASUS = replace(
    PEGASUS,
    name="bigbird_pegasus",
    title="BigBird-Pegasus",
    model_type="bigbird_pegasus",
    classes=(
        StockClass(
            ("BigBirdPegasusForConditionalGeneration",), decodes=True, takes_decoder_ids=True, end=None, body=BODY
        ),
    ),
    defaults={
        **PEGASUS.defaults,
        "max_position_embeddings": 4096,
        "activation_function": "gelu_new",
        "scale_embedding": True,
        "use_bias": False,
        "attention_type": "block_sparse",
    },
    alone={"attention_type": ("original_full", BLOCKS)},
    encoder=Stack("encoder_layers", encoder_block),
    decoder=Stack("decoder_layers", decoder_block),
    encoder_ends=replace(
        ENCODER_ENDS,
        tensors=(Tensor("shared.weight", ("vocab", "model"), (None, multiplied_by(RESIDUAL))), *ENCODER_ENDS.tensors),
    ),
    encoder_output=states("encoder.layernorm_embedding"),
    decoder_ends=stack_ends("decoder"),
    tied_head=pegasus.tied_head(FINAL_NORM),
    untied_head=pegasus.untied_head(FINAL_NORM),
    free_keys=(*PEGASUS.free_keys, "block_size", "num_random_blocks"),
    initialisation=replace(
        PEGASUS.initialisation,
        title="BigBird-Pegasus",
        modules={name: rule for name, rule in PEGASUS.initialisation.modules.items() if rule is not None},
    ),
)
