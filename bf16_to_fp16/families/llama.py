"""Llama, Mistral, Qwen2 and Qwen3: causal language models of one stack, with rotary positions and a SiLU gate.

They differ in which linears have a bias, and in Qwen3's norms of queries and keys, which read what carries the stream's
factor, since they share its eps. Without those a factor passes a rotation where both channels of a pair have it, and
one head of keys serves several of queries: so queries and keys have one exponent for each pair of channels i and i +
head_dim/2 of each head of keys. Gains are stored as they are, so every norm can move.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ..errors import UserError
from .gemma3 import BODY, check_window, classes, shared_values
from .older import kind_of
from .types import (
    RESIDUAL,
    Attention,
    Axis,
    Deviation,
    Family,
    FeedForward,
    Head,
    HeadLinear,
    Initialisation,
    Kind,
    OutputScale,
    Part,
    Quotient,
    SameAs,
    Signal,
    Spread,
    Stack,
    StackEnds,
    StockAttributes,
    Tensor,
    divided_by,
    input_of,
    multiplied_by,
    output_of,
)

Biases = Mapping[str, Collection[str]]
"""Linears that have a bias, by the config key that says so, "" for always."""


def linear(
    path: str, shape: tuple[str, str], axes: tuple[Axis | None, Axis | None], biased: Collection[str]
) -> tuple[Tensor, ...]:
    """Return the weight of a linear, and its bias where its last name is among those that have one."""
    weight = Tensor(f"{path}.weight", shape, axes)
    if path.rpartition(".")[2] not in biased:
        return (weight,)
    return weight, Tensor(f"{path}.bias", shape[:1], axes[:1])


def attention(
    at: str, config: Mapping[str, object], biased: Collection[str], head_norms: bool, *, interleaved: bool = False
) -> Part:
    """Return the records of a layer's attention; interleaved: whether positions turn channels 2i and 2i + 1."""
    norm, m = f"{at}.input_layernorm", f"{at}.self_attn"
    value, query_key = f"{m}.value", f"{m}.query_key"
    q, k, v, o = (f"{m}.{name}_proj" for name in "qkvo")
    group = kv_heads, heads, size = shared_values(config)
    in_head: Spread = (1, size // 2, 2) if interleaved else (2, size // 2)
    pairs: Spread = (kv_heads, *in_head)
    pairs_read: Spread = (kv_heads, heads, *(in_head[1:] if interleaved else (1, *in_head)))
    signals = [
        Signal(RESIDUAL, Kind.RESIDUAL, "model", (input_of(norm), output_of(o))),
        Signal(norm, Kind.NORM, "model", (output_of(norm),)),
        Signal(value, Kind.VALUE, "kv_inner", (output_of(v), input_of(o, group))),
    ]
    reads = divided_by(norm)
    tensors = [
        Tensor(f"{norm}.weight", ("model",), (multiplied_by(norm),)),
        *linear(v, ("kv_inner", "model"), (multiplied_by(value), reads), biased),
        *linear(o, ("model", "inner"), (multiplied_by(RESIDUAL), divided_by(value, group)), biased),
    ]
    queries, keys = multiplied_by(query_key, pairs_read), divided_by(query_key, pairs)
    if head_norms:
        queries = keys = multiplied_by(RESIDUAL)
        for name in ("q", "k"):
            made, after = f"{m}.{name}_proj", f"{m}.{name}_norm"
            signals.append(Signal(RESIDUAL, Kind.RESIDUAL, "model", (output_of(made), input_of(after))))
            signals.append(Signal(after, Kind.FIXED, "head", (output_of(after),)))
            tensors.append(Tensor(f"{after}.weight", ("head",), (None,)))
    else:
        seen = output_of(q, spread=pairs_read), output_of(k, -1, pairs)
        signals.append(Signal(query_key, Kind.QUERY_KEY, "kv_inner", seen, pairs))
    tensors += linear(q, ("inner", "model"), (queries, reads), biased)
    tensors += linear(k, ("kv_inner", "model"), (keys, reads), biased)
    topology = Attention(
        at=m,
        norm=norm,
        query=q,
        key=k,
        value=v,
        output=o,
        memory=False,
        bias="",
        heads="num_attention_heads",
        scaled=True,
        add=f"{at}:add",
        query_norm=f"{m}.q_norm" if head_norms else "",
        key_norm=f"{m}.k_norm" if head_norms else "",
        norms_by_position=head_norms,
        rotary="rotary_emb",
        kv_heads="num_key_value_heads",
        interleaved=interleaved,
    )
    return Part(tuple(signals), tuple(tensors), topology)


def feed_forward(at: str, config: Mapping[str, object], biased: Collection[str]) -> Part:
    """Return the records of a layer's feed-forward."""
    norm, m = f"{at}.post_attention_layernorm", f"{at}.mlp"
    neuron, reads = f"{m}.neuron", divided_by(norm)
    gate, up, down = (f"{m}.{name}_proj" for name in ("gate", "up", "down"))
    return Part(
        signals=(
            Signal(RESIDUAL, Kind.RESIDUAL, "model", (input_of(norm), output_of(down))),
            Signal(norm, Kind.NORM, "model", (output_of(norm),)),
            Signal(neuron, Kind.NEURON, "ff", (output_of(up), input_of(down))),
            Signal(f"{m}.gate", Kind.FIXED, "ff", (output_of(gate),)),
        ),
        tensors=(
            Tensor(f"{norm}.weight", ("model",), (multiplied_by(norm),)),
            *linear(gate, ("ff", "model"), (None, reads), biased),
            *linear(up, ("ff", "model"), (multiplied_by(neuron), reads), biased),
            *linear(down, ("model", "ff"), (multiplied_by(RESIDUAL), divided_by(neuron)), biased),
        ),
        topology=FeedForward(
            at=m,
            norm=norm,
            gate=gate,
            linear=up,
            output=down,
            activation=str(config["hidden_act"]),
            act=f"{m}.act_fn",
            add=f"{at}:add#2",
        ),
    )


ROTATIONS = ("default", "linear", "dynamic", "llama3", "proportional")
"""Kinds of rotary positions whose cosines and sines are those of an angle; others multiply them by a factor."""


def check_rotation(config: Mapping[str, object]) -> None:
    """Raise UserError for rotary positions that multiply queries and keys by more than a rotation does."""
    for key in ("rope_parameters", "rope_scaling"):
        found = config.get(key)
        if not isinstance(found, Mapping):
            continue
        kind = kind_of(found)
        if kind not in ROTATIONS and found.get("attention_factor") != 1:
            raise UserError(
                f"config.json: {key!r} is of the kind {kind!r}, which multiplies queries and keys by a factor that has"
                f" no bound yet; known are {', '.join(ROTATIONS)}, and others with an attention_factor of 1.0"
            )


def block(config: Mapping[str, object], i: int, *, biases: Biases, head_norms: bool = False) -> Sequence[Part]:
    """Return the parts of layer ``i``; raise UserError for a config with a part that no record states.

    head_norms: whether queries and keys are normalised, head by head.
    """
    check_rotation(config)
    check_window(config)
    biased = [name for key, names in biases.items() if not key or config[key] for name in names]
    at = f"layers.{i}"
    return (attention(at, config, biased, head_norms), feed_forward(at, config, biased))


def final_norm(at: str) -> Part:
    """Return a final norm whose output users read."""
    seen = Signal(f"{at}.output", Kind.FIXED, "model", (output_of(at),))
    return Part((seen,), (Tensor(f"{at}.weight", ("model",), (None,)),))


LOGITS = Signal("logits", Kind.FIXED, "vocab", (output_of("lm_head"),))
NORM = f"{BODY}.norm"

TIED_HEAD = Part(
    signals=(Signal(RESIDUAL, Kind.RESIDUAL, "model", (output_of(NORM, -1),)), LOGITS),
    tensors=(Tensor(f"{NORM}.weight", ("model",), (divided_by(RESIDUAL),)),),
    topology=Head("lm_head", (HeadLinear("lm_head", f"{BODY}.embed_tokens.weight"),)),
)

UNTIED_HEAD = Part(
    signals=(Signal(NORM, Kind.NORM, "model", (output_of(NORM),)), LOGITS),
    tensors=(
        Tensor(f"{NORM}.weight", ("model",), (multiplied_by(NORM),)),
        Tensor("lm_head.weight", ("vocab", "model"), (None, divided_by(NORM))),
    ),
    topology=Head("lm_head", (HeadLinear("lm_head", "lm_head.weight"),)),
)

STATES = final_norm("norm")


QUERIES_KEYS_VALUES = ("q_proj", "k_proj", "v_proj")
ATTENTION = (*QUERIES_KEYS_VALUES, "o_proj")

LLAMA = Family(
    name="llama",
    title="Llama",
    model_type="llama",
    classes=classes("LlamaForCausalLM", "LlamaModel", STATES),
    sizes={
        "vocab": ("vocab_size",),
        "model": ("hidden_size",),
        "inner": ("num_attention_heads", "head_dim"),
        "kv_inner": ("num_key_value_heads", "head_dim"),
        "head": ("head_dim",),
        "ff": ("intermediate_size",),
    },
    defaults={
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": SameAs("num_attention_heads"),
        "head_dim": Quotient("hidden_size", "num_attention_heads"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    },
    encoder=Stack(
        "num_hidden_layers",
        partial(block, biases={"attention_bias": ATTENTION, "mlp_bias": ("gate_proj", "up_proj", "down_proj")}),
    ),
    decoder=None,
    encoder_ends=Part(
        signals=(Signal(RESIDUAL, Kind.RESIDUAL, "model", (output_of("embed_tokens"), input_of("norm"))),),
        tensors=(Tensor("embed_tokens.weight", ("vocab", "model"), (None, multiplied_by(RESIDUAL))),),
        topology=StackEnds(at="", embedding="embed_tokens", positions="", scale="", norm="norm"),
    ),
    encoder_output=STATES,
    decoder_ends=None,
    tied_head=TIED_HEAD,
    untied_head=UNTIED_HEAD,
    embedding="embed_tokens.weight",
    head="lm_head.weight",
    copies=(),
    ignorable=(),
    logits_bias="",
    output_scale=OutputScale.NEVER,
    output_scale_key="",
    kept_in_fp32=(),
    eps_key="rms_norm_eps",
    eps=1e-6,
    centred_norm=False,
    norm_site="mul#2",
    made_in_fp32=True,
    blind_padding=True,
    dropout={"attention": "attention_dropout"},
    # `pretraining_tp` cut products in slices in older versions, which changes no product.
    free_keys=("max_position_embeddings", "pretraining_tp", "rope_parameters", "rope_scaling", "rope_theta"),
    buckets=None,
    attributes=StockAttributes(heads="", head_size="head_dim", groups="num_key_value_groups"),
    initialisation=Initialisation(
        title="Llama",
        factor="initializer_range",
        default=0.02,
        modules={"*norm": None, "*": Deviation()},
    ),
    untie="copy",
)

SHARED_DEFAULTS = {key: value for key, value in LLAMA.defaults.items() if not key.endswith("_bias")}

MISTRAL = replace(
    LLAMA,
    name="mistral",
    title="Mistral",
    model_type="mistral",
    classes=classes("MistralForCausalLM", "MistralModel", STATES),
    defaults=SHARED_DEFAULTS | {"intermediate_size": 14_336, "num_key_value_heads": 8},
    encoder=Stack("num_hidden_layers", partial(block, biases={})),
    free_keys=(*LLAMA.free_keys, "sliding_window"),
    initialisation=replace(LLAMA.initialisation, title="Mistral"),
)

QWEN2 = replace(
    LLAMA,
    name="qwen2",
    title="Qwen2",
    model_type="qwen2",
    classes=classes("Qwen2ForCausalLM", "Qwen2Model", STATES),
    defaults=SHARED_DEFAULTS | {"vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32},
    encoder=Stack("num_hidden_layers", partial(block, biases={"": QUERIES_KEYS_VALUES})),
    free_keys=(*LLAMA.free_keys, "layer_types", "max_window_layers", "sliding_window", "use_sliding_window"),
    initialisation=replace(LLAMA.initialisation, title="Qwen2"),
)

QWEN3 = replace(
    QWEN2,
    name="qwen3",
    title="Qwen3",
    model_type="qwen3",
    classes=classes("Qwen3ForCausalLM", "Qwen3Model", STATES),
    defaults={**QWEN2.defaults, "head_dim": 128, "attention_bias": False},
    encoder=Stack("num_hidden_layers", partial(block, biases={"attention_bias": ATTENTION}, head_norms=True)),
    initialisation=replace(LLAMA.initialisation, title="Qwen3"),
)
