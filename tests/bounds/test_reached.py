"""Bounds are tight: models made for it reach each of them, so that a looser or a tighter formula is noticed."""

import copy
import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.adversary import observe
from support.aligned import CENTRED, UNREACHED, aligned, seen_at_one_position
from support.contract import broken, certified
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5LayerNorm

from bf16_to_fp16.bounds import factored
from bf16_to_fp16.bounds.arithmetic import UNIT, UNIT32, Arithmetic, norm_units
from bf16_to_fp16.bounds.feed_forward import GatedNeurons, PlainNeurons
from bf16_to_fp16.bounds.linear import NORM_ERROR, NormOutput, bound_linear, lengthened, rms_normalised
from bf16_to_fp16.bounds.spectral import Spectra


def nothing_kept() -> Spectra:
    return Spectra(lambda name: torch.zeros(0))


def test_a_negative_weight_behind_a_gate_takes_the_other_sign() -> None:
    one = torch.ones(2, dtype=torch.float64)
    exact = Arithmetic(exact=True)
    source = NormOutput(one, None, math.sqrt(2), 0.0, 0 * one)
    gate = bound_linear(source, torch.tensor([[1.0, 0], [1, 0]]), None, exact)
    other = bound_linear(source, torch.tensor([[1.0, 0], [-1, 0]]), None, exact)
    neurons = GatedNeurons(gate, other, exact, 1.0, nothing_kept())
    # n = (√2, 0) gives 2 and −2, so 2 − (−2).
    assert 4 <= neurons.row(torch.tensor([1.0, -1.0], dtype=torch.float64), 0) <= 4.001


@pytest.mark.parametrize("kind", ["t5", "gated", "gelu", "silu", "umt5", *CENTRED, "t5-encoder"])
def test_a_model_whose_rows_point_one_way_reaches_every_bound(kind: str) -> None:
    model = aligned(kind)
    layout, certificate = certified(model, Arithmetic(exact=True))
    seen = seen_at_one_position(model, layout)
    reached = {s.name: seen[s.name] / s.bound for s in certificate.sites if s.name in seen and s.kind not in UNREACHED}
    assert len(reached) > 50
    wrong = {name: ratio for name, ratio in reached.items() if not 1 - 1e-4 < ratio < 1 + 1e-5}
    assert not wrong
    _, rounded = certified(copy.deepcopy(model).half())
    assert not broken(rounded, seen_at_one_position(copy.deepcopy(model).half(), layout))


@pytest.mark.parametrize("kind", ["t5", "gated", "pegasus", "mbart"])
def test_dropout_that_keeps_everything_reaches_every_bound(kind: str) -> None:
    rates: dict[str, Any] = {"dropout": 0.3, "attention_dropout": 0.2, "activation_dropout": 0.25}
    model = aligned(kind, **(rates if kind in CENTRED else {"dropout_rate": 0.3})).train()

    def keep(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        # The factor may be rounded to fp16, here always up.
        factor = np.float16(1 / (1 - p))
        factor = factor if factor >= 1 / (1 - p) else np.nextafter(factor, np.float16(np.inf))
        return x * float(factor) if training else x

    layout, certificate = certified(model, Arithmetic(train=True, exact=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "dropout", keep)
        seen = seen_at_one_position(model, layout)
    reached = {s.name: seen[s.name] / s.bound for s in certificate.sites if s.name in seen and s.kind not in UNREACHED}
    wrong = {name for name, ratio in reached.items() if not (1 - UNIT) ** 8 < ratio < 1 + 1e-5}
    # Pegasus names several products of one module alike; the largest has the bound.
    assert kind in CENTRED or not wrong
    assert all(name.endswith(":mul") and reached[name] < 1 for name in wrong)
    assert len(reached) > 50


def test_a_stream_that_begins_behind_a_norm_begins_at_what_the_norm_can_give() -> None:
    """One channel of an embedding and of its positions as large as can be, and sublayers that add nothing."""
    model = tiny.build("mbart", 0, factor=1.0)
    for name, weight in model.named_parameters():
        if "shared" in name or "embed_positions" in name:
            weight.data.zero_()
            weight.data[:, 3] = 900.0
        elif "layernorm_embedding" in name:
            weight.data.copy_(torch.full((24,), 2.0) if name.endswith("weight") else 0.5 * torch.eye(24)[3])
        elif name.endswith(("out_proj.weight", "out_proj.bias", "fc2.weight", "fc2.bias")):
            weight.data.zero_()
    layout, certificate = certified(model.half())
    seen, bounds = seen_at_one_position(model, layout), {s.name: s for s in certificate.sites}
    for stack in layout.stacks():
        at = stack.ends.at
        for site in (stack.ends.embedded, layout.stream(stack.ends), *(w.add for w in stack.sublayers)):
            assert 0.95 < seen[site] / bounds[site].bound <= 1, site
        # √d times 900, twice rounded, with positions of 900.
        assert bounds[f"{at}.embed_tokens:mul"].bound / (24**0.5 * 900) == pytest.approx(1, abs=2 * UNIT)
    with torch.no_grad():
        length = float(model.model.encoder.layernorm_embedding(torch.eye(24).half() * 900).norm(dim=1).max())
    reader = certificate.ranges["model.encoder.layers.0.self_attn_layer_norm"].norm
    assert reader is not None and length <= reader.norm_max < 1.05 * length
    # A plan that scales the stream does not scale what that norm reads.
    _, planned = certified(model, Arithmetic(planned=dict.fromkeys(layout.streams, -12)))
    first = layout.stream(layout.stacks()[0].ends)
    assert planned.at(first) == pytest.approx(bounds[first].bound, rel=2.0**-14)


@pytest.mark.parametrize(("kind", "pairs"), [("t5", False), ("t5", True), ("gated", False)])
def test_neurons_that_share_an_inputs_length_reach_the_feed_forwards_bound(kind: str, pairs: bool) -> None:
    """The other extreme: orthogonal neurons, not all of which can be large at once, or opposite ones (ReLU), of which
    only half can be more than zero."""
    model = tiny.build(kind, 0, factor=1.0, d_ff=24)
    inner = model.encoder.block[0].layer[1]
    dense = inner.DenseReluDense
    rows = torch.eye(24)
    if pairs:
        rows[12:] = -rows[:12]
    inner.layer_norm.weight.data.fill_(1.0)
    dense.wo.weight.data.fill_(1.0)
    for linear in (dense.wi,) if kind == "t5" else (dense.wi_0, dense.wi_1):
        linear.weight.data.copy_(30 * rows)
    layout, certificate = certified(model, Arithmetic(exact=True), refine=0)
    path = "encoder.block.0.layer.1"
    seen = observe(model, layout, {f"{path}.layer_norm": 300 * rows.abs().amax(0).expand(1, 9, 24)})
    limit = next(s.bound for s in certificate.sites if s.name == f"{path}.DenseReluDense.wo")
    assert limit * (1 - 1e-4) < seen[f"{path}.DenseReluDense.wo"] <= limit


def test_a_few_neurons_that_outweigh_the_others_reach_the_bound_of_all_rows() -> None:
    """Three orthogonal neurons, not all of which can be large at once, among many that all can and count for little:
    those are why the largest three would count in full."""
    model = tiny.build("gated", 0, factor=1.0, d_ff=60)
    inner = model.encoder.block[0].layer[1]
    dense = inner.DenseReluDense
    rows = torch.eye(24)[0].repeat(60, 1)
    rows[:3] = torch.eye(24)[:3]
    inner.layer_norm.weight.data.fill_(1.0)
    dense.wo.weight.data.fill_(2.0**-12)
    dense.wo.weight.data[:, :3] = 1.0
    for linear in (dense.wi_0, dense.wi_1):
        linear.weight.data.copy_(30 * rows)
    layout, certificate = certified(model, Arithmetic(exact=True), refine=0)
    path = "encoder.block.0.layer.1"
    seen = observe(model, layout, {f"{path}.layer_norm": 300 * torch.eye(24)[0].expand(1, 9, 24)})
    site = next(s for s in certificate.sites if s.name == f"{path}.DenseReluDense.wo")
    assert site.bound * (1 - 1e-3) < seen[site.name] <= site.bound
    # Columns of a length of √24 each, of which only one counts.
    length = certificate.ranges["encoder.final_layer_norm"].norm
    assert length is not None and length.norm_max < 1.5 * math.sqrt(24) * site.bound


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), width=st.integers(2, 24), count=st.integers(1, 40), outliers=st.integers(0, 12))
def test_no_input_passes_the_bound_of_the_heaviest_neurons(seed: int, width: int, count: int, outliers: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    exact = Arithmetic(exact=True)
    gain = torch.rand(width, generator=generator, dtype=torch.float64) * 3
    source = NormOutput(gain, None, math.sqrt(width), 0.0, 0 * gain)
    gate, other = (torch.randn(count, width, generator=generator).double() for _ in range(2))
    out = torch.randn(5, count, generator=generator).double() ** 3
    # Some that stand out, some of them along one another, and one that is always 0.
    gate[:outliers], out[:, :outliers] = 8 * gate[:outliers], 64 * out[:, :outliers]
    other[: outliers // 2] = gate[: outliers // 2]
    other[count // 2] = 0
    made = [bound_linear(source, weight, None, exact) for weight in (gate, other)]
    neurons = GatedNeurons(made[0], made[1], exact, 1.0, nothing_kept())
    bound_, _ = neurons.rows(out, "out")
    scale = out.abs() * (made[0].norms * made[1].norms)
    one, two = (m.scaled_rows(1.0)[0:count] for m in made)
    for row in range(5):
        # The inputs that the squares of one row's neurons answer to most, and what ascent from there finds.
        weights = (scale[row, :, None]).sqrt()
        stacked = torch.cat([weights * one, weights * two])
        n = torch.linalg.eigh(stacked.t() @ stacked).eigenvectors[:, -min(4, width) :].t()
        for _ in range(20):
            products = (out[row].abs() * ((n * gain) @ gate.t() * ((n * gain) @ other.t())).abs()).sum(1) * width
            assert float(products.max()) <= float(bound_[row]) * (1 + 1e-9)
            x, y = n * gain @ gate.t(), n * gain @ other.t()
            signs = out[row].abs() * (x * y).sign()
            n = torch.nn.functional.normalize(((signs * y) @ gate + (signs * x) @ other) * gain, dim=1)


def test_one_heads_products_reach_the_bounds_of_two_matrices_at_once() -> None:
    """Scores by the leading singular vectors of QᵀK, the output by a row of O·V: less than q, k, v allow one by one."""
    model = tiny.build("t5", 0, factor=1.0, num_heads=1, d_kv=24)
    path = "encoder.block.0.layer.0"
    attention = model.encoder.block[0].layer[0].SelfAttention
    gain = model.encoder.block[0].layer[0].layer_norm.weight.detach()
    with torch.no_grad():
        attention.relative_attention_bias.weight.zero_()
        left, _, right = torch.linalg.svd((attention.q.weight * gain).t() @ (attention.k.weight * gain))
        rows = (attention.o.weight @ attention.v.weight) * gain
    apart = torch.stack([left[:, 0], right[0]]).repeat(5, 1)[:9]
    same = rows[rows.norm(dim=1).argmax()].expand(9, -1)
    inputs = 300 * torch.nn.functional.normalize(torch.stack([apart, same]), dim=-1)
    layout, certificate = certified(model, Arithmetic(exact=True))
    seen = observe(model, layout, {f"{path}.layer_norm": inputs})
    sites = {s.name: s for s in certificate.sites}
    for site in (sites[f"{path}.SelfAttention:scores"], sites[f"{path}.SelfAttention.o"]):
        assert site.bound * (1 - 1e-4) < seen[site.name] <= site.bound < 0.9 * site.partial


WIDTH, NEURONS = 12, 9


@pytest.mark.parametrize("bias", [0.125, 1.0, 40.0])
def test_gated_neurons_with_biases_reach_their_bounds(bias: float) -> None:
    """Gates as large as their linears, and every bias the same share of its row: one input reaches each bound."""
    exact = Arithmetic(exact=True)
    weight = torch.randn(NEURONS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    added = bias * weight.norm(dim=1)
    linear = bound_linear(rms_normalised(torch.ones(WIDTH, dtype=torch.float64), exact), weight, added, exact)
    made = GatedNeurons(linear, linear, exact, 1.0, Spectra(lambda name: weight))
    most = (math.sqrt(WIDTH) * weight.norm(dim=1) + added).square()
    assert bool((most <= made.bound).all()) and bool((made.bound <= 1.001 * most).all())


def test_a_bias_is_a_column_of_the_weights_dtype_where_that_holds_it() -> None:
    """Where the dtype of the weight does not hold what does not depend on the input, the matrix is fp64."""
    exact = Arithmetic(exact=True)
    weight = torch.randn(NEURONS, WIDTH, generator=torch.Generator().manual_seed(2)).half()
    added = torch.full((NEURONS,), 1 / 3)
    source = rms_normalised(torch.ones(WIDTH, dtype=torch.float64), exact)
    linear = bound_linear(source, weight, added, exact)
    made = GatedNeurons(linear, linear, exact, 1.0, Spectra(lambda name: weight))
    assert made.gate.matrix.dtype == torch.float64
    held = bound_linear(source, weight, added.half(), exact)
    assert GatedNeurons(held, held, exact, 1.0, Spectra(lambda name: weight)).gate.matrix.dtype == torch.float16


def test_what_is_kept_of_neurons_is_of_one_row_gain_centre_activation_and_rate_and_of_every_length() -> None:
    """One after the other differs from those before in one of them, behind a gate and without."""
    exact, some = Arithmetic(exact=True), torch.Generator().manual_seed(3)
    weight, other, out = (torch.randn(NEURONS, WIDTH, generator=some, dtype=torch.float64) for _ in range(3))
    one, shift = torch.ones(WIDTH, dtype=torch.float64), torch.rand(WIDTH, generator=some, dtype=torch.float64)
    plain = NormOutput(one, None, 3.0, 0.0, 0 * one)
    endless = replace(plain, radius=math.inf)  # as of a LayerNorm whose eps is too small
    sources = (endless, plain, replace(plain, radius=700.0), replace(plain, gain=shift), replace(plain, shift=-shift))
    spectra = Spectra(lambda name: weight, about=frozenset({"a weight"}))
    biases = (None, shift[:NEURONS], shift[:NEURONS].flip(0))  # the last two of one sum
    for source, bias, keep, kind in product(sources, biases, (1.0, 0.8), ("relu", "gelu", "")):
        if source is endless and not kind:  # RMS norms have a length
            continue
        gate, linear = (bound_linear(source, each, bias, exact) for each in (weight, other))
        kept, alone = (
            PlainNeurons(linear, kind, exact, keep, each) if kind else GatedNeurons(gate, linear, exact, keep, each)
            for each in (spectra, nothing_kept())
        )
        for ours, theirs in zip(kept.rows(out.t(), "out"), alone.rows(out.t(), "out"), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-9, equal_nan=True), (source, bias, keep, kind)
        for n, row in enumerate(out.t()[:3] if source is not endless else ()):
            assert math.isclose(kept.row(row, n), alone.row(row, n), rel_tol=1e-6), (source, bias, keep, kind)


@pytest.mark.parametrize("magnitude", [10.0, 2000.0, 60000.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_layer_norms_of_nearly_constant_inputs_stay_under_their_bound(magnitude: float, dtype: torch.dtype) -> None:
    """Where all channels are almost the same, fp32 cancellation makes n longer than √d; the bound allows for it."""
    model = tiny.build("pegasus", 0, factor=1.0)
    width = model.config.d_model
    model.model.shared.weight.data.fill_(magnitude / math.sqrt(width))
    model.model.encoder.embed_positions.weight.data.zero_()
    _, certificate = certified(model.half())
    path = "model.encoder.layers.0.self_attn_layer_norm"
    norm = copy.deepcopy(model.get_submodule(path)).to(dtype)
    top = certificate.ranges[path].output.amax.double()
    for spread in (0.0, 1e-3, 1e-2, 0.1, 1.0, 30.0):
        x = (magnitude + spread * torch.randn(500, width)).clamp(max=magnitude).to(dtype)
        assert bool((norm(x).detach().double().abs() <= top).all())


def nasty(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows that are hard on a norm: nearly constant ones, with outliers first or last, drifting, alternating."""
    generator = torch.Generator().manual_seed(width)
    rows = []
    for mean in (1.0, 70.0, 2999.0, 30000.0):
        for power in (0, 4, 8, 10, 11, 12, 16, 20, 24):
            noise = torch.randn(12, width, generator=generator) * torch.rand(12, 1, generator=generator)
            noise[4:6] = noise[4:6].sort(dim=1).values
            noise[6:8] = torch.tensor([1.0, -1.0]).repeat(width)[:width]
            noise[8:10] = noise[8:10].abs()
            noise[10, 0], noise[11, -1] = 30.0, 30.0
            rows.append(mean * (1 + 2.0**-power * noise))
    return torch.cat(rows).clamp(-65504, 65504).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_layer_norms_are_no_further_off_than_their_units(dtype: torch.dtype) -> None:
    """Mean, standard deviation and length of the output against fp64, on the kernel of this machine."""
    shares: list[float] = []
    most: dict[int, float] = {}
    for width in (5, 24, 64, 128, 257, 768, 1024, 4096):
        x = nasty(width, dtype)
        exact, magnitude = x.double(), x.double().abs().mean(1)
        unit = UNIT32 * magnitude
        for eps in (1e-5, 1e-12):
            # With fp32 gains, fp16 inputs get fp32 statistics, from a kernel of their own.
            _, mean, rstd = torch.native_layer_norm(x, [width], torch.ones(width), torch.zeros(width), eps)
            assert mean.dtype == rstd.dtype == torch.float32
            n = (x.float() - mean) * rstd
            deviation = exact.std(1, correction=0)
            slack = NORM_ERROR * deviation
            off = (mean.double()[:, 0] - exact.mean(1)).abs() - slack
            found = (rstd.double()[:, 0] ** -2 - eps).clamp(min=0).sqrt()
            short = torch.where(found > 0, deviation - found, 0.0) - slack
            most[width] = max(most.get(width, 0.0), float((off / unit).max()), float((short / unit).max()))
            assert most[width] <= norm_units(width)
            length = n.double().norm(dim=1) / width**0.5
            allowed = torch.tensor([lengthened(m, eps, width) for m in magnitude.tolist()]) * (1 + NORM_ERROR)
            shares.append(float((length / allowed).max()))
    assert max(shares) <= 1
    # The control: four units, which were taken once, are too few.
    assert dtype == torch.float16 or max(most.values()) > 4


def test_rms_norms_stay_in_their_ball() -> None:
    for width in (5, 64, 1024, 4096):
        norm = T5LayerNorm(width, eps=0.0).requires_grad_(False)
        radius = rms_normalised(torch.ones(width, dtype=torch.float64), Arithmetic()).radius
        x = nasty(width, torch.float32)
        lengths = norm(x[x.abs().amax(1) > 0]).double().norm(dim=1)
        assert 0.9999 * width**0.5 < float(lengths.max()) <= radius


@pytest.mark.parametrize("size", [10.0, 100.0, 300.0])
@pytest.mark.parametrize("wide", [0, factored.WIDE])
def test_weights_too_large_for_a_norm_get_a_verdict(size: float, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factored, "WIDE", wide)  # both ways of finding an eigenvalue, without a large matrix
    model = tiny.build("pegasus", encoder_layers=16, decoder_layers=16)
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() == 2:
                tensor.copy_((torch.randn(tensor.shape) * size).half())
    _, found = certified(model, Arithmetic(64))
    assert not found.holds and not any(math.isnan(site.largest) for site in found.sites)


def test_a_norms_output_that_is_multiplied_is_rounded_once_more() -> None:
    """f·(x + e) in fp16: f·|x| and f·|e| are each rounded by a unit, and by a subnormal's half."""
    a, factor = Arithmetic(), 3.0
    gain, absolute = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([0.5, 1e-3], dtype=torch.float64)
    made = NormOutput(gain, None, 4.0, 0.25, absolute)
    scaled = made.scaled(factor, a)
    reached = (made.exact * (1 + made.relative) + absolute) * factor
    assert (scaled.bound >= reached * (1 + a.unit) + a.tiny).all()
    assert (scaled.bound <= (reached * (1 + a.unit) + a.tiny) * 1.001).all()
    error = NormOutput(gain, None, 0.0, 0.25, absolute).scaled(factor, a)  # all that is there is the error
    assert (error.bound >= absolute * factor * (1 + a.unit) + a.tiny).all()


def test_the_axes_of_a_norms_output_hold_its_relative_error() -> None:
    gain = torch.tensor([1.0, 2.0], dtype=torch.float64)
    made = NormOutput(gain, None, 4.0, 0.25, torch.zeros(2, dtype=torch.float64))
    assert (made.axes >= (gain * 4.0 * 1.25).square()).all()
