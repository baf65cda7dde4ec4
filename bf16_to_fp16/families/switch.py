"""Switch Transformers: T5 v1.0 with sparse blocks, in which a router sends each token to one of several feed-forwards.

Experts and router read one norm's output; if that is rescaled by a power of two, their weights are divided by it. The
router always computes in fp32. Rescaling leaves its logits equal bit for bit, so its choice is the same. Neurons have
exponents within each expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from ..errors import UserError
from . import t5
from .configs import number_of
from .parts import experts as parts_of_experts
from .t5 import T5
from .types import Part, Stack
from .wiring import Experts, FeedForward

ACTIVATION, CAPACITY, DTYPE, BIAS = "dense_act_fn", "expert_capacity", "router_dtype", "router_bias"
LAYERS = {"encoder": "num_layers", "decoder": "num_decoder_layers"}


def is_sparse(config: Mapping[str, object], stack: str, i: int) -> bool:
    """Return whether block ``i`` of a stack has experts, as stock code decides: every n-th block from the second on. n
    is the number of blocks over that of sparse ones, rounded down; with no sparse ones, the number of blocks."""
    keys = LAYERS[stack], f"num_sparse_{stack}_layers"
    layers, sparse = (number_of(SWITCH, config, key, "a number of layers", least=0) for key in keys)
    step = layers // sparse if sparse else layers
    return step == 1 or (step > 0 and i % step == 1)


def experts(at: str, config: Mapping[str, object]) -> Part:
    """Return the declaration of a router and its experts at ``at``; raise UserError for a router not in fp32."""
    if config[DTYPE] != "float32":
        raise UserError(
            f"config.json: {DTYPE!r} is {config[DTYPE]!r}; only a router in float32 chooses the same experts after"
            " rescaling"
        )
    number = number_of(SWITCH, config, "num_experts", "a number of experts")
    parts = [t5.neurons(at, activation(config), f"mlp.experts.expert_{i}") for i in range(number)]
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


def activation(config: Mapping[str, object]) -> str:
    name = str(config[ACTIVATION])
    if name.startswith("gated-"):
        raise UserError(
            f"config.json: {ACTIVATION!r} is {name!r}, and stock Switch Transformers has no gates; take it from the"
            " original checkpoint"
        )
    return name


def block(config: Mapping[str, object], i: int, *, stack: str, dense: Stack) -> Sequence[Part]:
    capacity = config.get(CAPACITY)
    if isinstance(capacity, int) and capacity >= 2**63:
        raise UserError(f"config.json: {CAPACITY!r} is {capacity}, more than 64 bits hold; write the tokens per expert")
    *attending, _ = dense.block({"feed_forward_proj": "relu"}, i)
    at = f"{stack}.block.{i}.layer.{len(attending)}"
    sparse = is_sparse(config, stack, i)
    return (*attending, experts(at, config) if sparse else t5.neurons(at, activation(config), "mlp"))


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
