"""Granite: as Llama, with four factors from its config. Three multiply the embedding, the sublayers' outputs and
(instead of head_dim^-1/2) the scores; the fourth divides the logits."""

from __future__ import annotations

from dataclasses import replace

from . import llama
from .parts import ends, table
from .types import MultiplierKind
from .wiring import StackEnds

MULTIPLIERS: dict[MultiplierKind, str] = {
    "embedding": "embedding_multiplier",
    "branch": "residual_multiplier",
    "scores": "attention_multiplier",
    "logits": "logits_scaling",
}

GRANITE = replace(
    llama.LLAMA,
    name="granite",
    title="Granite",
    classes=llama.classes("Granite", labels=()),
    encoder_ends=ends(
        StackEnds("", llama.EMBEDDING, "norm", scaled_by="stack", multiplier=True), table(f"{llama.EMBEDDING}.weight")
    ),
    multipliers=MULTIPLIERS,
)
