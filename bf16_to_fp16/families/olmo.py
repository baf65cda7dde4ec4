"""OLMo 2, OLMo 3 and EXAONE 4: as Llama, but with a norm behind each sublayer, and none before.

Linears read the residual stream itself, so columns of v, gate and up are divided by the stream's power of two, 2^r. All
norms share one eps, which rescaling multiplies by 4^r. So every norm's input must be multiplied by 2^r: the outputs of
q, k and the output projections are. The gains of the norm behind a sublayer bound what it adds to the stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import llama
from .parts import Style, attention, feed_forward
from .types import Part, Stack


def block(config: Mapping[str, object], i: int, *, whole: bool = True, turned: bool = True) -> Sequence[Part]:
    """Return the parts of layer ``i``. whole: whether norms of queries and keys span all heads. turned: whether
    positions are rotary."""
    llama.check_window(config)
    at, behind = f"layers.{i}", "post_attention_layernorm"
    style = Style(biased=llama.ATTENTION if config.get("attention_bias") else ())
    wiring = llama.wired_attention(
        config, at, norm="", post_norm=f"{at}.{behind}", norms_whole=whole, **llama.head_norms(at)
    )
    if not turned:
        wiring = replace(wiring, rotary=llama.UNTURNED)
    post_norm = f"{at}.post_feedforward_layernorm"
    gated = llama.wired_feed_forward(at, config["hidden_act"], norm="", post_norm=post_norm)
    return attention(wiring, style, llama.shared_values(config)), feed_forward(gated, style)


OLMO2 = replace(
    llama.LLAMA,
    name="olmo2",
    title="OLMo 2",
    classes=llama.classes("Olmo2", labels=(llama.OF_ROWS,)),
    keys=("hidden_act", "attention_bias"),
    encoder=llama.layers(block),
    norm_site="to#2",
    norm_rounds_once=True,
)

OLMO3 = replace(
    OLMO2,
    name="olmo3",
    title="OLMo 3",
    classes=llama.classes("Olmo3", labels=(llama.OF_ROWS,)),
    free_keys=(*llama.LLAMA.free_keys, "layer_types", "sliding_window"),
    older_rotary={"full_attention": ("rope_theta", "rope_scaling"), "sliding_attention": ("rope_theta", "")},
)


def unturned_without_window(config: Mapping[str, Any], i: int) -> Sequence[Part]:
    """Return layer ``i``'s parts. If the model has sliding windows, only layers with one have rotary positions."""
    turned = config["sliding_window"] is None or config["layer_types"][i] == llama.SLIDING
    return block(config, i, whole=False, turned=turned)


EXAONE4 = replace(
    llama.LLAMA,
    name="exaone4",
    title="EXAONE 4",
    classes=llama.classes("Exaone4"),
    keys=("hidden_act", "layer_types", "sliding_window"),
    encoder=Stack("num_hidden_layers", unturned_without_window),
    free_keys=(*llama.LLAMA.free_keys, "layer_types", "sliding_window_pattern"),
)
