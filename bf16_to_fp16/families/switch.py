"""Switch Transformers: T5 v1.0 with sparse blocks, in which a router sends each token to one of several feed-forwards.

The router always computes in fp32, where rescaling keeps every bit of its logits, and so the same experts are
chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..errors import UserError
from . import t5
from .configs import whole_number
from .parts import experts as parts_of_experts
from .t5 import T5
from .types import Part, Stack
from .wiring import Experts, FeedForward

ACTIVATION, CAPACITY, DTYPE, BIAS = "dense_act_fn", "expert_capacity", "router_dtype", "router_bias"


def experts(at: str, config: Mapping[str, object]) -> Part:
    """Return the declaration of a router and its experts at ``at``; raise UserError for a router not in fp32."""
    if config[DTYPE] != "float32":
        raise UserError(
            f"config.json: {DTYPE!r} is {config[DTYPE]!r}, in which the router may choose other experts after"
            " rescaling; set it to 'float32'"
        )
    number = whole_number("num_experts", config["num_experts"], "a number of experts")
    parts = [t5.neurons(at, str(config[ACTIVATION]), f"mlp.experts.expert_{i}") for i in range(number)]
    each = [part.topology for part in parts if isinstance(part.topology, FeedForward)]
    norm, router = each[0].norm, f"{at}.mlp.router"
    wiring = Experts(
        at=f"{at}.mlp.experts",
        norm=norm,
        router=router,
        classifier=f"{router}.classifier",
        noise="router_jitter_noise",
        experts=tuple(each),
        add=f"{at}:add",
        dropouts=(f"{at}.dropout",),
    )
    return parts_of_experts(wiring, parts, biased=bool(config[BIAS]))


def block(config: Mapping[str, Any], i: int, *, stack: str, dense: Stack) -> Sequence[Part]:
    """Return the parts of block ``i``. It has experts if the config's sparse step is 1 or ``i % step`` is 1. dense:
    T5's stack, from which the attentions are taken."""
    *attending, _ = dense.block({"feed_forward_proj": "relu"}, i)
    at, key = f"{stack}.block.{i}.layer.{len(attending)}", f"{stack}_sparse_step"
    step = whole_number(key, config[key], "a number", least=0)
    if step == 1 or (step > 0 and i % step == 1):
        return *attending, experts(at, config)
    return *attending, t5.neurons(at, str(config[ACTIVATION]), "mlp")


SWITCH = replace(
    T5,
    name="switch_transformers",
    title="Switch Transformers",
    classes=t5.classes("SwitchTransformers")[:3],
    sizes=t5.SIZES | {"experts": ("num_experts",)},
    keys=(
        *(ACTIVATION, BIAS, DTYPE, "num_sparse_encoder_layers", "num_sparse_decoder_layers", "router_jitter_noise"),
        "relative_attention_max_distance",
    ),
    encoder=Stack("num_layers", partial(block, stack="encoder", dense=t5.ENCODER)),
    decoder=Stack("num_decoder_layers", partial(block, stack="decoder", dense=t5.DECODER)),
    ignorable=(),
    output_scale_key="",
    kept_in_fp32=(),
    # Capacity moves no bound: a token has one expert at most, and without one its output is 0.
    free_keys=(CAPACITY, "router_aux_loss_coef", "router_z_loss_coef", "router_ignore_padding_tokens"),
    ties_all_or_nothing=True,
    encoder_refuses_cache=True,
    variants=({"num_sparse_encoder_layers": 12, "num_sparse_decoder_layers": 12},),
)
