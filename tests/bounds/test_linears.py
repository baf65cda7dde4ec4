"""Bounds of linears, eigenvalues and choices under a budget, against the worst inputs of each."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import inside, tiny
from support.adversary import adverse_inputs, cancelling, observe
from support.contract import bound_at, certified
from torch import Tensor

from bf16_to_fp16 import UserError
from bf16_to_fp16.bounds import factored, linear, spectral
from bf16_to_fp16.bounds.activations import LOWEST, STEEPEST
from bf16_to_fp16.bounds.arithmetic import UNIT, Arithmetic
from bf16_to_fp16.bounds.attention import ScoreBounds, score_bounds
from bf16_to_fp16.bounds.certificate import bound
from bf16_to_fp16.bounds.factored import chunks
from bf16_to_fp16.bounds.feed_forward import PlainNeurons
from bf16_to_fp16.bounds.findings import Certificate
from bf16_to_fp16.bounds.linear import NormOutput, bound_linear, rms_normalised
from bf16_to_fp16.bounds.spectral import Spectra, gram, largest_eigenvalue, largest_eigenvalues, times_rows
from bf16_to_fp16.families.resolve import ModelTensors, resolve, source_weights
from bf16_to_fp16.families.wiring import FeedForward

NORM = rms_normalised(torch.ones(24, dtype=torch.float64), Arithmetic(exact=True))


def test_a_linears_bound_is_reached_so_that_one_percent_less_would_be_caught() -> None:
    for kind in ("t5", "gated", "umt5"):
        model = tiny.build(kind, 1, factor=1.0)
        layout, certificate = certified(model, Arithmetic(exact=True))
        seen = observe(model, layout, adverse_inputs(model, layout, 200, 1))
        reached = [
            seen[s.name] / s.bound
            for s in certificate.sites
            if s.kind in ("query", "value", "gate", "neuron", "logits")
        ]
        assert len(reached) > 12
        # The adversary draws directions at random: most rows' own is among them, and none passes its bound.
        assert sorted(reached)[len(reached) // 4] > 0.999
        assert max(reached) <= 1 + 1e-5
        assert max(reached) > 0.99999


def test_without_the_additive_rounding_terms_the_bound_would_be_unsound() -> None:
    model = cancelling()
    layout, honest = certified(model)
    site = "encoder.block.0.layer.0.SelfAttention.o"
    inputs = adverse_inputs(copy.deepcopy(model).float(), layout, 128, 0)
    seen = observe(model, layout, inputs)[site]
    _, exact = certified(model, Arithmetic(exact=True))

    def at(certificate: Certificate) -> float:
        return next(s.bound for s in certificate.sites if s.name == site)

    # A relative slack of many roundings does not reach what fp16 really computes; the additive bound does.
    assert seen > at(exact) * (1 + 2 * UNIT) ** 20
    assert seen <= at(honest)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_partial_sums_of_any_split_stay_under_their_bound(count: int) -> None:
    """Kernels may split a reduction, round each part to fp16 and add the parts in fp16."""
    torch.manual_seed(count)
    width = 48
    gain = torch.rand(width, dtype=torch.float64) + 0.5
    weight = torch.randn(20, width).half()
    source = NormOutput(gain, None, math.sqrt(width), 2 * UNIT + UNIT**2, torch.full_like(gain, 1e-7))
    made = bound_linear(source, weight, None, Arithmetic())
    rows = weight.double() * gain
    for _ in range(20):
        order = torch.randperm(width)
        parts = [p for p in order.tensor_split(count) if len(p)]
        # Aim at one part alone, and at the whole.
        aims = [torch.zeros_like(rows).index_copy_(1, p, rows[:, p]) for p in parts] + [rows]
        for aim in aims:
            n = aim / aim.norm(dim=1, keepdim=True) * math.sqrt(width)
            x = (n.half().double() * gain).half().double()
            sums = [(weight.double()[:, p] * x[:, p]).sum(1).half() for p in parts]
            total = torch.zeros(20).half()
            for part in sums:
                assert bool((part.double().abs() <= made.partial).all())
                total = total + part
                assert bool((total.double().abs() <= made.partial).all())
            assert bool((total.double().abs() <= made.bound).all())


def truncated_sums(products: np.ndarray, at_once: int) -> np.ndarray:
    """Return the sums of the rows as tensor cores add them: some at a time, all cut off at 2⁻²³ of the largest."""

    def cut(values: np.ndarray, largest: np.ndarray) -> np.ndarray:
        unit = np.exp2(np.floor(np.log2(np.maximum(largest, 1e-300))) - 23)
        return np.trunc(values / unit) * unit

    total = np.zeros(len(products))
    for start in range(0, products.shape[1], at_once):
        parts = np.column_stack([total, products[:, start : start + at_once]])
        total = cut(parts, np.abs(parts).max(1, keepdims=True)).sum(1)
        total = cut(total, np.abs(total))
    return total


@pytest.mark.parametrize("at_once", [4, 8, 16])
def test_truncated_accumulation_is_within_the_error_of_a_sum(at_once: int) -> None:
    """Where every cut goes the same way: small products behind a large one, of one sign and of both."""
    generator = np.random.default_rng(0)
    a, b = (generator.uniform(1, 2, (32, 4096)).astype(np.float16).astype(np.float64) for _ in range(2))
    products = a * b
    products[:16, :at_once] *= 4096
    products[8:24] *= generator.choice([-1, 1], (16, 4096))
    products[4:8, -at_once:] *= -4096
    off = np.abs(truncated_sums(products, at_once) - products.sum(1)) / np.abs(products).sum(1)
    allowed = Arithmetic(splits=0).gamma(4096)
    assert off.max() <= allowed
    # The control: one rounding a product would not be enough at 4 at once.
    assert at_once > 4 or off.max() > 0.1 * allowed


@pytest.mark.parametrize("size", [1, 5, 200, 700])
def test_the_eigenvalue_bound_is_above_and_close(size: int) -> None:
    torch.manual_seed(size)
    for rows in (1, size // 2 + 1, 2 * size):
        matrix = torch.randn(rows, size, dtype=torch.float64) * torch.rand(size, dtype=torch.float64)
        true = float(torch.linalg.matrix_norm(matrix, 2)) ** 2
        found = largest_eigenvalue(gram(matrix))
        assert true <= found <= true * 1.02 + 1e-12


def test_eigenvalues_of_many_matrices_are_above_and_close_and_inf_where_they_are_not_finite() -> None:
    factors = torch.randn(7, 6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    factors[3] = 0
    matrices = factors @ factors.mT
    true = torch.linalg.matrix_norm(factors, 2).square()
    found = largest_eigenvalues(matrices)
    assert bool((found >= true).all()) and bool((found <= true * (1 + 1e-9)).all())
    matrices[2, 1, 1] = math.inf
    matrices[5, 0, 0] = math.nan
    spoilt = largest_eigenvalues(matrices)
    assert bool((spoilt[[2, 5]] == math.inf).all()) and bool((spoilt[[0, 1, 3, 4, 6]] == found[[0, 1, 3, 4, 6]]).all())


@pytest.mark.parametrize("rows", [torch.zeros(6, 9), torch.eye(9)[:6], torch.arange(54.0).view(6, 9), torch.ones(6, 9)])
@pytest.mark.parametrize("scale", [1.0, 1e-160, 1e150])
def test_a_root_times_its_transpose_is_above_the_matrix(rows: torch.Tensor, scale: float) -> None:
    rows = rows.double() * scale
    matrix = linear.products_of_rows(rows)
    root, slack = linear.root_of(matrix), float(matrix.trace()) * 2.0**-50
    exact = [[math.fsum(a * b for a, b in zip(x, y, strict=True)) for y in rows.tolist()] for x in rows.tolist()]
    for above, below in ((matrix, torch.tensor(exact, dtype=torch.float64)), (root @ root.t(), matrix)):
        # n units of the trace are added, of which rounding here and there takes a small part.
        assert float(torch.linalg.eigvalsh(above - below)[0]) >= 3 * slack
        assert float((above - below).abs().max()) <= 1e4 * slack or scale == 1e-160


def test_scores_are_bounded_by_the_norm_of_the_product_of_their_maps() -> None:
    """Of heads of queries that share heads of keys, each as if it stood alone with its keys; the maps of a head and its
    key are in no way alike."""
    torch.manual_seed(0)
    weights = (torch.randn(4, 6, 24), torch.randn(2, 6, 24) * torch.rand(2, 6, 1) ** 4)

    def bounds(*maps: Tensor) -> ScoreBounds:
        query, key = (bound_linear(NORM, each.view(-1, 24), None, Arithmetic()) for each in maps)
        return score_bounds(query, key, len(maps[0]), Arithmetic(), 0.5)

    made = bounds(*weights)
    queries, keys = weights[0].double(), weights[1].double().repeat_interleave(2, 0)
    exact = 24 * torch.linalg.matrix_norm(queries.mT @ keys, 2)
    for found, of in ((made.product, exact), (made.span, 0.5 * 2 * exact)):
        assert bool((found >= of).all()) and bool((found <= 1.05 * of).all())
    alone = [bounds(weights[0][h : h + 1], weights[1][h // 2 : h // 2 + 1]) for h in range(4)]
    for name in ("product", "partial", "span"):
        wanted = torch.cat([getattr(each, name) for each in alone])
        torch.testing.assert_close(getattr(made, name), wanted, rtol=1e-12, atol=0)


def test_a_gram_matrix_in_fp32_is_an_upper_bound() -> None:
    torch.manual_seed(0)
    rows = torch.randn(1500, 60) * torch.rand(1500, 1) * 100
    true = rows.double().t() @ rows.double()
    lowest = torch.linalg.eigvalsh(gram(rows) - true)[0]
    assert float(lowest) >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gram_matrix_is_whole_whatever_its_tiles(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = torch.randn(600, 2 * spectral.TILE + 3, dtype=dtype)
    made = gram(rows)
    true = rows.double().t() @ rows.double()
    off = made - true
    off.diagonal().sub_((0.0 if dtype == torch.float64 else 264 * 2.0**-24) * float(true.trace()))
    assert torch.allclose(made, made.t(), rtol=1e-12, atol=1e-9) and float(off.abs().max()) < 1e-3


def test_long_sums_in_fp32_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_by_one(left: Tensor, right: Tensor) -> Tensor:
        return torch.from_numpy(np.cumsum((left * right).numpy(), axis=1, dtype=np.float32)[:, -1:])

    monkeypatch.setattr(spectral, "times_rows", one_by_one)  # kernels that sum so are allowed; this machine's may not
    rows = torch.full((1 << 20, 1), 0.1)  # of which one sum in fp32 loses 1.4%
    assert largest_eigenvalue(gram(rows)) >= float(rows.double().square().sum())


def test_a_guess_that_is_too_low_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    rows = torch.randn(40, 200, dtype=torch.float64)
    true = float(torch.linalg.matrix_norm(rows, 2)) ** 2
    for share in (0.1, 0.9, 1 - 2.0**-8):
        # Lanczos guesses well: only a planted guess is this far off.
        monkeypatch.setattr(spectral, "ritz_value", lambda matrix, guess=share * true: guess)
        assert true <= largest_eigenvalue(gram(rows)) <= 4 * true


def test_the_bounds_of_a_matrix_do_not_depend_on_its_parts() -> None:
    torch.manual_seed(0)
    weight, out = torch.randn(40, 24).half(), torch.randn(8000, 40, dtype=torch.float64)
    assert len(list(chunks(out))) > 1
    made = bound_linear(NORM, weight, None, Arithmetic())
    neurons = PlainNeurons(made, "relu", Arithmetic(), 1.0, Spectra(lambda name: torch.zeros(0)))
    apart = torch.cat([torch.stack(neurons.rows(rows, "out")) for rows in out.split(1000)], 1)
    assert torch.allclose(torch.stack(neurons.rows(out, "out")), apart, rtol=1e-12)
    assert torch.allclose(linear.column_norms(out), out.norm(dim=0))
    assert torch.allclose(linear.row_norms(out), out.norm(dim=1))
    assert torch.allclose(linear.squared_matrix_vector(out, out[0]), out.square() @ out[0])


def test_weights_in_fp32_stay_as_they_are_and_have_the_bounds_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factored, "WIDE", 0)  # what large weights are multiplied in
    weight, out = torch.randn(40, 24).bfloat16(), -torch.rand(8, 40).bfloat16()
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        made, moving = bound_linear(NORM, weight, None, Arithmetic()), out.to(dtype)
        neurons = PlainNeurons(made, "relu", Arithmetic(), 1.0, Spectra(lambda name: torch.zeros(0)))
        found.append(torch.stack(neurons.rows(moving, "out")))
        assert torch.equal(moving, out.to(dtype))
    assert torch.equal(*found) and bool((found[0][1] > 0).all())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 30), budget=st.floats(0.1, 40))
def test_the_sums_of_the_largest_bound_every_feasible_choice(seed: int, size: int, budget: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(3, size, generator=generator, dtype=torch.float64) ** 3
    caps = 0.5 + torch.rand(size, generator=generator, dtype=torch.float64) / 2
    plain, ball = linear.knapsack(values, caps, budget), linear.in_ball(values, caps, budget)
    assert bool((plain <= values @ caps + 1e-9).all()) and bool((ball <= values @ caps + 1e-9).all())
    for row in range(3):
        # The two true optima: greedy filling, and min(cap, μ·v) with the μ that uses the budget up.
        order = values[row].argsort(descending=True)
        left, best = budget, 0.0
        for i in order:
            take = min(float(caps[i]), left)
            best, left = best + take * float(values[row, i]), left - take
        assert math.isclose(float(plain[row]), best, rel_tol=1e-9, abs_tol=1e-12)
        low, high = 0.0, 1e9
        for _ in range(200):
            middle = (low + high) / 2
            used = float(torch.minimum(values[row] * middle, caps).square().sum())
            low, high = (middle, high) if used <= budget else (low, middle)
        optimum = float(values[row] @ torch.minimum(values[row] * low, caps))
        assert optimum - 1e-9 <= float(ball[row]) <= optimum * 1.01 + 1e-9


def test_a_rows_own_eigenvalue_is_tighter_and_still_sound() -> None:
    for kind in ("gated", "t5"):
        model = tiny.build(kind, 7, factor=1.0)
        layout, loose = certified(model, Arithmetic(exact=True), refine=0)
        _, tight = certified(model, Arithmetic(exact=True), refine=40)
        seen = observe(model, layout, adverse_inputs(model, layout, 200, 3))
        names = [w.output for w in layout.topology if isinstance(w, FeedForward)]
        before, after = ({s.name: s.bound for s in c.sites} for c in (loose, tight))
        assert all(seen[n] <= after[n] <= before[n] * (1 + 1e-9) for n in names)
        assert any(after[n] < 0.95 * before[n] for n in names)


def test_the_rounding_of_a_long_row_of_attention_weights_is_covered() -> None:
    a = Arithmetic(max_length=4096)
    scores = torch.cat([torch.randn(64, 4096), torch.zeros(1, 4096), torch.linspace(0, -16, 4096)[None]])
    weights = torch.softmax(scores, -1).half()
    assert float(weights.double().sum(-1).max()) <= a.attention_sum
    assert replace(a, exact=True).attention_sum == 1.0


def test_an_activation_without_a_bound_is_refused() -> None:
    model = tiny.build("gelu", 0, factor=1.0)
    source = ModelTensors(model)
    layout = resolve(source)
    topology = tuple(replace(w, activation="tanh") if isinstance(w, FeedForward) else w for w in layout.topology)
    with pytest.raises(UserError, match="tanh"):
        bound(replace(layout, topology=topology), source_weights(source, layout))


def test_activations_stay_where_the_bounds_need_them() -> None:
    x = torch.linspace(-200, 200, 400_001, dtype=torch.float64)
    from transformers.activations import ACT2FN

    for name, lowest in LOWEST.items():
        y: Tensor = ACT2FN[name](x)
        assert float(y.min()) >= -lowest and bool((y <= x.clamp(min=0) + 1e-12).all())
        slope = (y[1:] - y[:-1]) / (x[1] - x[0])
        assert float(slope.abs().max()) <= STEEPEST[name]
    # In fp16 too, for every number: at most x, and below zero at most two units more than the least value.
    every = torch.arange(-(1 << 15), 1 << 15).short().view(torch.float16)
    every = every[every.isfinite()]
    for name, lowest in LOWEST.items():
        rounded = ACT2FN[name](every).double()
        assert bool((rounded <= every.double().clamp(min=0)).all())
        assert float(rounded.min()) >= -lowest * (1 + 2 * UNIT)


@pytest.mark.parametrize("kind", ["gated", "t5-encoder"])
@pytest.mark.parametrize("factor", [1.0, 60.0])
def test_the_steps_of_gelu_new_before_its_tanh_have_bounds_which_may_be_inf(kind: str, factor: float) -> None:
    model = tiny.build(kind, 1, factor=1.0)
    for name, weight in model.named_parameters():
        if "wi_0" in name:
            weight.data.mul_(factor)
    inputs = adverse_inputs(model, resolve(ModelTensors(model)), 6, 0)
    model = model.half()
    layout = resolve(ModelTensors(model))
    certificate = inside.bound(layout, source_weights(ModelTensors(model), layout))
    found = observe(model, layout, inputs)
    reached = False
    for feed_forward in (w for w in layout.topology if isinstance(w, FeedForward)):
        for step in ("pow", "mul#2", "add", "mul#3"):
            site = f"{feed_forward.act}:{step}"
            limit = bound_at(certificate, site)
            assert found[site] <= limit and (factor > 1 or limit < math.inf)
            reached |= math.isinf(found[site])
        # What merely carries values takes nothing of that over.
        assert bound_at(certificate, f"{feed_forward.at}:to") < math.inf
    assert reached == (factor > 1)


def test_the_callers_precision_changes_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factored, "WIDE", 1)  # everything in fp32, of which autocast and TF32 take hold
    model = ModelTensors(tiny.build("gated", factor=1.0))
    layout = resolve(model)
    before = torch.get_float32_matmul_precision()
    rows = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    found: set[str] = set()

    def noted(work: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noting(*given: Any) -> Tensor:
            found.add(torch.get_float32_matmul_precision() if matmul is None else matmul.fp32_precision)
            found.add("ieee" if matmul is None else torch.backends.cuda.matmul.fp32_precision)
            found.add("autocast" if torch.is_autocast_enabled("cpu") else "plain")
            return work(*given)

        return noting

    # Not every processor has a product for the caller's precision.
    monkeypatch.setattr(spectral, "times_rows", noted(times_rows))
    reader = noted(source_weights(model, layout))

    def figures() -> tuple[list[float], float]:
        return [site.largest for site in bound(layout, reader).sites], spectral.largest_eigenvalue(spectral.gram(rows))

    expected = figures()
    try:
        torch.set_float32_matmul_precision("medium")
        set_by_caller = None if matmul is None else matmul.fp32_precision
        assert figures() == expected
        with torch.autocast("cpu", torch.bfloat16):
            assert figures() == expected
            assert torch.is_autocast_enabled("cpu")
        assert torch.get_float32_matmul_precision() == "medium"
        assert matmul is None or matmul.fp32_precision == set_by_caller
    finally:
        torch.set_float32_matmul_precision(before)
    assert found - {"highest"} == {"ieee", "plain"}


def test_a_cast_of_a_linears_parameters_is_bounded_by_its_bias_as_well() -> None:
    """The audit has one name for what AMP casts, weight or bias."""
    model = tiny.build("pegasus")
    path = "model.encoder.layers.0.fc1"
    with torch.no_grad():
        model.get_submodule(path).bias[0] = 96.0
        model.get_submodule(path).weight.clamp_(-2.0, 2.0)
    _, certificate = certified(model)
    assert certificate.at(f"{path}:weight") == 96.0
