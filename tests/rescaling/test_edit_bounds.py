"""The bounds of an edit's error that docs/edits.md proves: no input passes them, and the figures there are theirs."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support import tiny
from support.contract import layout_of
from torch import Tensor
from torch.nn.functional import gelu, silu

from bf16_to_fp16.families.resolve import ModelTensors, source_weights
from bf16_to_fp16.families.signals import columns_of
from bf16_to_fp16.families.wiring import Attention
from bf16_to_fp16.rescaling.apply import apply
from bf16_to_fp16.rescaling.columns import column_exponents, in_step
from bf16_to_fp16.rescaling.plan import Plan

ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "gelu": (gelu, 0.1700),
    "gelu_new": (partial(gelu, approximate="tanh"), 0.1701),
    "silu": (silu, 0.2785),
}
EXPONENTS = (1, 2, 5, 10)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_gate_that_is_edited_is_off_by_no_more_than_its_bound(name: str) -> None:
    act, most = ACTIVATIONS[name]
    for k in EXPONENTS:
        x = torch.linspace(-30, 30, 600_001, dtype=torch.float64) * 2.0**k
        off = (2.0**k * act(x * 2.0**-k) - act(x)).abs()
        assert 0.9 * 2.0**k * most - most <= float(off.amax()) <= 2.0**k * most


@pytest.mark.parametrize("k", EXPONENTS)
def test_softmax_rows_and_tanhs_that_are_edited_keep_their_bounds(k: int) -> None:
    for size in (1.0, 30.0, 1e3, 1e5):
        rows = size * torch.randn(256, 32, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        before, after = rows.softmax(1), (rows * 2.0**-k).softmax(1)
        assert torch.equal(rows.argmax(1), (rows * 2.0**-k).argmax(1))
        others = torch.exp((rows - rows.amax(1, keepdim=True)) * 2.0**-k).sum(1) - 1
        assert bool(((after - before).clamp(min=0).sum(1) <= others + 1e-12).all())
        divergence = (before * (rows.log_softmax(1) - (rows * 2.0**-k).log_softmax(1))).sum(1)
        assert bool((divergence <= torch.log1p(others) + 1e-12).all())
    x = torch.linspace(-200, 200, 400_001, dtype=torch.float64)
    off = (torch.tanh(x) - torch.tanh(x * 2.0**-k)).abs()
    assert bool((off <= 2 * torch.exp(-2 * x.abs() * 2.0**-k) + 1e-15).all())


CHANNEL = 5
GATES = {
    "t5": ("encoder.block.0.layer.1.DenseReluDense", "wi_0", "encoder.block.0.layer.1.layer_norm"),
    "llama": ("model.layers.0.mlp", "gate_proj", "model.layers.0.post_attention_layernorm"),
    "gemma3": ("model.layers.0.mlp", "gate_proj", "model.layers.0.pre_feedforward_layernorm"),
}
HEADS = {
    "t5": ("encoder.block.0.layer.0.SelfAttention", "q", "k", "encoder.block.0.layer.0.layer_norm"),
    "llama": ("model.layers.0.self_attn", "q_proj", "k_proj", "model.layers.0.input_layernorm"),
    "pegasus": ("model.encoder.layers.0.self_attn", "q_proj", "k_proj", "model.encoder.layers.0.self_attn_layer_norm"),
}


def gain(model: torch.nn.Module, path: str, kind: str) -> torch.Tensor:
    weight = model.get_parameter(f"{path}.weight").detach().double()
    return weight + (kind == "gemma3")


@pytest.mark.parametrize("kind", GATES)
def test_a_gates_column_is_cut_until_every_row_has_fallen_as_far_as_it_must(kind: str) -> None:
    model = (
        tiny.small(kind, factor=1.0) if kind != "t5" else tiny.small(kind, factor=1.0, feed_forward_proj="gated-gelu")
    )
    at, name, norm = GATES[kind]
    with torch.no_grad():
        gate = model.get_submodule(f"{at}.{name}").weight
        gate[:3, CHANNEL] = 2.0**12
        before = (gate.double() * gain(model, norm, kind)).norm(dim=1)
    layout, needed = layout_of(model), [-4, -3, -2] + [0] * (len(gate) - 3)
    [(signal, exponents)] = column_exponents(
        layout, source_weights(ModelTensors(model), layout), {f"{at}.gate": needed}
    ).items()
    assert signal == columns_of(f"{at}.gate") and exponents[CHANNEL] == -4 and sum(map(bool, exponents)) == 1
    after = (gate.detach().double() * 2.0 ** torch.tensor(exponents) * gain(model, norm, kind)).norm(dim=1)
    assert bool((after <= before * 2.0 ** torch.tensor(needed) * (1 + 1e-3)).all())


@pytest.mark.parametrize("kind", HEADS)
def test_a_heads_column_is_cut_until_its_largest_score_has_fallen_as_far_as_it_must(kind: str) -> None:
    model = tiny.small(kind, factor=1.0)
    at, query, key, norm = HEADS[kind]
    q, k = (model.get_submodule(f"{at}.{name}").weight for name in (query, key))
    with torch.no_grad():
        q[:, CHANNEL] *= 2.0**14
    layout = layout_of(model)
    attention = next(part for part in layout.topology if isinstance(part, Attention) and part.at == at)
    heads, kv = layout.heads(attention), layout.kv_heads(attention)
    needed = [-5] * (len(q) // heads) + [0] * (len(q) - len(q) // heads)
    found = column_exponents(layout, source_weights(ModelTensors(model), layout), {f"{at}.scores": needed})
    exponents = found[columns_of(f"{at}.scores")]
    assert exponents[CHANNEL] < 0 and sum(map(bool, exponents)) == 1

    def largest(factors: torch.Tensor) -> torch.Tensor:
        g = gain(model, norm, kind)
        of_heads = (q.detach().double() * g * factors).unflatten(0, (heads, -1))
        keys = (k.detach().double() * g).unflatten(0, (kv, -1)).repeat_interleave(heads // kv, 0)
        return torch.linalg.matrix_norm(of_heads.transpose(1, 2) @ keys, 2)

    one = torch.ones(q.shape[1], dtype=torch.float64)
    cut = 2.0 ** torch.tensor(exponents, dtype=torch.float64)
    assert float(largest(cut)[0]) <= float(largest(one)[0]) * 2.0**-5 * (1 + 1e-3)
    assert float(largest(cut.clamp(max=1).where(cut == 1, 2 * cut))[0]) > float(largest(one)[0]) * 2.0**-5


def test_what_many_channels_carry_has_no_cut() -> None:
    model = tiny.small("llama", factor=1.0)
    layout, at = layout_of(model), "model.layers.0"
    needed = {f"{at}.mlp.gate": -3, f"{at}.self_attn.scores": -3}
    assert column_exponents(layout, source_weights(ModelTensors(model), layout), needed) == {}


@torch.no_grad()
def test_cuts_in_step_keep_what_each_alone_would_change() -> None:
    """Two gates of an encoder read a channel that one token has, and between them queries."""
    model = tiny.small("gated", factor=1.0, num_layers=3).eval()
    encoder, ids = model.encoder, torch.tensor([[3, 4, 5, 6, 7, 8]])
    model.shared.weight[:, CHANNEL] = 0.0
    model.shared.weight[5, CHANNEL] = 8 * model.shared.weight.abs().mean()
    first, last = (f"encoder.block.{i}.layer.1.DenseReluDense" for i in (0, 2))
    for name, weight in encoder.named_parameters():
        if name.endswith((".o.weight", ".wo.weight")):
            weight[CHANNEL] = 0.0
    for at, size in ((first, 2.0**17), (last, 2.0**28)):
        model.get_submodule(at).wi_0.weight[:, CHANNEL] = size
    before = encoder(ids).last_hidden_state
    alone = {
        columns_of(f"{at}.gate"): [-3 * (c == CHANNEL) for c in range(model.config.d_model)] for at in (first, last)
    }
    scores = columns_of("encoder.block.1.layer.0.SelfAttention.scores")
    layout = layout_of(model)
    deeper = in_step(layout, alone | {scores: alone[columns_of(f"{first}.gate")]})
    assert {name: exponents[CHANNEL] for name, exponents in deeper.items()} == {
        columns_of(f"{first}.gate"): -3,
        columns_of(f"{last}.gate"): -6,
        scores: -6,
    }

    def error(cuts: dict[str, list[int]]) -> float:
        edited: Any = apply(copy.deepcopy(model), layout, Plan(family="t5", exponents=dict(cuts)))
        return float((edited.encoder(ids).last_hidden_state - before).norm() / before.norm())

    assert 100 * error(deeper) < error(alone)
