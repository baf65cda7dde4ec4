"""Centred keys: the same function, smaller keys, and a way back. What an adapter holds moves as the weights do."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import tiny
from support.contract import certified, layout_of, outputs, random_plan

from bf16_to_fp16 import UserError
from bf16_to_fp16.families.resolve import ModelTensors, resolve, source_weights
from bf16_to_fp16.families.signals import Kind
from bf16_to_fp16.families.wiring import Attention
from bf16_to_fp16.rescaling.adapters import scaled_adapter
from bf16_to_fp16.rescaling.apply import apply, writes
from bf16_to_fp16.rescaling.centred import centrable, centred, centred_bias, centred_tensors, tables_of
from bf16_to_fp16.rescaling.plan import Plan, describe_plan, inverse

KINDS = ("pegasus", "mbart", "bigbird_pegasus")


def centring(model: torch.nn.Module) -> Plan:
    layout = layout_of(model)
    return Plan(family=layout.family.name, centred_keys=[w.at for w in centrable(layout)])


@pytest.mark.parametrize("kind", KINDS)
def test_every_attention_of_a_family_with_a_free_key_bias_is_centrable(kind: str) -> None:
    layout = layout_of(tiny.small(kind))
    assert centrable(layout) == tuple(w for w in layout.topology if isinstance(w, Attention))


@pytest.mark.parametrize("kind", ["gemma3", "llama-biased", "glm4"])
def test_none_is_centrable_without_biases_of_keys_and_of_the_norm_that_they_read(kind: str) -> None:
    assert centrable(layout_of(tiny.small(kind))) == ()
    assert centrable(layout_of(tiny.small("bigbird_pegasus", use_bias=False))) == ()


@pytest.mark.parametrize(
    "between", [*({name: "x"} for name in ("rotary", "query_norm", "key_norm", "cap", "radius")), {"fused": (1, 1, 1)}]
)
def test_none_is_centrable_with_something_between_keys_and_scores(between: dict[str, Any]) -> None:
    layout = layout_of(tiny.small("pegasus"))
    others = (replace(w, **between) if isinstance(w, Attention) else w for w in layout.topology)
    assert centrable(replace(layout, topology=tuple(others))) == ()


@pytest.mark.parametrize("kind", tiny.FIRST)
def test_whatever_keys_can_be_centred_outputs_are_equal_to_rounding_errors(kind: str) -> None:
    """Of every family, so that a new one in which something else stands between keys and scores is found."""
    model = tiny.small(kind)
    plan = centring(model)
    in_double = 1e-6 if kind == "longt5" else 1e-12  # its softmax is in fp32 whatever the dtype is
    for dtype, most in ((torch.float64, in_double), (torch.float32, 1e-6)) if plan.centred_keys else ():
        same = deepcopy(model).to(dtype)
        before = outputs(same)
        after = outputs(apply(same, layout_of(model), plan))
        assert all(x.dtype == dtype for x in after)
        assert all((x - y).abs().max() <= most * x.abs().max() for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize(("kind", "number"), [("t5", 2), ("umt5", 4), ("longt5", 3), ("longt5-local", 2)])
def test_the_tables_of_one_softmax_lose_what_a_head_has_in_common(kind: str, number: int) -> None:
    """Both of LongT5's encoder the same, so that local and global keys keep their places."""
    model = tiny.build(kind, num_layers=2, num_decoder_layers=2)
    layout, plan = layout_of(model), centring(model)
    before = model.state_dict()
    for place, name in enumerate(centred_tensors(layout, plan.centred_keys)):
        before[name].add_(torch.tensor([70000.0, -4096.0, 5000.0]))[place] += 15000.0 * (place + 1)
    before = deepcopy(before)
    after = apply(model, layout, plan).state_dict()
    for w in centrable(layout):
        joined, moved = (torch.cat([state[name] for name in tables_of(w)]).double() for state in (before, after))
        lost = joined - moved
        assert torch.allclose(lost, lost[:1].expand_as(lost), atol=0.01) and lost.abs().amin() > 1000
        assert torch.allclose(lost, lost.bfloat16().double(), atol=0.01)
        assert (moved.amax(0) + moved.amin(0)).abs().amax() <= 70000 * 2.0**-7
    assert len(centred_tensors(layout, plan.centred_keys)) == number
    assert len({tables_of(w) for w in centrable(layout)}) == len(centrable(layout))


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_of_keys_and_scores_fall_and_no_other_rises(kind: str) -> None:
    model = tiny.small(kind)
    layout, before = certified(model)
    _, after = certified(apply(model, layout, centring(model)))
    bounds = {site.name: site.bound for site in after.sites}
    for site in before.sites:
        falls = site.kind in ("key", "scores", "masked scores")
        assert bounds[site.name] < site.bound if falls else bounds[site.name] == site.bound, site.name


@pytest.mark.parametrize("kind", KINDS)
def test_exponents_go_on_a_centred_bias_as_on_any_other(kind: str) -> None:
    """Centred and rescaled is to the bit what is centred first and rescaled then, in files as in memory."""
    model = tiny.small(kind)
    layout = layout_of(model)
    moves = random_plan(layout, (Kind.RESIDUAL, Kind.NORM, Kind.QUERY_KEY))
    both = moves.model_copy(update={"centred_keys": centring(model).centred_keys})
    one, two = deepcopy(model), apply(apply(deepcopy(model), layout, centring(model)), layout, moves)
    found = apply(one, layout, both).state_dict()
    assert all(torch.equal(weight, found[name]) for name, weight in two.state_dict().items())
    for write in writes(ModelTensors(model), layout, both):
        if write.name in centred_tensors(layout, both.centred_keys):
            assert write.source is None and write.data is not None and write.row_exponents is not None
            scaled = torch.ldexp(write.data, write.row_exponents.double() + write.exponent)
            assert torch.equal(scaled.float(), found[write.name])


def test_a_reader_centres_the_keys_of_the_given_attentions_alone() -> None:
    model = tiny.small("pegasus")
    source, layout = ModelTensors(model), layout_of(model)
    weights, (first, *_) = source_weights(source, layout), centrable(layout)
    read = centred(weights, layout, [first.at])
    for name in layout.tensors:
        wanted = centred_bias(weights, layout, first) if name == f"{first.key}.bias" else weights(name)
        assert torch.equal(read(name), wanted)


def test_a_centred_bias_is_the_negative_product_of_weight_and_the_norms_bias() -> None:
    """To the last bit, for weights of so few bits that fp64 holds every sum exactly, and of any number of columns."""
    for columns in (1, 2, 7, 24):
        weight = torch.randint(-99, 99, (5, columns)) / 8
        beta = torch.randint(-99, 99, (columns,)) / 8
        layout = layout_of(tiny.small("pegasus"))
        first = centrable(layout)[0]
        given = {f"{first.key}.weight": weight.bfloat16(), f"{first.norm}.bias": beta.bfloat16()}
        found = centred_bias(given.__getitem__, layout, first)
        product = given[f"{first.key}.weight"].double() @ given[f"{first.norm}.bias"].double()
        assert found.dtype == torch.float64 and torch.equal(found, -product)


def test_a_plan_that_centres_other_keys_does_not_fit() -> None:
    model = tiny.small("pegasus")
    for path in ("model.encoder.layers.0.self_attn.k_proj", "nowhere"):
        with pytest.raises(UserError, match="centres the keys of"):
            apply(model, layout_of(model), Plan(family="pegasus", centred_keys=[path]))
    rotated = tiny.small("llama-biased")
    with pytest.raises(UserError, match="no free key bias"):
        apply(rotated, layout_of(rotated), Plan(family="llama", centred_keys=["model.layers.0.self_attn"]))


def test_only_a_plan_that_centres_keys_says_so() -> None:
    plan = Plan(family="pegasus", centred_keys=["a"])
    assert describe_plan(plan)["centred_keys"] == ["a"]
    assert "centred_keys" not in describe_plan(Plan(family="pegasus"))
    assert inverse(plan).centred_keys == []


PREFIX = "base_model.model."


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
