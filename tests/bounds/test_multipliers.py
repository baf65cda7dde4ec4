"""The numbers of Granite's config and of Gemma 4's files that multiply signals are in the bounds of those signals."""

from typing import Any

import pytest
from support import tiny
from support.contract import certified

from bf16_to_fp16.bounds.findings import Certificate

FOLLOWING: dict[str, dict[str, float]] = {
    "embedding_multiplier": {"model:mul": 4, "model.layers.0.input_layernorm (sum of squares)": 16},
    "residual_multiplier": {"model.layers.1:mul#2": 4, "model.norm (sum of squares)": 16},
    "attention_multiplier": {"model.layers.0.self_attn:mul#5": 4, "model.layers.0.self_attn:add#3": 4},
    "logits_scaling": {"model:div": 1 / 4},
}
"""By what the bounds of sites grow where the multiplier, which is large, grows to its fourfold."""


@pytest.mark.parametrize("key", FOLLOWING)
def test_bounds_grow_with_what_multiplies_their_sites(key: str) -> None:
    def at(number: float) -> Certificate:
        changes: dict[str, Any] = {key: number}
        return certified(tiny.build("granite", factor=1.0, **changes), target="norm-safe")[1]

    less, more = at(1e3), at(4e3)
    for site, grows in FOLLOWING[key].items():
        before, after = less.at(site), more.at(site)
        assert before is not None and after == pytest.approx(grows * before, rel=1e-2), site


def test_the_number_behind_a_layer_multiplies_the_stream() -> None:
    def at(number: float) -> Certificate:
        model = tiny.build("gemma4", factor=1.0)
        model.model.layers[1].layer_scalar.fill_(-number)
        return certified(model, target="norm-safe")[1]

    less, more = at(1e3), at(4e3)
    for site, grows in {"model.layers.1:add#2": 1, "model.layers.1:mul": 4, "model.norm (sum of squares)": 16}.items():
        before, after = less.at(site), more.at(site)
        assert before is not None and after == pytest.approx(grows * before, rel=1e-2), site
