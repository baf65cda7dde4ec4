"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2's and Qwen3's text models, with outputs of a vision tower in their stream.

Positions have three axes, which affects rotary angles only. A merger normalises four of the tower's outputs and makes
one token of them, by two linears with a GELU. Qwen3-VL has further mergers, which read earlier layers of the tower. The
outputs of each such merger are added to the stream after one of the text model's first layers. A merger's norm has its
own eps, and reads outputs that are not rescaled. So only the merger's last linear is rescaled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from .configs import looked_up
from .llama import IMAGE_KEYS, INSIDE, QWEN2, QWEN3, STACK, heads, image_classes
from .nested import keys_inside
from .parts import PLAIN, Style, projector, states
from .signals import RESIDUAL, multiplied_by
from .types import Family, Part, StockClass
from .wiring import FeedForward, ImageInput, Projector

TOWER = "visual"

IMAGE = ImageInput(
    token="image_token_id",
    channels="vision_config.in_channels",
    patch="vision_config.patch_size",
    merged="vision_config.spatial_merge_size",
    frames="vision_config.temporal_patch_size",
    marks="mm_token_type_ids",
    sizes="image_grid_thw",
)


def merger(at: str, linears: tuple[str, str], norm: str, size: str = "vision", **own: Any) -> Part:
    normed, (first, last), style = f"{at}.{norm}", linears, Style(biased=("0", "2", "linear_fc1", "linear_fc2"))
    if own["layer_norm_eps"] is not None:
        style = replace(style, shifts=True)
    wiring = FeedForward(
        at=at,
        norm=normed,
        gate="",
        linear=f"{at}.{first}",
        output=f"{at}.{last}",
        activation="gelu",
        act=f"{at}.mlp.1" if first.startswith("mlp") else f"{at}.act_fn",
        add=own["add"],
    )
    tensors = (
        *style.norm(normed, None, size),
        *style.linear(wiring.linear, "merged", "merged", None, None),
        *style.linear(wiring.output, "model", "merged", multiplied_by(RESIDUAL), None),
    )
    whole = Projector(at=at, norm=normed, tower=TOWER, image=IMAGE, feed_forward=wiring, **own)
    return projector(whole, wiring.output, *tensors, size=size)


def patches(config: Mapping[str, object]) -> int:
    across = looked_up(config, "vision_config.spatial_merge_size", 2)
    return across * across if isinstance(across, int) else 1


def of_qwen2(config: Mapping[str, object], layer_norm_eps: float | None = None) -> Sequence[Part]:
    own: dict[str, Any] = {"layer_norm_eps": layer_norm_eps, "joined": patches(config), "add": ":masked_scatter"}
    return (merger(f"{TOWER}.merger", ("mlp.0", "mlp.2"), "ln_q", **own),)


def of_qwen3(config: Mapping[str, object]) -> Sequence[Part]:
    linears, joined = ("linear_fc1", "linear_fc2"), patches(config)
    parts = [merger(f"{TOWER}.merger", linears, "norm", layer_norm_eps=1e-6, joined=joined, add=":masked_scatter")]
    layers = looked_up(config, "vision_config.deepstack_visual_indexes", (8, 16, 24))
    for i in range(len(layers) if isinstance(layers, (list, tuple)) else 0):
        own = {"layer_norm_eps": 1e-6, "add": f"{STACK}:add", "behind": f"{STACK}.layers.{i}:add#2"}
        parts.append(merger(f"{TOWER}.deepstack_merger_list.{i}", linears, "norm", "merged", **own))
    return parts


def text_model(family: Family, name: str, title: str, kind: str) -> Family:
    states_only = StockClass((kind,), end=states("norm", PLAIN), gives=("last_hidden_state",))
    return replace(family, name=name, title=title, classes=(states_only,))


def with_images(
    text: Family,
    title: str,
    kinds: tuple[str, str],
    brings: Callable[[Mapping[str, object]], Sequence[Part]],
    *,
    width_key: str = "hidden_size",
    flat: bool = False,
) -> Family:
    """Return the family of a text model with a vision tower. kinds: the names of the classes with and without a head.
    brings: a function that declares the tower's mergers, see ``Family``. width_key: the key of the tower's width in
    ``vision_config``. flat: whether older configs have no ``text_config``."""
    across, wide = "vision_config.spatial_merge_size", f"vision_config.{width_key}"

    def around(inner: Family) -> Family:
        return replace(
            inner,
            name=text.name.removesuffix("_text"),
            title=title,
            classes=image_classes(*kinds),
            sizes={**inner.sizes, "vision": (wide,), "merged": (wide, across, across)},
            free_keys=(*inner.free_keys, *IMAGE_KEYS),
            brings=brings,
            **heads(body=INSIDE),
        )

    return replace(around(keys_inside(text)), flat=around(text) if flat else None)


QWEN2_VL_TEXT = text_model(QWEN2, "qwen2_vl_text", "Qwen2-VL (text)", "Qwen2VLTextModel")
QWEN2_5_VL_TEXT = text_model(QWEN2, "qwen2_5_vl_text", "Qwen2.5-VL (text)", "Qwen2_5_VLTextModel")
QWEN3_VL_TEXT = text_model(QWEN3, "qwen3_vl_text", "Qwen3-VL (text)", "Qwen3VLTextModel")
QWEN2_VL = with_images(
    QWEN2_VL_TEXT,
    "Qwen2-VL",
    ("Qwen2VLForConditionalGeneration", "Qwen2VLModel"),
    partial(of_qwen2, layer_norm_eps=1e-6),
    width_key="embed_dim",
    flat=True,
)
QWEN2_5_VL = with_images(
    QWEN2_5_VL_TEXT, "Qwen2.5-VL", ("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLModel"), of_qwen2, flat=True
)
QWEN3_VL = with_images(QWEN3_VL_TEXT, "Qwen3-VL", ("Qwen3VLForConditionalGeneration", "Qwen3VLModel"), of_qwen3)
