"""OLMo 2 and OLMo 3: causal language models whose norms stand behind each sublayer, and none before. As Llama, with
these differences. Linears read the stream itself. Those whose output carries no stream factor divide their columns by
it; q, k and both output projections pass it on into norms that share the config's eps. The gains of the norms behind
each sublayer bound its part of the stream. The norms of queries and keys are over all heads together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from . import llama
from .parts import Style, attention, feed_forward
from .types import Part


def block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    llama.check_window(config)
    at, behind = f"layers.{i}", "post_attention_layernorm"
    style = Style(biased=llama.ATTENTION if config["attention_bias"] else ())
    wiring = llama.wired_attention(
        config, at, norm="", post_norm=f"{at}.{behind}", norms_whole=True, **llama.head_norms(at)
    )
    post_norm = f"{at}.post_feedforward_layernorm"
    gated = llama.wired_feed_forward(at, config["hidden_act"], norm="", post_norm=post_norm)
    return attention(wiring, style, llama.shared_values(config)), feed_forward(gated, style)


OLMO2 = replace(
    llama.LLAMA,
    name="olmo2",
    title="OLMo 2",
    model_type="olmo2",
    classes=llama.classes("Olmo2", labels=(llama.OF_ROWS,)),
    defaults={**llama.WITHOUT_MLP_BIAS, "vocab_size": 50_304},
    encoder=llama.layers(block),
    eps=1e-5,
    norm_site="to#2",
    norm_rounds_once=True,
)

OLMO3 = replace(
    OLMO2,
    name="olmo3",
    title="OLMo 3",
    model_type="olmo3",
    classes=llama.classes("Olmo3", labels=(llama.OF_ROWS,)),
    free_keys=(*llama.LLAMA.free_keys, "layer_types", "sliding_window"),
    older_rotary={"full_attention": ("rope_theta", "rope_scaling"), "sliding_attention": ("rope_theta", "")},
)
