"""Models that one input drives to all their bounds at once."""

from typing import Any

import torch
from support import tiny

from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.measuring.observer import SiteObserver

CENTRED = ("pegasus", "mbart", "bigbird_pegasus")  # kinds with LayerNorms


def aligned(kind: str, **options: Any) -> Any:
    """Return a model that one input drives to all bounds at once: every row of every linear points the same way."""
    model = tiny.build(kind, 0, factor=1.0, **options)
    way = torch.ones(model.config.d_model)
    if kind in CENTRED:
        way[1::2] = -1  # LayerNorm takes the mean away
    gated = any(name.endswith("wi_1.weight") for name in model.state_dict())
    size = 0.5
    with torch.no_grad():
        for name, weight in model.named_parameters():
            size = 0.3 + (7.3 * size) % 0.6
            negative = name.endswith(("wi_1.weight", "wo.weight")) and gated
            if name.endswith(("o.weight", "out_proj.weight", "fc2.weight", "self_attn.output.weight")):
                weight.copy_(way[:, None].expand_as(weight) * size)
            elif name.endswith(("out_proj.bias", "fc2.bias")):
                weight.copy_(way * size)
            elif "norm" in name:
                weight.copy_(way * size if name.endswith("bias") else torch.full_like(weight, size))
            elif "relative_attention_bias" in name:
                weight.copy_(torch.arange(1.0, weight.shape[1] + 1).expand_as(weight))
            elif weight.dim() == 2 and weight.shape[1] == len(way):
                # Large gates, where an activation is the identity, and a stream far above eps.
                large = 30 if "shared" in name else 3 if "wi" in name else 1
                weight.copy_(way.expand_as(weight) * size * large)
            else:
                weight.fill_(size)
            if negative:
                weight.neg_()
            if kind == "mbart" and name.endswith("layernorm_embedding.weight"):
                weight.zero_()  # no input that points one way reaches what it gives in one channel
        if kind == "pegasus":
            model.model.encoder.embed_positions.weight.copy_(0.2 * way.expand(64, -1))
            model.model.decoder.embed_positions.weight.copy_(0.4 * way.expand(64, -1))
        if kind in CENTRED:
            model.final_logits_bias.fill_(0.3)
    return model


def seen_at_one_position(model: Any, layout: Layout) -> dict[str, float]:
    model.set_attn_implementation("eager")
    observer, one = SiteObserver(model), torch.ones(1, 1, dtype=torch.long)
    with torch.no_grad(), observer:
        model(input_ids=one, **({} if not layout.stock.decodes else {"decoder_input_ids": one, "use_cache": False}))
    return {site.name: site.amax for site in observer.sites()}


UNREACHED = ("norm", "normalised", "statistic")  # kinds whose bounds are for a vector that lies along one channel
