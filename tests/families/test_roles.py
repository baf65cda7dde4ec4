"""What a path or the name of a site says of its place in a model."""

from __future__ import annotations

from bf16_to_fp16.families.roles import layer_of


def test_a_layer_is_named_by_the_path_up_to_its_number_else_by_its_first_module() -> None:
    assert layer_of("encoder.block.3.layer.1:add#2") == "encoder.block.3"
    assert layer_of("model.decoder.layers.0.fc1") == "model.decoder.layers.0"
    assert layer_of("lm_head") == "lm_head"
