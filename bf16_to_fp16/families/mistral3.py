"""Mistral 3: Mistral's text model, into whose stream a Pixtral tower brings what it sees.

A projector reads the tower's outputs through a norm, makes one of four, and a token of that with two linears and a GELU
between them. Its norm has the text model's eps, which goes with the square of the stream's factor while the tower's
outputs carry none: images drift by that, which is predicted and measured, and text does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .configs import looked_up
from .llama import INSIDE, MISTRAL, heads, image_classes
from .parts import Style
from .types import (
    RESIDUAL,
    FeedForward,
    ImageInput,
    Kind,
    Part,
    Projector,
    Signal,
    keys_inside,
    multiplied_by,
    output_of,
)

ACROSS = "spatial_merge_size"  # config key of how many patches make a token each way


def projector(config: Mapping[str, object]) -> Sequence[Part]:
    """Return what brings the tower's outputs into the stream."""
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
    part = Part(
        signals=(
            Signal(RESIDUAL, Kind.RESIDUAL, "model", (output_of(wiring.output),)),
            Signal(norm, Kind.FIXED, "vision", (output_of(norm),)),
        ),
        tensors=(
            *style.norm(norm, None, "vision"),
            *style.linear(merging, "vision", "merged", None, None),
            *style.linear(wiring.linear, "model", "vision", None, None),
            *style.linear(wiring.output, "model", "model", multiplied_by(RESIDUAL), None),
        ),
        topology=Projector(
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
        ),
    )
    return (part,)


SIZES = {"vocab_size": 131_072, "hidden_size": 5120, "intermediate_size": 32_768, "num_hidden_layers": 40}
SMALL = {**MISTRAL.defaults, **SIZES, "head_dim": 128}
TEXT = keys_inside(replace(MISTRAL, defaults=SMALL, eps=1e-5, **heads(body=INSIDE)), "text_config")
TEXT_TYPE = "text_config.model_type"

MISTRAL3 = replace(
    TEXT,
    name="mistral3",
    title="Mistral 3",
    model_type="mistral3",
    classes=image_classes("Mistral3ForConditionalGeneration", "Mistral3Model"),
    sizes={
        **TEXT.sizes,
        "vision": ("vision_config.hidden_size",),
        "merged": ("vision_config.hidden_size", ACROSS, ACROSS),
    },
    defaults={
        **TEXT.defaults,
        TEXT_TYPE: "mistral",
        "vision_config.hidden_size": 1024,
        ACROSS: 2,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": True,
    },
    free_keys=(*TEXT.free_keys, "vision_config.*", "image_token_index", "vision_feature_layer"),
    alone={TEXT_TYPE: ("mistral", "its own scaling of queries by position has no place; run it in bf16 or fp32")},
    tie_keys=("tie_word_embeddings", *TEXT.tie_keys),
    brings=projector,
    initialisation=replace(TEXT.initialisation, title="Mistral 3"),
)
