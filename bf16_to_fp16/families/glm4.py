"""GLM-4-0414: a causal language model with norms on both sides of every sublayer, and one matrix for gate and neurons.

As Llama, with these differences. Gains behind a sublayer are stored as they are, so that the stream's factor on them
rounds nothing. Rotary positions turn channels 2i and 2i + 1, of each head's first half alone; the others pass through,
and count as pairs too. The rows of ``gate_up_proj`` are the gate's first and then the neurons', which alone move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .gemma3 import classes, number
from .llama import LLAMA, QUERIES_KEYS_VALUES, STATES, attention, check_rotation
from .types import (
    RESIDUAL,
    FeedForward,
    Kind,
    Part,
    Signal,
    Stack,
    Sublayer,
    Tensor,
    divided_by,
    input_of,
    multiplied_by,
    output_of,
)


def with_norm_behind(part: Part, norm: str) -> Part:
    """Return a sublayer with a norm between its output and the stream."""
    assert isinstance(part.topology, Sublayer)
    return Part(
        (*part.signals, Signal(RESIDUAL, Kind.RESIDUAL, "model", (input_of(norm), output_of(norm)))),
        (*part.tensors, Tensor(f"{norm}.weight", ("model",), (multiplied_by(RESIDUAL),))),
        replace(part.topology, post_norm=norm),
    )


def feed_forward(at: str, config: Mapping[str, object]) -> Part:
    """Return the records of a layer's feed-forward."""
    norm, m = f"{at}.post_attention_layernorm", f"{at}.mlp"
    both, down, neuron = f"{m}.gate_up_proj", f"{m}.down_proj", f"{m}.neuron"
    count = number(config, "intermediate_size")
    gates, neurons = (count, -count), (-count, count)
    return Part(
        signals=(
            Signal(RESIDUAL, Kind.RESIDUAL, "model", (input_of(norm), output_of(down))),
            Signal(norm, Kind.NORM, "model", (output_of(norm),)),
            Signal(neuron, Kind.NEURON, "ff", (output_of(both, spread=neurons), input_of(down))),
            Signal(f"{m}.gate", Kind.FIXED, "ff", (output_of(both, spread=gates),)),
        ),
        tensors=(
            Tensor(f"{norm}.weight", ("model",), (multiplied_by(norm),)),
            Tensor(f"{both}.weight", ("gate_and_ff", "model"), (multiplied_by(neuron, neurons), divided_by(norm))),
            Tensor(f"{down}.weight", ("model", "ff"), (multiplied_by(RESIDUAL), divided_by(neuron))),
        ),
        topology=FeedForward(
            at=m,
            norm=norm,
            gate=both,
            linear=both,
            output=down,
            activation=str(config["hidden_act"]),
            act=f"{m}.activation_fn",
            add=f"{at}:add#2",
            fused=True,
        ),
    )


def block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    """Return the parts of layer ``i``."""
    check_rotation(config)
    at = f"layers.{i}"
    biased = QUERIES_KEYS_VALUES if config["attention_bias"] else ()
    return (
        with_norm_behind(attention(at, config, biased, False, interleaved=True), f"{at}.post_self_attn_layernorm"),
        with_norm_behind(feed_forward(at, config), f"{at}.post_mlp_layernorm"),
    )


GLM4 = replace(
    LLAMA,
    name="glm4",
    title="GLM-4-0414",
    model_type="glm4",
    classes=classes("Glm4ForCausalLM", "Glm4Model", STATES),
    sizes={**LLAMA.sizes, "gate_and_ff": ("intermediate_size", 2)},
    defaults={
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "intermediate_size": 13_696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    },
    encoder=Stack("num_hidden_layers", block),
    eps=1.5625e-7,
    free_keys=(*LLAMA.free_keys, "partial_rotary_factor"),
    initialisation=replace(LLAMA.initialisation, title="GLM-4-0414"),
)
