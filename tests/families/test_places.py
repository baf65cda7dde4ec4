"""What a path or the name of a site says of its place in a model."""

from support import tiny
from support.contract import layout_of

from bf16_to_fp16.families.places import Place, layer_of, places, places_by_name


def test_the_names_of_sites_say_layer_stack_block_and_operation_of_a_class_that_no_family_knows() -> None:
    found = places_by_name(
        ["encoder.h.3.attn:scores", "encoder.h.3.attn:mul#2", "h.1.mlp:mul", "h.1.mlp.up", "norm:pow"]
    )
    places = [(p.stack, p.block, p.role) for p in found.values()]
    scores = ("encoder", 3, "scores")
    assert places == [scores, scores, (None, 1, "product"), (None, 1, "linear"), (None, None, None)]
    assert layer_of("encoder.block.3.layer.1:add#2") == "encoder.block.3"
    assert layer_of("model.decoder.layers.0.fc1") == "model.decoder.layers.0"
    assert layer_of("lm_head") == "lm_head"


def test_a_layout_says_for_what_each_norm_and_output_is() -> None:
    place = places(layout_of(tiny.build("gemma3")))
    at = "model.layers.0"
    roles: dict[str, str | None] = {
        "input_layernorm": "attention",
        "self_attn.q_norm": "queries",
        "self_attn.k_norm": "keys",
    }
    roles |= {"self_attn.o_proj": "attention", "post_attention_layernorm": "behind attention"}
    roles |= {"pre_feedforward_layernorm": "feed-forward", "mlp.down_proj": "feed-forward", "mlp.gate_proj": None}
    assert {name: place(f"{at}.{name}") for name in roles} == {
        name: Place("decoder", 0, role) for name, role in roles.items()
    }
    assert place("lm_head") == Place("decoder") and place(f"{at}:add") == Place("decoder", 0)
    crossing = places(layout_of(tiny.build("t5")))
    assert crossing("decoder.block.0.layer.1.EncDecAttention:scores") == Place("decoder", 0, "cross-attention")
    assert crossing("encoder.block.0.layer.0.layer_norm") == Place("encoder", 0, "attention")
    assert crossing("lm_head") == Place()
