"""A family of Phi-3's kind, made here: queries, keys and values in one matrix, gates and neurons in another.

It is Llama with other records of the same weights, so that plan and bounds must be those of the matrices apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import tiny

from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.bounds.certificate import Certificate, bound
from bf16_to_fp16.bounds.differentiable import DifferentiableBounds
from bf16_to_fp16.families import known
from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.families.llama import LLAMA, layers, number, shared_values, wired_attention, wired_feed_forward
from bf16_to_fp16.families.parts import attention, feed_forward
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.families.types import Part
from bf16_to_fp16.rescaling.exponents import exponents_of
from bf16_to_fp16.rescaling.plan import Plan
from bf16_to_fp16.rescaling.planner import make_plan
from bf16_to_fp16.rescaling.weights import ModelTensors, source_weights

QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
PARTS = {QKV: [f"self_attn.{name}_proj" for name in "qkv"], GATE_UP: ["mlp.gate_proj", "mlp.up_proj"]}


def block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    at, (kv_heads, group, size) = f"layers.{i}", shared_values(config)
    both, qkv, count = f"{at}.{GATE_UP}", f"{at}.{QKV}", number(config, "intermediate_size")
    rows = (kv_heads * group * size, kv_heads * size, kv_heads * size)
    w = wired_attention(config, at, query=qkv, key=qkv, value=qkv, fused=rows)
    gated = wired_feed_forward(at, config["hidden_act"], gate=both, linear=both, fused=(count, count))
    return attention(w, share=shared_values(config)), feed_forward(gated)


HEADS = ("num_attention_heads", "num_key_value_heads", "num_key_value_heads")
FUSED = replace(
    LLAMA, sizes={**LLAMA.sizes, "gate_and_ff": ("intermediate_size", 2), "qkv": ("qkv_rows",)}, encoder=layers(block)
)


class Fused(ModelTensors):
    """A Llama's weights, those of linears that read one input in one matrix."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        sizes = (self.config[key] * self.config["head_dim"] for key in HEADS)  # type: ignore[operator]
        self.config["qkv_rows"] = sum(sizes)
        self._state = joined(self._state)
        kept = next(iter(self.tensors.values()))
        self.tensors = {name: replace(kept, shape=tuple(t.shape)) for name, t in self._state.items()}


def joined(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights by name with those of ``PARTS`` under one another."""
    made = dict(weights)
    for name in [name for name in weights if name.endswith("self_attn.q_proj.weight")]:
        layer = name.removesuffix("self_attn.q_proj.weight")
        for whole, parts in PARTS.items():
            made[f"{layer}{whole}.weight"] = torch.cat([made.pop(f"{layer}{part}.weight") for part in parts])
    return made


@pytest.fixture(params=[2, 4])
def sources(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[tuple[ModelTensors, Layout], tuple[ModelTensors, Layout]]:
    """A Llama's weights with its matrices apart and together, each with its layout; keys for two heads of queries or
    for one."""
    model = tiny.build("llama", 1, num_key_value_heads=request.param)
    with torch.no_grad():
        for layer in model.model.layers:  # what overflows unless its channel moves
            m, mlp = layer.self_attn, layer.mlp
            for up, down in (
                (m.q_proj, m.k_proj),
                (m.v_proj, m.o_proj.weight.mT),
                (mlp.up_proj, mlp.down_proj.weight.mT),
            ):
                getattr(up, "weight", up)[3:9:2] *= 2.0**17
                getattr(down, "weight", down)[3:9:2] *= 2.0**-17
    apart, together = ModelTensors(model), Fused(model)
    layout = resolve(apart)
    monkeypatch.setattr(known, "FAMILIES", (FUSED,))
    return (apart, layout), (together, resolve(together))


def bounds_and_plan(source: ModelTensors, layout: Layout) -> tuple[Certificate, Plan]:
    weights = source_weights(source, layout)
    planned = bound(layout, weights, Arithmetic(planned=dict.fromkeys(layout.streams, -24)))
    plan = make_plan(layout, weights, planned.ranges, margin_bits=1 / 32).plan
    return bound(layout, weights, Arithmetic()), plan


def test_bounds_and_plan_are_those_of_the_matrices_apart(sources: Any) -> None:
    (one, plan), (other, same) = (bounds_and_plan(*source) for source in sources)
    kinds = {signal.rpartition(".")[2] for signal in plan.exponents}
    assert {"query_key", "value", "neuron"} <= kinds and plan.residual_exponent < 0
    assert same == plan
    apart, together = ({site.name: (site.bound, site.partial) for site in of.sites} for of in (one, other))
    for name in [name for name in apart if name.endswith("q_proj")]:
        layer = name.removesuffix("self_attn.q_proj")
        for whole, parts in PARTS.items():
            values = [apart.pop(f"{layer}{part}") for part in parts]
            assert together.pop(f"{layer}{whole}") == tuple(map(max, zip(*values, strict=True)))
    assert together == apart


def test_the_rows_of_each_linear_get_its_exponents(sources: Any) -> None:
    (source, layout), (_, fused) = sources
    generator = torch.Generator().manual_seed(0)
    exponents: dict[str, int | list[int]] = {
        name: torch.randint(-3, 4, (signal.size,), generator=generator).tolist()
        for name, signal in layout.signals.items()
        if name.endswith(("query_key", "value", "neuron", "layernorm", "gate", "scores"))
    }
    plan = Plan(family="llama", residual_exponent=-2, exponents=exponents)
    moved = {n: torch.ldexp(source.read(n), exponents_of(t, plan).full(t.shape)) for n, t in layout.tensors.items()}
    wanted = joined(moved)
    weights = joined({name: source.read(name) for name in layout.tensors})
    for name, tensor in fused.tensors.items():
        assert torch.equal(torch.ldexp(weights[name], exponents_of(tensor, plan).full(tensor.shape)), wanted[name])


def test_the_differentiable_bounds_are_those_of_the_matrices_apart(sources: Any) -> None:
    apart, together = (DifferentiableBounds(layout, source.read, stream=True) for source, layout in sources)
    one, other = apart.measure(), together.measure()
    owners = apart.owners(), together.owners()
    for site, bounds in one.items():
        if site in other:
            torch.testing.assert_close(other[site], bounds, rtol=1e-6, atol=0)
            own, same = (
                torch.cat(
                    [view(source.read(name)).flatten() for name, view in by_site[site] if name.endswith("weight")]
                )
                for by_site, (source, _) in zip(owners, sources, strict=True)
            )
            assert torch.equal(own, same), site
    assert {name.rpartition(".")[2] for name in other.keys() - one.keys()} == {"gate_up_proj"}  # one site for both
