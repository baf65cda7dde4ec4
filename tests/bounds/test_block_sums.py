"""Sums over blocks of positions, which LongT5's transient-global attention makes: their bounds hold and are reached."""

import copy
import math
from typing import Any

import pytest
import torch
from support import tiny
from support.adversary import ENCODER, adverse_inputs, observe
from support.contract import broken, certified, layout_of

from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.bounds.linear import NormOutput, block_sums
from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.families.wiring import Attention

BLOCK = 5  # positions of a block, of which a row of the adversary's has one and all but one of another: 9


def model_with_one_sum() -> tuple[Any, Layout, Attention]:
    """Return an fp32 model whose encoder has one layer and makes one sum of the adversary's rows."""
    assert ENCODER == 2 * BLOCK - 1
    model = tiny.build("longt5", 1, factor=1.0, global_block_size=BLOCK, num_layers=1)
    layout, _ = certified(model)
    return model, layout, next(w for w in layout.topology if isinstance(w, Attention))


def reached(model: Any, site: str, inputs: dict[str, torch.Tensor]) -> float:
    """Return which share of its bound a site reaches, none of which is passed."""
    layout, certificate = certified(model, Arithmetic(exact=True))
    seen = observe(model, layout, inputs)
    assert not broken(certificate, {name: amax * (1 - 1e-5) for name, amax in seen.items()}, ("residual", "embedding"))
    return seen[site] / next(s.bound for s in certificate.sites if s.name == site)


def test_a_sum_over_a_block_and_what_is_left_of_a_row_reaches_its_bound() -> None:
    model, layout, w = model_with_one_sum()
    inputs = adverse_inputs(model, layout, 4, 0)
    gain = model.get_submodule(w.norm).weight
    inputs[w.norm] = torch.zeros_like(inputs[w.norm])
    inputs[w.norm][..., int(gain.abs().argmax())] = 300.0
    assert reached(model, f"{w.at}:sum", inputs) > 0.999


def test_keys_and_values_of_sums_reach_their_bounds() -> None:
    model, layout, w = model_with_one_sum()
    with torch.no_grad():
        model.get_submodule(w.block_norm).weight.mul_(4)
    for path in (w.key, w.value):
        rows = model.get_submodule(path).weight * model.get_submodule(w.block_norm).weight
        inputs = adverse_inputs(model, layout, 4, 0)
        inputs[w.block_norm] = 300 * rows[rows.norm(dim=1).argmax()].detach().expand_as(inputs[w.block_norm]).clone()
        assert reached(model, path, inputs) > 0.9


def test_the_position_bias_of_sums_is_in_the_bound_of_the_scores() -> None:
    model, layout, w = model_with_one_sum()
    with torch.no_grad():
        table = model.get_submodule(w.block_bias.removesuffix(".weight")).weight
        table.fill_(3000.0)
    layout, certificate = certified(model)
    seen = observe(model, layout, adverse_inputs(model, layout, 4, 0))
    site = f"{w.at}:add"
    most = max(amax for name, amax in seen.items() if name.partition("#")[0] == site)
    limit = certificate.at(site)
    assert limit is not None and 2900 < most <= limit < 3200


def test_the_roundings_of_a_sum_need_their_allowance() -> None:
    # The sum lies between two fp16 numbers and rounds up.
    value, terms = 1 + 5 * 2.0**-10, 9
    source = NormOutput(torch.full((4,), value, dtype=torch.float64), None, 1.0, 0.0, torch.zeros(4).double())
    rounded = float(torch.tensor(terms * value).half())
    assert rounded > terms * value
    bound, length = block_sums(source, terms, terms, Arithmetic(splits=0))
    assert bool((bound >= rounded).all())
    # One component alone may be as long as n.
    assert rounded <= length < terms * value * 1.01
    wide, _ = block_sums(source, terms, 32768, Arithmetic())
    assert bool((wide > bound).all())


def test_the_length_of_sums_is_no_longer_than_their_components_allow() -> None:
    model, layout, w = model_with_one_sum()
    half = copy.deepcopy(model).half()
    layout, certificate = certified(half)
    norm = certificate.ranges[w.block_norm].norm
    assert norm is not None and norm.norm_max >= max(
        float((BLOCK * 2 - 1) * math.sqrt(layout.tensors[f"{w.norm}.weight"].shape[0]) * x.abs())
        for x in half.get_submodule(w.norm).weight.detach().float()
    )


@pytest.mark.parametrize("kind", ["longt5", "longt5-local"])
@pytest.mark.parametrize("length", [3, 8, 13, 40])
def test_a_row_of_scores_has_as_many_keys_as_the_bounds_count(kind: str, length: int) -> None:
    model = tiny.build(kind, factor=1.0, num_layers=1, num_decoder_layers=1)
    layout = layout_of(model)
    w = next(w for w in layout.topology if isinstance(w, Attention))
    ids = torch.ones(1, length, dtype=torch.int64)
    with torch.no_grad():
        found = model.encoder(input_ids=ids, output_attentions=True).attentions[0]
    assert layout.sees(w, length) == found.shape[-1] == 9 + (length // 4 if kind == "longt5" else 0)
