"""What an adapter holds moves as the weights that it is added to, factor by factor."""

import torch
from support import tiny

from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.rescaling.adapters import scaled_adapter
from bf16_to_fp16.rescaling.apply import apply
from bf16_to_fp16.rescaling.plan import Plan
from bf16_to_fp16.rescaling.weights import ModelTensors

PREFIX = "base_model.model."


def test_a_dora_magnitude_is_scaled_as_the_length_of_its_row_is() -> None:
    """By the row's exponent and the one of all columns: exactly what a row's norm is scaled by."""
    model = tiny.small("gated")
    layout = resolve(ModelTensors(model))
    norm, path = "encoder.block.0.layer.0.layer_norm", "encoder.block.0.layer.0.SelfAttention"
    value = [i % 5 - 2 for i in range(15)]
    plan = Plan(family="t5", exponents={norm: [2] * 24, f"{path}.value": value})
    before = model.get_submodule(f"{path}.v").weight.detach().norm(dim=1)
    name = f"{PREFIX}{path}.v.lora_magnitude_vector"
    found = scaled_adapter({name: before}, layout, plan)[name].values
    apply(model, layout, plan)
    assert torch.equal(found, model.get_submodule(f"{path}.v").weight.detach().norm(dim=1))
    assert not torch.equal(found, before)


def test_what_stands_on_shared_values_and_on_gains_less_1_moves_as_the_weights_do() -> None:
    """The two factors of an update to an output projection, and a norm's gain saved whole."""
    model = tiny.small("gemma3")
    layout = resolve(ModelTensors(model))
    at, value = "model.layers.0", "model.layers.0.self_attn.value"
    plan = Plan(family="gemma3", residual_exponent=-4, exponents={value: [i % 5 - 2 for i in range(20)]})
    weight = model.get_submodule(f"{at}.self_attn.o_proj").weight
    gain = model.get_submodule(f"{at}.post_attention_layernorm").weight
    names = [f"{PREFIX}{at}.{n}" for n in ("self_attn.o_proj.lora_A.weight", "self_attn.o_proj.lora_B.weight")]
    names.append(f"{PREFIX}{at}.post_attention_layernorm.weight")
    a, b = torch.randn(2, 40), torch.randn(24, 2)
    given = dict(zip(names, (a, b, gain.detach().clone()), strict=True))
    found = scaled_adapter(given, layout, plan)
    with torch.no_grad():
        weight.copy_(b @ a)
        apply(model, layout, plan)
    moved = [found[name].values for name in names]
    assert torch.allclose(moved[1] @ moved[0], weight, rtol=1e-6) and not torch.equal(moved[0], a)
    assert torch.equal(moved[2], gain) and not torch.equal(moved[2], given[names[2]])
