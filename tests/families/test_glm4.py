"""What GLM-4-0414 has and no other family: one matrix for gates and neurons, pairs of neighbouring channels."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from support import tiny
from support.contract import layout_of, outputs

from bf16_to_fp16 import convert
from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.bounds.linear import bound_linear, rms_normalised
from bf16_to_fp16.rescaling.apply import apply
from bf16_to_fp16.rescaling.plan import Plan

NEURON = "model.layers.0.mlp.neuron"


def test_rows_of_a_linear_are_linears() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, gain = torch.randn(14, 6, generator=generator), torch.rand(6, generator=generator).double()
    source = rms_normalised(gain, Arithmetic())
    found = bound_linear(source, weight, None, Arithmetic(), "name").split((7, 7))
    for half, rows in zip(found, weight.chunk(2), strict=True):
        alone = bound_linear(source, rows, None, Arithmetic())
        assert torch.equal(half.bound, alone.bound) and torch.equal(half.norms, alone.norms)
        assert torch.equal(half.matrix[0:7], alone.matrix[0:7]) and half.matrix.name == ""


def test_neurons_move_and_the_gates_above_them_in_the_same_matrix_do_not() -> None:
    model = tiny.build("glm4")
    layout, before = layout_of(model), outputs(model)
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    count = layout.signals[NEURON].size
    assert count == 37 and layout.tensors["model.layers.0.mlp.gate_up_proj.weight"].shape[0] == 2 * 37
    exponents = torch.randint(-3, 4, (count,), generator=torch.Generator().manual_seed(0))
    apply(model, layout, Plan(family="glm4", exponents={NEURON: exponents.tolist()}))
    after = model.state_dict()["model.layers.0.mlp.gate_up_proj.weight"]
    gates, neurons = weights["model.layers.0.mlp.gate_up_proj.weight"].chunk(2)
    assert torch.equal(after[:count], gates)
    assert torch.equal(after[count:], torch.ldexp(neurons, exponents[:, None]))
    assert all(torch.equal(a, b) for a, b in zip(before, outputs(model), strict=True))


def test_gains_behind_a_sublayer_carry_the_streams_factor_to_the_bit(tmp_path: Path) -> None:
    source = tiny.save(tiny.build("glm4"), tmp_path / "source")
    result = convert(source, tmp_path / "out", run_model=False)
    r = result.plan.residual_exponent
    assert r < 0 and result.plan.drift is None
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    behind = [
        name for name in before if name.endswith(("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"))
    ]
    assert len(behind) == 4
    assert all(torch.equal(after[name].double(), before[name].double() * 2.0**r) for name in behind)
