"""The walk along the residual stream is the one that stock models take."""

from typing import Any

import pytest
import torch
from support import exhaustive, tiny
from torch import Tensor, nn

from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.families.walk import norms_inside, walk
from bf16_to_fp16.measuring.stock import run_everywhere
from bf16_to_fp16.measuring.tap import Tap
from bf16_to_fp16.rescaling.weights import ModelTensors


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
