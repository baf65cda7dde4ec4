"""What Switch Transformers have and no other family: sparse blocks among others, and copies of the embedding."""

from copy import deepcopy

import pytest
import torch
from support import tiny
from support.contract import MOVABLE, layout_of, outputs, random_plan

from bf16_to_fp16.families.types import Experts
from bf16_to_fp16.rescaling.apply import apply


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
