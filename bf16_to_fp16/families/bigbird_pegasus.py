"""BigBird-Pegasus: Pegasus with learned positions, other modules in the encoder's attention, and biases by the config.
Its embedding multiplies itself by √d, its final norms are called ``layernorm_embedding``, and the encoder's scores are
divided by √head_dim. Its checkpoints ask for block-sparse attention, which sums each context from four products and
rounds each time. Only ``attention_type: original_full`` is supported, full attention, which stock code also uses by
itself for inputs of up to (5 + 2·num_random_blocks)·block_size positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from . import pegasus
from .parts import Style, head, states, tied_head, untied_head
from .parts import attention as attention_part
from .pegasus import BODY, HEAD, LOGITS_BIAS, PEGASUS, SHARED, stack_ends, stack_records
from .types import Part, Stack, StockClass
from .wiring import Attention, StockAttributes

BLOCKS = (
    'attention over blocks has no bound yet; write "original_full" there: the weights are the same, and stock code'
    " does so by itself for short inputs, while long ones are then attended as a whole"
)


def style(config: Mapping[str, object]) -> Style:
    names = ("query", "key", "value", "output", *pegasus.LINEARS)
    return replace(pegasus.STYLE, biased=names if config["use_bias"] else ())


def encoder_block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    at = f"encoder.layers.{i}"
    m = f"{at}.self_attn.self"
    attention = Attention(
        m,
        f"{at}.self_attn_layer_norm",
        f"{m}.query",
        f"{m}.key",
        f"{m}.value",
        f"{at}.self_attn.output",
        heads="encoder_attention_heads",
        add=f"{at}:add",
        divides=True,
        weights_dropout=f"{m}.dropout",
        attributes=StockAttributes(heads="num_attention_heads", head_size="attention_head_size"),
    )
    return attention_part(attention, style(config)), pegasus.neurons(at, config)


def decoder_block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    return pegasus.decoder_block(config, i, style(config))


FINAL = "layernorm_embedding"
FINAL_NORM = f"{BODY}.decoder.{FINAL}"

BIGBIRD_PEGASUS = replace(
    PEGASUS,
    name="bigbird_pegasus",
    title="BigBird-Pegasus",
    model_type="bigbird_pegasus",
    classes=(StockClass(("BigBirdPegasusForConditionalGeneration",), decodes=True, takes_decoder_ids=True, body=BODY),),
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
    encoder_ends=stack_records(stack_ends("encoder", norm=FINAL, scales_itself=True), SHARED),
    encoder_output=states(f"encoder.{FINAL}", pegasus.STYLE),
    decoder_ends=stack_records(stack_ends("decoder", norm=FINAL, scales_itself=True)),
    tied_head=tied_head(FINAL_NORM, HEAD, pegasus.STYLE, LOGITS_BIAS),
    untied_head=untied_head(FINAL_NORM, head("lm_head.weight"), pegasus.STYLE, LOGITS_BIAS),
    free_keys=(*PEGASUS.free_keys, "block_size", "num_random_blocks"),
    initialisation=pegasus.learned_positions(),
)
