"""Which keys transformers 4.57 is told, and what is said where none would do."""

from __future__ import annotations

from typing import Any

import pytest
from support import tiny

from bf16_to_fp16.families.older import differences, with_older_keys
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.rescaling.weights import ModelTensors


@pytest.mark.parametrize(
    ("rotation", "told", "differs"),
    [
        ({"rope_type": "default", "rope_theta": 500.0}, {"rope_theta": 500.0}, False),
        ({"rope_theta": 500.0, "partial_rotary_factor": 0.5}, {"rope_theta": 500.0}, False),
        ({"rope_type": "linear", "factor": 4.0, "rope_theta": 5.0}, {"rope_theta", "rope_scaling"}, False),
        ({"rope_type": "longrope", "attention_factor": 1.0, "rope_theta": 5.0}, {"rope_theta"}, True),
        ({"rope_type": "proportional", "rope_theta": 5.0}, {"rope_theta"}, True),
        ({"full_attention": {"rope_type": "default", "rope_theta": 5.0}}, {}, True),
    ],
)
def test_what_both_versions_read_is_written_and_what_they_do_not_is_said(
    rotation: dict[str, Any], told: Any, differs: bool
) -> None:
    layout = resolve(ModelTensors(tiny.build("llama")))
    config = {"rope_parameters": rotation}
    written = with_older_keys(layout.family, config)
    added = {key: value for key, value in written.items() if key not in config}
    assert added == told if isinstance(told, dict) else set(added) == told
    assert [("rotary" in note) for note in differences(layout, written)] == [True] * differs
