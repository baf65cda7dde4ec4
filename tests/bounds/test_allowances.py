"""What bounds allow for rounding: inputs and weights that pass one without the allowance that a test is named after."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny
from support.adversary import adverse_inputs, observe
from support.aligned import CENTRED, UNREACHED, aligned, seen_at_one_position
from support.contract import FREE, bound_at, broken, certified
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bf16_to_fp16.bounds.arithmetic import TINY, UNIT, Arithmetic
from bf16_to_fp16.bounds.attention import capped_span, soft_capped, summed_scores
from bf16_to_fp16.bounds.linear import NormOutput, bound_linear
from bf16_to_fp16.families.resolve import ModelTensors, resolve
from bf16_to_fp16.measuring.observer import SiteObserver


def sphere(weights: Tensor) -> tuple[NormOutput, Tensor]:
    """Return a norm's output without gain and errors, and the n of the sphere that ``weights`` [d] answer to most."""
    n = weights.double()
    zero = torch.zeros_like(n)
    return NormOutput(torch.ones_like(n), None, float(n.norm()), 0.0, zero), n


def test_the_roundings_of_a_norm_need_their_allowance() -> None:
    """n = √17 rounds up by 0.94 units, its product with the gain by 0.99 more."""
    model = tiny.build("t5", 0, factor=1.0, d_model=17, num_layers=1, num_decoder_layers=1)
    norm = model.encoder.block[0].layer[0].layer_norm
    norm.weight.data.fill_(1.96875)
    half = model.half()
    _, certificate = certified(half)
    with torch.no_grad():
        out = norm(300 * torch.eye(17).half()).double().amax()
    site = next(s for s in certificate.sites if s.name == "encoder.block.0.layer.0.layer_norm:mul#2")
    assert 1.96875 * math.sqrt(17) * (1 + 1.9 * UNIT) < out <= site.bound
    bare = next(s for s in certificate.sites if s.name == "encoder.block.0.layer.0.layer_norm:to#2")
    assert math.sqrt(17) < float(torch.tensor(17.0).sqrt().half()) <= bare.bound


def test_a_layer_norms_subnormals_need_their_allowance() -> None:
    """n = √23 steps round up to 5, and the bound knows of √24."""
    model = tiny.build("pegasus", 0, factor=1.0)
    path = "model.encoder.layers.0.self_attn_layer_norm"
    norm = model.get_submodule(path)
    norm.weight.data.fill_(2.0**-24)
    norm.bias.data.zero_()
    half = model.half()
    _, certificate = certified(half)
    with torch.no_grad():
        out = float(norm(300 * torch.eye(24).half()).max())
    assert out == 5 * 2.0**-24
    assert out <= next(s.bound for s in certificate.sites if s.name == f"{path}:layer_norm")


def test_the_roundings_of_a_linears_inputs_need_their_allowance() -> None:
    """Where sums are not split: nearly all components round up by a unit as n, and by another times the gain."""
    width, split = 18, Arithmetic(splits=0)
    n = torch.full((width,), 1 + 45.01 * UNIT, dtype=torch.float64)
    n[-1] = math.sqrt(width - float(n[:-1].square().sum()))
    gain = torch.full_like(n, 1 + 46 * UNIT)
    source = NormOutput(gain, None, math.sqrt(width), 2 * UNIT + UNIT**2, split.tiny * (gain * (1 + UNIT) + 1))
    x = (n.half().double() * gain).half().double()
    # The same direction at many scales, so that some results round up too.
    weight = (torch.linspace(1, 2, 200, dtype=torch.float64)[:, None] * n).half()
    found = (weight.double() @ x).half().double()
    made = bound_linear(source, weight, None, split)
    assert bool((found <= made.bound).all())
    assert bool((found <= bound_linear(source, weight, None, Arithmetic()).bound).all())
    assert float((found / made.norms).max()) > 1 + 2.6 * UNIT


@pytest.mark.parametrize("kind", ["t5", "gated"])
def test_inputs_that_are_subnormal_need_their_allowance(kind: str) -> None:
    """Gains of one step among the subnormals: 1.5 steps round up to 2, in every component that a row reads."""
    width, read = 512, 224
    model = tiny.build(kind, 0, factor=1.0, d_model=width, num_layers=1, num_decoder_layers=1)
    n = torch.full((width,), 1.502)
    n[read:] = math.sqrt((width - read * 1.502**2) / (width - read))
    inputs = {}
    with torch.no_grad():
        for layer in model.encoder.block[0].layer:
            layer.layer_norm.weight.fill_(2.0**-24)
            for name, weight in layer.named_parameters():
                if name.endswith(("q.weight", "k.weight", "v.weight")) or "wi" in name:
                    weight.zero_()
                    weight[:, :read] = 60000.0
                elif name.endswith(("o.weight", "wo.weight")):
                    weight.fill_(1.0)
        for i in range(2):
            inputs[f"encoder.block.0.layer.{i}.layer_norm"] = (300 * n).expand(1, 9, width)
    half = model.half()
    layout, honest = certified(half)
    _, exact = certified(half, Arithmetic(exact=True))
    seen = observe(half, layout, inputs)
    assert not broken(honest, seen, FREE)
    unrounded = {s.name: s.bound for s in exact.sites}
    # What reads a norm, and what reads that: a product of two by the square, less what the activation takes off.
    names = [f"encoder.block.0.layer.0.SelfAttention{x}" for x in (".q", ".k", ".v", ":scores", ":context", ".o")]
    names += [
        f"encoder.block.0.layer.1.DenseReluDense{x}" for x in ((".wi", ".wo") if kind == "t5" else (":mul", ".wo"))
    ]
    assert all(seen[name] > 1.25 * unrounded[name] for name in names)


def test_results_that_are_subnormal_need_their_allowance() -> None:
    """Each of eight partial sums is a little over half a step and rounds up to a whole one."""
    weight = torch.full((1, 8), 2.0**-24).half()
    n = torch.full((8,), 0.5005).half().double()
    source = NormOutput(torch.ones(8).double(), None, float(n.norm()), 0.0, torch.zeros(8).double())
    found = sum((weight.double() * n).half().flatten(), start=torch.zeros(()).half())
    made = bound_linear(source, weight, None, Arithmetic())
    assert float(made.norms) * 1.9 < float(found) <= float(made.bound)


def test_the_partial_sums_of_a_linear_need_their_allowance() -> None:
    """One part a little above a tie and seven that each lift the sum above the next: eight roundings up."""
    weight = torch.tensor([1 + 46 * UNIT, *[0.02211] * 7]).half()
    source, n = sphere(weight)
    total = torch.zeros(()).half()
    for product in (weight.double() * n).half():
        total = total + product
    made = bound_linear(source, weight[None], None, Arithmetic())
    assert float(made.norms) * (1 + 7 * UNIT) < float(total) <= float(made.bound)


def test_the_partial_sums_of_scores_need_their_allowance() -> None:
    """The same eight roundings in a product of a query and a key."""
    weight = torch.tensor([1 + 46 * UNIT, *[0.02211] * 7]).half()
    products = weight.double() * sphere(weight)[1]
    exact, total, nothing = products.sum()[None], torch.zeros(()).half(), torch.zeros(1, dtype=torch.float64)
    for product in products.half():
        total = total + product
    made = summed_scores(exact, nothing, exact, nothing, torch.zeros(1, len(weight)).double(), 1.0, Arithmetic())
    assert float(exact) * (1 + 7 * UNIT) < float(total) <= float(made.product)


def test_the_position_bias_is_in_the_bound_of_the_scores() -> None:
    model = tiny.build("t5", factor=1.0)
    attention = model.encoder.block[0].layer[0].SelfAttention
    attention.q.weight.data.zero_()
    attention.relative_attention_bias.weight.data.fill_(-300.0)
    half = model.half()
    layout, certificate = certified(half)
    seen = observe(half, layout, adverse_inputs(copy.deepcopy(half).float(), layout, 2, 0))
    (site,) = [s for s in certificate.sites if s.name == "encoder.block.0.layer.0.SelfAttention:add"]
    assert seen[site.name] == 300.0 <= site.bound < 301.0


def test_long_sums_in_fp32_need_their_allowance() -> None:
    """2¹⁶ terms that each are a little over half an ulp of the sum that they are added to."""
    weight = torch.cat([torch.ones(1), torch.full((1 << 16,), 2.0**-12 * (1 + 2.0**-9))]).half()
    source, n = sphere(weight)
    total = float(np.cumsum((weight.double() * n).float().numpy(), dtype=np.float32)[-1])
    made = bound_linear(source, weight[None], None, Arithmetic(splits=0))
    assert float(made.norms) * (1 + 7 * UNIT) < total <= float(made.bound)


def test_the_two_roundings_of_a_products_result_need_their_allowance() -> None:
    """A product rounded to fp16 and then added to its bias in fp16 rounds twice; split sums are counted apart."""
    product = torch.tensor([1 + 1.001 * UNIT], dtype=torch.float64)
    bias = torch.tensor([UNIT * (1 + 2.0**-9)]).half()
    found = float(product.half() + bias)
    exact = product + bias.double()
    assert float(exact) * (1 + 1.9 * UNIT) < found <= float(Arithmetic(splits=0).summed(exact))


@pytest.mark.parametrize(
    ("length", "count", "weight"), [(64, 63, 2.0**-6 * (1 + 1.01 * UNIT)), (1 << 17, 130411, 128.52 * 2.0**-24)]
)
def test_rows_of_attention_weights_need_their_allowance(length: int, count: int, weight: float) -> None:
    """Nearly all weights of a row are a little over a tie and round up: normal ones, or a long row of subnormals."""
    scores = torch.zeros(length, dtype=torch.float64)
    scores[count:] = math.log((1 - count * weight) / (length - count) / weight)
    total = float(torch.softmax(scores, -1).half().double().sum())
    without_units = 1 + length * 2.0**-23
    assert (7 * UNIT if length > 64 else 0.9 * UNIT) + 1 < total <= Arithmetic(max_length=length).attention_sum
    assert length > 64 or total > without_units


@pytest.mark.parametrize(("length", "ulps"), [(1 << 17, 0.495), (117440, 4.49)])
def test_what_fp32_loses_of_a_long_row_of_attention_needs_its_allowance(length: int, ulps: float) -> None:
    """A sum that starts at 1 loses nearly half an ulp of every term, and each becomes a weight that rounds up."""
    terms = np.full(length, ulps * 2.0**-23, dtype=np.float32)
    terms[0] = 1.0
    total = np.cumsum(terms, dtype=np.float32)[-1]
    row = float((terms / total).astype(np.float16).astype(np.float64).sum())
    # More than the fp32 sum alone may be off by, and in the other case more than the fp16 weights alone.
    alone = length * (2.0**-25 if ulps < 1 else 2.0**-24)
    assert 1 + alone + 2 * UNIT < row <= Arithmetic(max_length=length).attention_sum


def test_a_norm_that_is_multiplied_once_more_needs_its_allowance() -> None:
    """Three roundings up one after another (the head's factor, dropout), among normal numbers and subnormal ones."""
    for width, gain, factor in ((17, 1.96875, 1 / 0.9), (7, 2.0**-24, 1.17)):
        gains = torch.tensor([gain], dtype=torch.float64)
        made = NormOutput(gains, None, math.sqrt(width), 2 * UNIT + UNIT**2, TINY * (gains * (1 + UNIT) + 1))
        exact = math.sqrt(width) * gain * factor
        n = torch.tensor([math.sqrt(width)], dtype=torch.float64).half().double()
        found = float(((n * gains).half().double() * factor).half())
        assert exact * (1 + 2.7 * UNIT) < found <= float(made.scaled(factor, Arithmetic()).bound)
    assert found > 1.29 * exact


def test_one_more_rounding_needs_its_allowance() -> None:
    """Values a little over a tie, normal and subnormal, alone and as the components of a vector."""
    a = Arithmetic()
    for tie in (1 + 1.001 * UNIT, 1.5001 * 2.0**-24):
        exact = torch.full((256,), tie, dtype=torch.float64)
        rounded = exact.half().double()
        assert float(rounded[0]) > tie * (1 + 0.98 * UNIT)
        assert bool((rounded <= a.rounded(exact)).all())
        assert float(rounded.norm()) <= a.rounded_length(float(exact.norm()), 256)
    # Eight partial sums of a little over half a step among the subnormals.
    parts = torch.full((8,), 0.5001 * 2.0**-24, dtype=torch.float64)
    assert float(parts.half().double().sum()) <= float(a.summed(parts.sum()))


def rounded_up(out: Tensor, times: int = 1) -> Tensor:
    return out + out.sign() * times * (UNIT * out.abs() + TINY)


class RoundingUp(TorchDispatchMode):
    """Context manager under which every rounding that the certificate allows for is as large as it may be, and upwards:
    a unit for each operation, eight for a product in eight partial sums, one more for its bias; and as many half steps
    among the subnormals."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name in ("mm", "bmm"):
            return rounded_up(out, 8)
        if name in ("addmm", "baddbmm"):
            return rounded_up(out, 9)
        if name == "native_layer_norm":
            return (rounded_up(out[0]), *out[1:])
        operands = [a for a in args if isinstance(a, Tensor)]
        # Norms' eps and the 1 of gelu_new are added in exact steps here; adding nought and multiplying by 1 are exact.
        exact = any(not bool(a.any()) for a in operands) or (len(operands) == 1 and (name == "add" or 1.0 in args[1:2]))
        if name in ("_softmax", "gelu", "silu") or (name in ("add", "mul") and not exact):
            return rounded_up(out)
        return out


@pytest.mark.parametrize("subnormal", [False, True])
@pytest.mark.parametrize("kind", ["t5", "gated", "gelu", "silu", "umt5", "pegasus", "mbart"])
def test_roundings_that_all_go_up_stay_under_the_bounds_and_come_close(kind: str, subnormal: bool) -> None:
    model = aligned(kind)
    if subnormal:
        for name, weight in model.named_parameters():
            if name.endswith(("v.weight", "v_proj.weight", "v_proj.bias", "wi.weight", "fc1.weight", "fc1.bias")):
                weight.data.mul_(2.0**-20)
    _, certificate = certified(model, Arithmetic(max_length=1))
    model.set_attn_implementation("eager")
    observer, one = SiteObserver(model, fast_products=False), torch.ones(1, 1, dtype=torch.long)
    with torch.no_grad(), RoundingUp(), observer:
        model(input_ids=one, decoder_input_ids=one, use_cache=False)
    seen = {site.name: site.amax for site in observer.sites()}
    checked = [s for s in certificate.sites if s.name in seen and not s.name.endswith(("to#2", ":softmax"))]
    # The emulation has roundings of its own, those of fp32.
    assert not [s.name for s in checked if not seen[s.name] <= s.bound * (1 + 1e-6)]
    close = [seen[s.name] / s.bound for s in checked if s.kind not in (*UNREACHED, "activation")]
    # A LayerNorm is also allowed what fp32 may lose of deviations that are small beside the stream.
    assert len(close) > 50
    assert subnormal or min(close) > (0.5 if kind in CENTRED else 1 - 16 * UNIT)


@pytest.mark.parametrize("kind", ["t5", "pegasus", "mbart"])
def test_the_streams_roundings_need_their_allowance(kind: str) -> None:
    """What sublayers add is so little beside the stream that only the stream's own roundings count; some round up."""
    for step in range(8):
        model = aligned(kind, **tiny.few_layers(kind))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                branch = name.endswith(("o.weight", "out_proj.weight", "fc2.weight", "out_proj.bias", "fc2.bias"))
                weight.mul_(2.0**-14 if branch else 1 + step / 8)
        half = model.half()
        layout, certificate = certified(half)
        assert not broken(certificate, seen_at_one_position(half, layout))


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "silu"])
def test_activations_below_zero_need_their_allowance(activation: str) -> None:
    """Biases that put every neuron where the activation is lowest: no input makes one positive."""
    x = torch.linspace(-3, 0, 3001, dtype=torch.float64)
    from transformers.activations import ACT2FN

    lowest = float(x[ACT2FN[activation](x).argmin()])
    model = tiny.build("pegasus", 0, factor=1.0, activation_function=activation)
    layer = model.model.encoder.layers[0]
    layer.fc1.weight.data.mul_(1e-3)
    layer.fc1.bias.data.fill_(lowest)
    layer.fc2.weight.data.fill_(-1.0)
    layer.fc2.bias.data.zero_()
    half = model.half()
    layout, certificate = certified(half)
    seen = observe(half, layout, adverse_inputs(copy.deepcopy(half).float(), layout, 8, 0))
    assert not broken(certificate, seen, FREE)
    ranges = certificate.ranges["model.encoder.layers.0.fc2"]
    with torch.no_grad():
        neurons = layer.activation_fn(layer.fc1(torch.zeros(1, 24).half())).abs()
    assert float(neurons.min()) > 0.16
    assert bool((neurons <= ranges.input.amax).all())
    assert seen["model.encoder.layers.0.fc2"] > 0.16 * model.config.encoder_ffn_dim


def test_scores_that_cancel_need_their_roundings() -> None:
    """Queries that are the same in two channels, keys that are opposite but for one unit in the last place."""
    model = tiny.build("t5", 3, factor=1.0, num_layers=1, num_decoder_layers=1)
    attention = model.encoder.block[0].layer[0].SelfAttention
    size = model.config.d_kv
    with torch.no_grad():
        queries, keys = attention.q.weight, attention.k.weight
        queries.zero_()
        keys.zero_()
        for head in range(model.config.num_heads):
            j = head * size
            queries[j : j + 2] = torch.randn(queries.shape[1]).half().float()
            keys[j] = torch.randn(keys.shape[1]).half().float()
            keys[j + 1] = -keys[j]
            keys[j + 1, 0] *= 1 + 2.0**-10
    half = model.half()
    layout = resolve(ModelTensors(half))
    site = "encoder.block.0.layer.0.SelfAttention:scores"
    seen = observe(half, layout, adverse_inputs(copy.deepcopy(half).float(), layout, 64, 0))[site]
    arithmetics = Arithmetic(exact=True), Arithmetic(splits=0), Arithmetic()
    exact, whole, split = (
        next(s.bound for s in certified(half, arithmetic)[1].sites if s.name == site) for arithmetic in arithmetics
    )
    assert exact * (1 + 2 * UNIT) ** 20 < seen <= whole < split


@pytest.mark.parametrize("cap", [30.0, 2051.0, 2.0**-9 + 2.0**-22])
def test_a_soft_cap_needs_the_allowance_of_each_of_its_roundings(cap: float) -> None:
    """Every number of fp16 through the quotient, the tanh and the product, as stock code computes them."""
    x = torch.arange(0x7BFF + 1, dtype=torch.int16).view(torch.float16)
    x = x[(x / cap).isfinite()]
    wide = x.double()
    quotient = x / cap
    tanh = quotient.tanh()
    result = tanh * cap
    made = soft_capped(wide, cap, Arithmetic())
    for computed, limit in ((quotient, made.quotient), (tanh, made.tanh), (result, made.result)):
        assert bool((computed.double() <= limit).all())
        share = computed.double() / limit
        assert float(share[1:].max()) > 0.999
    off = (result.double() - cap * (wide / cap).tanh()).abs()
    assert bool((off <= made.error).all())
    assert float((off / made.error)[1:].max()) > 0.3
    # Two scores of one query, up to ``wide`` either of them, lie no further apart than this behind the cap.
    for other in (0.5, 0.0, -1.0):
        partner = (x * other).half()
        apart = (wide - partner.double()).abs()
        behind = (result.double() - ((partner / cap).tanh() * cap).double()).abs()
        assert bool((behind <= capped_span(apart, made)).all())


def test_logits_behind_a_soft_cap_reach_it_and_no_more() -> None:
    model = tiny.build("gemma3", 1, factor=8.0, final_logit_softcapping=0.5)
    layout, certificate = certified(model, Arithmetic(exact=True))
    seen = observe(model, layout, adverse_inputs(model, layout, 32, 1))
    for site in ("model:div", "model:tanh", "model:mul"):
        limit = bound_at(certificate, site)
        assert 0.9 * limit < seen[site] <= limit * (1 + 1e-5)
    assert certificate.at("model:mul") == pytest.approx(0.5, rel=1e-3)


def test_a_norm_behind_a_sublayer_says_what_it_adds() -> None:
    """Whatever the sublayer makes, each channel gets its gain times √d, and all together the largest gain's."""
    model = tiny.build("gemma3")
    _, certificate = certified(model, Arithmetic(exact=True))
    layer = model.model.layers[0]
    root, table = math.sqrt(model.config.hidden_size), model.model.embed_tokens.weight.double()
    gain = (1 + layer.post_attention_layernorm.weight.double()).abs()
    stream = table.abs().amax(0) * root + gain * root
    assert certificate.at("model.layers.0:add") == pytest.approx(float(stream.detach().max()), rel=1e-4)
    entering = certificate.ranges["model.layers.0.pre_feedforward_layernorm"].norm
    length = float(table.norm(dim=1).max() + gain.max()) * root
    assert length < float(stream.norm())
    assert entering is not None and entering.norm_max == pytest.approx(length, rel=1e-4)
