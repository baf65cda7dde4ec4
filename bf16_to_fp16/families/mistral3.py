"""Ministral 3 and Mistral 3: the text model of Mistral or Ministral 3, and a Pixtral vision tower that feeds its
stream.

Ministral 3 is Mistral, but queries grow with the logarithm of their position. A projector normalises the tower's
outputs and makes one token of each square of patches. Its norm has the text model's eps, which rescaling changes. So
outputs for images change slightly; outputs for text do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import UserError
from .configs import looked_up, positive
from .llama import IMAGE_KEYS, INSIDE, MISTRAL, block, classes, heads, image_classes, layers
from .nested import keys_inside
from .parts import Style
from .parts import projector as projector_records
from .signals import RESIDUAL, multiplied_by
from .types import Part
from .wiring import Attention, FeedForward, ImageInput, Projector

ACROSS = "spatial_merge_size"  # config key of the number of patches of a token, in height and in width


def projector(config: Mapping[str, object]) -> Sequence[Part]:
    at, across = "multi_modal_projector", looked_up(config, ACROSS, 2)
    norm, merging, add = f"{at}.norm", f"{at}.patch_merger.merging_layer", ":masked_scatter"
    style = Style(biased=("linear_1", "linear_2") if looked_up(config, "multimodal_projector_bias") else ())
    wiring = FeedForward(
        at=at,
        norm=norm,
        gate="",
        linear=f"{at}.linear_1",
        output=f"{at}.linear_2",
        activation=str(looked_up(config, "projector_hidden_act", "gelu")),
        act=f"{at}.act",
        add=add,
    )
    whole = Projector(
        at=at,
        add=add,
        norm=norm,
        tower="vision_tower",
        image=ImageInput(
            token="image_token_index",
            channels="vision_config.num_channels",
            patch="vision_config.patch_size",
            merged=ACROSS,
            sizes="image_sizes",
        ),
        joined=across * across if isinstance(across, int) else 1,
        by_channel=True,
        shares_eps=True,
        merging=merging,
        feed_forward=wiring,
        gives="image_hidden_states",
    )
    tensors = (
        *style.norm(norm, None, "vision"),
        *style.linear(merging, "vision", "merged", None, None),
        *style.linear(wiring.linear, "model", "vision", None, None),
        *style.linear(wiring.output, "model", "model", multiplied_by(RESIDUAL), None),
    )
    return (projector_records(whole, wiring.output, *tensors),)


def growth(config: Mapping[str, Any]) -> tuple[float, float]:
    """Return (g, n): queries at position p are multiplied by 1 + g·ln(1 + ⌊p/n⌋); raise UserError for bad numbers."""
    beta, reach = "llama_4_scaling_beta", "original_max_position_embeddings"
    rotation = config["rope_parameters"]
    return (
        positive(beta, rotation.get(beta), "a number of at least 0", allow_zero=True),
        positive(reach, rotation.get(reach), "a number over 0"),
    )


def growing(config: Mapping[str, object], i: int) -> Sequence[Part]:
    attention, feed_forward = block(config, i, biases={})
    wiring = attention.topology
    assert isinstance(wiring, Attention) and wiring.rotary is not None
    grows = replace(wiring, rotary=replace(wiring.rotary, growth=growth(config)))
    return replace(attention, topology=grows), feed_forward


def of_either(config: Mapping[str, object], i: int) -> Sequence[Part]:
    kind = config.get("model_type")
    if kind not in TEXT_MODELS:
        raise UserError(
            f"config.json: {TEXT_TYPE!r} is {kind!r}, whose layers are not supported; known are"
            f" {', '.join(TEXT_MODELS)}"
        )
    return TEXT_MODELS[str(kind)](config, i)


TEXT_MODELS: Mapping[str, Callable[[Mapping[str, object], int], Sequence[Part]]] = {
    "mistral": MISTRAL.encoder.block,
    "ministral3": growing,
}

MINISTRAL3 = replace(
    MISTRAL, name="ministral3", title="Ministral 3", classes=classes("Ministral3"), encoder=layers(growing)
)

TEXT_TYPE = "text_config.model_type"
TEXT = keys_inside(replace(MISTRAL, encoder=layers(of_either), **heads(body=INSIDE)))

MISTRAL3 = replace(
    TEXT,
    name="mistral3",
    title="Mistral 3",
    classes=image_classes("Mistral3ForConditionalGeneration", "Mistral3Model"),
    sizes={
        **TEXT.sizes,
        "vision": ("vision_config.hidden_size",),
        "merged": ("vision_config.hidden_size", ACROSS, ACROSS),
    },
    keys=(*TEXT.keys, TEXT_TYPE, "multimodal_projector_bias", "projector_hidden_act"),
    free_keys=(*TEXT.free_keys, *IMAGE_KEYS),
    brings=projector,
)
