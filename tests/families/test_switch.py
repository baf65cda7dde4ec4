"""Switch Transformers: rescaling leaves every router's choice as it is, and what its bounds do not say is refused."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from support import tiny
from support.contract import MOVABLE, layout_of, outputs, random_plan
from torch import Tensor

from bf16_to_fp16.families.types import Experts
from bf16_to_fp16.rescaling.apply import apply


def choices(model: Any) -> dict[str, tuple[Tensor, ...]]:
    """Return what every router of a model gives: who takes each token, with what probability, and its logits."""
    found: dict[str, tuple[Tensor, ...]] = {}
    paths = [w.router for w in layout_of(model).topology if isinstance(w, Experts)]
    for path in paths:
        model.get_submodule(path).register_forward_hook(lambda _, __, out, path=path: found.__setitem__(path, out))
    outputs(model)
    assert list(found) == paths
    return found


@pytest.mark.parametrize("kind", ["switch", "switch-untied", "switch-encoder"])
def test_rescaling_leaves_every_choice_as_it_is(kind: str) -> None:
    model = tiny.build(kind, 1)
    moved = deepcopy(model)
    layout = layout_of(model)
    apply(moved, layout, random_plan(layout, MOVABLE, seed=3))
    before, after = choices(model), choices(moved)
    for path, given in before.items():
        assert all(torch.equal(a, b) for a, b in zip(given, after[path], strict=True)), path
        taken = given[0].sum((0, 1))
        # The choice means something, and some tokens find no place.
        assert (taken > 0).all() and taken.sum() < given[0].shape[0] * given[0].shape[1]


@pytest.mark.parametrize("layers, sparse", [(1, 0), (2, 0), (4, 0), (4, 1), (4, 2), (4, 3), (4, 4), (3, 5), (7, 2)])
def test_sparse_blocks_are_those_of_stock_code(layers: int, sparse: int) -> None:
    model = tiny.build("switch-encoder", num_layers=layers, num_sparse_encoder_layers=sparse)
    stock = [f"encoder.block.{i}.layer.1" for i, block in enumerate(model.encoder.block) if block.is_sparse]
    found = [w.add.removesuffix(":add") for w in layout_of(model).topology if isinstance(w, Experts)]
    assert found == stock


def test_an_encoder_that_ties_nothing_keeps_its_copy_of_the_embedding() -> None:
    """Stock code with ``tie_word_embeddings`` false would make an absent copy at random."""
    model = tiny.build("switch-encoder", 0, tie_word_embeddings=False)
    assert model.encoder.embed_tokens.weight is not model.shared.weight
    layout = layout_of(model)
    assert {"shared.weight", "encoder.embed_tokens.weight"} <= set(layout.tensors)
    moved = deepcopy(model)
    apply(moved, layout, random_plan(layout, MOVABLE, seed=3))
    for a, b in zip(outputs(model), outputs(moved), strict=True):
        assert torch.equal(a, b)
