"""Cuts of columns bring gates and scores under their aims by the fewest channels, or there is none."""

import pytest
import torch
from support import tiny
from support.contract import layout_of

from bf16_to_fp16.families.signals import columns_of
from bf16_to_fp16.families.wiring import Attention
from bf16_to_fp16.rescaling.columns import column_exponents
from bf16_to_fp16.rescaling.weights import ModelTensors, source_weights

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
