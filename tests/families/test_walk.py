"""The walk along the residual stream is the one that stock models take; places by name; axes that share channels."""

from typing import Any

import pytest
import torch
from support import exhaustive, tiny
from support.contract import layout_of
from torch import Tensor, nn

from bf16_to_fp16.families.layout import norms_inside, walk
from bf16_to_fp16.families.places import Place, layer_of, places, places_by_name
from bf16_to_fp16.families.resolve import ModelTensors, resolve
from bf16_to_fp16.measuring.stock import run_everywhere
from bf16_to_fp16.measuring.tap import Tap


@pytest.mark.parametrize("kind", exhaustive.beyond(tiny.CORE, tiny.KINDS))
def test_readers_run_in_the_order_of_the_walk_and_read_the_sites_that_it_names(kind: str) -> None:
    model = tiny.build(kind, 3, factor=1.0, dtype=torch.float32)
    model.set_attn_implementation("eager")
    layout = resolve(ModelTensors(model))
    readers = list(walk(layout))
    entrances = {reader.entrance: model.get_submodule(reader.entrance) for reader in readers}
    ran: list[tuple[str, Tensor]] = []
    made: dict[str, Tensor] = {}

    def record(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            ran.append((path, args[0].detach().clone()))

        return hook

    for path, module in entrances.items():
        module.register_forward_pre_hook(record(path))
    with Tap(model, lambda name, x: made.__setitem__(name, x.detach().clone())):
        ids = torch.arange(10).view(2, 5)
        decoder = {"decoder_input_ids": ids[:, :3]} if layout.stock.decodes else {}
        run_everywhere(model, layout, input_ids=ids, **decoder)
    assert [path for path, _ in ran] == [reader.entrance for reader in readers]
    for reader, (_, read) in zip(readers, ran, strict=True):
        # The embedding of both stacks may be one module, which the tap names once.
        if not reader.is_first or reader.site in made:
            assert torch.equal(made[reader.site], read), reader.site


@pytest.mark.parametrize("kind", exhaustive.beyond(tiny.FIRST, tiny.KINDS))
def test_each_stack_begins_once_and_ends_with_a_norm_that_no_sublayer_follows(kind: str) -> None:
    layout = resolve(ModelTensors(tiny.build(kind)))
    readers = list(walk(layout))
    assert [stack.is_encoder for stack in layout.stacks()] == ([True] if not layout.stock.decodes else [True, False])
    for stack in layout.stacks():
        inside = [reader for reader in readers if reader.stack == stack]
        assert [reader.is_first for reader in inside] == [True] + [False] * len(stack.sublayers)
        assert [reader.sublayer for reader in inside] == [*stack.sublayers, None]
        assert inside[-1].norm == stack.ends.norm
    inside_sublayers = {norm for reader in readers for norm in norms_inside(reader.sublayer)}
    assert {reader.norm for reader in readers if reader.norm} | inside_sublayers == set(layout.norms)
    assert {reader.entrance for reader in readers} <= set(layout.entrances)


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
