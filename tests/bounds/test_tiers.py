"""Each tier's bounds hold in its arithmetic, which is emulated here, and not in the next stricter one.

Norms square in fp16, and sums are made one term after another. What stands in for an operation works on the memory of
its result, so that an observer sees the operation and no other.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny
from support.adversary import adverse_inputs, observe
from support.contract import FREE, broken, certified, layout_of
from torch import Tensor

from bf16_to_fp16.bounds.arithmetic import MOST_POSITIONS, UNIT, Arithmetic, growth
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.conversion.convert import Conversion, convert
from bf16_to_fp16.conversion.options import Options
from bf16_to_fp16.conversion.planning import Opened, Search, decide
from bf16_to_fp16.families.resolve import eps_attribute, resolve
from bf16_to_fp16.families.signals import RESIDUAL
from bf16_to_fp16.measuring import observer
from bf16_to_fp16.measuring.meter import is_norm
from bf16_to_fp16.measuring.regime_results import RegimeResult
from bf16_to_fp16.measuring.stock import load
from bf16_to_fp16.numerics import NORM_FLOOR
from bf16_to_fp16.progress import Progress
from bf16_to_fp16.ranges import NormRange
from bf16_to_fp16.report.observed_tiers import tiers_of
from bf16_to_fp16.report.remedies import OVER, SQUARES_UNSEEN, sinks, swells

LENGTH = Arithmetic(64)


def one_by_one(terms: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, float]:
    """Return the sum of fp16 ``terms`` over the last axis in any order, each addition rounded, and the largest partial
    sum."""
    total, most = np.zeros(terms.shape[:-1], np.float16), 0.0
    for i in generator.permutation(terms.shape[-1]):
        total = total + terms[..., i]
        most = max(most, float(np.abs(total).max(initial=0)))
    return total, most


@contextmanager
def fp16_runtime(model: Any, *, sums: bool) -> Iterator[list[float]]:
    """Let a model's RMS norms compute in fp16, and with ``sums`` its products and softmax as well; yield the largest
    partial sum of each product."""
    tensors = layout_of(model).tensors
    generator, partials, softmax = np.random.default_rng(0), [], torch.nn.functional.softmax

    def product(func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
        made = func(*(a.float() if isinstance(a, Tensor) else a for a in args), **(kwargs or {})).half()
        a, b = (x.numpy() for x in args[-2:])
        total, most = one_by_one(a[..., :, None, :] * np.swapaxes(b, -1, -2)[..., None, :, :], generator)
        made.numpy()[...] = total if len(args) == 2 else total + args[0].numpy()
        partials.append(most)
        return made

    def weights(x: Tensor, **options: Any) -> Tensor:
        made = softmax(x, **options)
        powers = np.exp(x.numpy() - x.numpy().max(-1, keepdims=True))
        made.numpy()[...] = powers / one_by_one(powers, generator)[0][..., None]
        return made

    def norm(path: str, module: Any) -> Any:
        stock, eps = type(module).forward, np.float16(getattr(module, eps_attribute(module)))
        gain = module.weight.detach().numpy() + np.float16(tensors[f"{path}.weight"].offset)

        def forward(x: Tensor) -> Tensor:
            made, seen = stock(module, x), x.numpy()
            mean = one_by_one(seen * seen, generator)[0] / np.float16(seen.shape[-1])
            root = np.float16(1) / np.sqrt(mean + eps)
            made.numpy()[...] = seen * root[..., None] * gain
            return made

        return forward

    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        for path, module in model.named_modules():
            if is_norm(module):
                patch.setattr(module, "forward", norm(path, module), raising=False)
        if sums:
            patch.setattr(observer, "product_in_fp32", product)
            patch.setattr(torch.nn.functional, "softmax", weights)
        yield partials


@pytest.mark.parametrize("target", ["norm-safe", "fp16-accumulate"])
@pytest.mark.parametrize("kind", ["t5", "gated", "longt5", "gemma3"])
def test_no_adversarial_input_passes_a_tiers_bounds_in_its_arithmetic(kind: str, target: str) -> None:
    for seed, size in ((0, 200.0), (1, 1.0)):
        model = tiny.build(kind, seed, factor=1.0).half()
        layout, certificate = certified(model, LENGTH, target=target)
        inputs = adverse_inputs(model.float(), layout, 16, seed, size=size)
        with fp16_runtime(model.half(), sums=target == "fp16-accumulate") as partials:
            seen = observe(model, layout, inputs)
        assert not broken(certificate, seen, FREE)
        bounds = {s.name: s.bound for s in certificate.sites if s.kind not in FREE}
        shares = sorted(seen[name] / limit for name, limit in bounds.items() if name in seen)
        assert len(shares) > 0.8 * len(bounds) and shares[len(shares) // 2] > 0.5
        assert max(partials, default=0.0) <= max(s.largest for s in certificate.sites)


@pytest.mark.parametrize("terms", [5, 300, 3000, 12000])
def test_sums_in_fp16_grow_no_more_than_is_allowed(terms: int) -> None:
    generator = np.random.default_rng(0)
    # Just over half a unit of what is there already: each addition rounds up as far as it can.
    up, total = np.empty(terms, np.float16), np.float16(1)
    up[0] = total
    for i in range(1, terms):
        up[i] = np.nextafter(np.spacing(total) / np.float16(2), np.float16(np.inf))
        total = total + up[i]
    flat = np.full(terms, 1.0, np.float16)
    assert float(total) <= growth(terms) * float(up.astype(np.float64).sum())
    if terms == 3000:
        assert float(total) > 1.2 * float(up.astype(np.float64).sum())
    # And lose no more: a sum of ones stops at 2048.
    lost = float(flat.astype(np.float64).sum()) / float(one_by_one(flat, generator)[0])
    assert lost <= 1 + terms * UNIT
    stopped = Arithmetic(terms, sums16=True).attention_sum
    assert float((flat / one_by_one(flat, generator)[0]).astype(np.float64).sum()) <= stopped


def test_a_norm_in_fp16_lengthens_no_more_than_is_allowed() -> None:
    width = 4096
    x = np.full(width, 1.0, np.float16)
    total = one_by_one(x * x, np.random.default_rng(0))[0]
    assert float(total) == 2048
    length = math.sqrt(width / float(total))
    assert 1.4 < length <= Arithmetic(norms16=True).norm_factor(width)


def test_no_tree_of_additions_grows_more_than_is_allowed() -> None:
    """The most that a sum of n terms may be of their magnitudes, in any nesting: of two parts the worst is where both
    limits of an addition's error meet."""
    ratio = UNIT / (1 - UNIT)
    most, terms = np.ones(6001), 6000
    for n in range(2, terms + 1):
        one, other = most[n - np.arange(1, n // 2 + 1)], most[1 : n // 2 + 1]
        pairs = (one, other), (other, one)
        met = [(a * (1 + 2 * ratio) / (1 + ratio * a / b)).max() for a, b in pairs]
        most[n] = max(most[n - 1], *met)
    # Products are rounded before, and one more term comes to the sum.
    allowed = [growth(n) for n in range(terms)]
    assert all(most[n + 1] * (1 + UNIT) <= allowed[n] for n in range(terms))
    assert most[terms] > 1.99 and growth(4) == (1 + UNIT) ** 5


def nested(shape: Any, at: np.float16, generator: np.random.Generator) -> tuple[np.float16, Fraction, int]:
    """Return the sum of a tree of additions in fp16 that is just over ``at``, the sum of its terms' magnitudes, and
    their number: each part just over half a unit of what is there already, so that it is rounded up as far as can be.

    shape: how many parts are added, and the shape of each; 0 for a term.
    """
    if not shape:
        return at, Fraction(float(at)), 1
    parts, inner = shape
    step = np.spacing(np.nextafter(at, np.float16(0)))
    first = np.float16(float(at) - parts * float(step))
    if first <= at / 2:
        first = at / np.float16(2)
    total, true, count = first, Fraction(float(first)), 1
    for _ in range(parts):
        half = np.nextafter(np.spacing(total) / np.float16(2), np.float16(np.inf))
        part, exact, terms = nested(inner, half, generator)
        # The order of two operands changes nothing.
        total = total + part if generator.random() < 0.5 else part + total
        true, count = true + exact, count + terms
    return total, true, count


def test_nested_and_uneven_blocks_in_fp16_grow_no_more_than_is_allowed() -> None:
    generator, reached = np.random.default_rng(0), []
    for shape in ((1000, 0), (1000, (3, 0)), (300, (10, (5, 0))), (100, (100, 0)), (20, (20, (20, 0)))):
        total, true, count = nested(shape, np.float16(16384), generator)
        reached.append(float(Fraction(float(total)) / true))
        assert reached[-1] <= growth(count)
    assert max(reached) > 1.3
    for _ in range(200):  # and random trees of random terms
        terms = [np.float16(x) for x in generator.exponential(1, 60) * 2.0 ** generator.integers(-20, 8, 60)]
        true = sum((Fraction(float(x)) for x in terms), Fraction(0))
        while len(terms) > 1:
            i, j = generator.choice(len(terms), 2, replace=False)
            made = terms[i] + terms[j]
            terms = [x for k, x in enumerate(terms) if k not in (i, j)] + [made]
        assert Fraction(float(terms[0])) <= growth(60) * true
        assert true <= Fraction(float(terms[0])) * Fraction(1 + 60 * UNIT)


def test_a_sum_of_more_terms_than_can_be_counted_has_no_bound() -> None:
    assert growth(2**40) == math.inf and math.isfinite(growth(2**29))
    assert Arithmetic(MOST_POSITIONS, norms16=True, sums16=True).floor == math.inf


def test_every_product_of_a_long_sum_may_lose_to_underflow() -> None:
    """Of 300,000 products of 1.5·2⁻²⁵ each is rounded up to 2⁻²⁴."""
    count = 300_000
    product = np.float16(1.5 * 2.0**-13) * np.float16(2.0**-12)
    assert product == np.float16(2.0**-24)
    off = count * (float(product) - 1.5 * 2.0**-25)
    assert off <= Arithmetic(count, norms16=True, sums16=True).floor


@pytest.mark.parametrize("width", [16, 768, 4096])
def test_squares_and_their_mean_may_both_lose_to_underflow(width: int) -> None:
    """A mean square of 2⁻¹⁷: each square loses nearly 2⁻²⁵, and so does the mean."""
    worst = 0.0
    for k in range(-40, 40):
        x = np.full(width, 2.0**-8.5 * (1 + k / 4096), np.float16)
        if (mean_square := float((x.astype(np.float64) ** 2).mean())) < NORM_FLOOR:
            continue
        total = np.float16((x * x).astype(np.float64).sum() * (1 - UNIT))
        for mean in (total / np.float16(width), np.nextafter(total / np.float16(width), np.float16(0))):
            worst = max(worst, math.sqrt(mean_square / float(mean)))
    assert worst <= Arithmetic(norms16=True).norm_factor(width)
    # And where each addition loses its unit too.
    left = (1 - 2.0**-8) / (1 + width * UNIT) - 2.0**-8
    assert 1 / math.sqrt(left) <= Arithmetic(norms16=True).norm_factor(width)


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Conversion]:
    made = tmp_path_factory.mktemp("gated")
    source = tiny.save(tiny.small("gated"), made / "source")
    return {t: convert(source, made / t, target=t, run_model=False) for t in ("auto", "half", "norm-safe")}


def test_auto_moves_no_further_than_pytorch_needs(gated: dict[str, Conversion]) -> None:
    auto, half, norm_safe = (gated[target].report for target in ("auto", "half", "norm-safe"))
    assert auto["plan"] == half["plan"] and (auto["target"], norm_safe["target"]) == ("half", "norm-safe")
    assert norm_safe["plan"]["residual_exponent"] < -8 < auto["plan"]["residual_exponent"] < 0
    # Bounds alone do not know the lower end of squares, so what holds by them is not said to.
    reasons = [[row["reason"] for row in report["tiers"].values()] for report in (auto, norm_safe)]
    assert reasons == [["", OVER, OVER], ["", SQUARES_UNSEEN, OVER]]
    assert all(row["runtimes"] and bool(row["reason"]) is not row["holds"] for row in norm_safe["tiers"].values())


def test_a_centred_norm_is_bounded_for_its_exponent_and_larger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(tiny.save(tiny.build("pegasus", encoder_layers=1, decoder_layers=1), tmp_path))
    bounds, bounded = Search.bounds, list[int]()

    def watched(search: Any, layout: Any, exponents: Any) -> Any:
        bounded.append(exponents[RESIDUAL])
        return bounds(search, layout, exponents)

    monkeypatch.setattr(Search, "bounds", watched)
    decided = decide(Opened(checkpoint, resolve(checkpoint), []), Options(run_model=False), Progress(quiet=True))
    assert bounded[0] < decided.plan.residual_exponent <= max(bounded)


def test_squares_that_were_seen_to_be_too_large_or_too_small_are_told_and_not_only_unproven() -> None:
    layout, certified = layout_of(tiny.build("t5")), {"torch": True, "norm-fp16": False, "fp16-accumulate": False}
    reasons = {}
    for longest, least in ((200.0, 1.0), (300.0, 1.0), (200.0, 2.0**-20)):
        norms = {layout.norms[0]: NormRange(longest, torch.tensor([[least, 1.0]]))}
        clean: dict[str, Any] = {"nonfinite": 0, "saturated": 0, "amax": 1.0, "headroom_bits": 16.0, "sites": []}
        regimes = {"half": RegimeResult(**clean, norms=norms)}
        reasons[longest, least] = [tier.reason for tier in tiers_of(layout, certified, regimes).values()]
    large, small = swells(300.0**2 * growth(layout.signals[RESIDUAL].size)), sinks(2.0**-20)
    assert list(reasons.values()) == [["", "", OVER], ["", large, large], ["", small, small]]


@pytest.mark.parametrize("kind", ["t5-encoder", "llama"])
def test_a_row_of_zeros_breaks_norms_in_fp16_where_it_is_padding_too(kind: str, tmp_path: Path) -> None:
    """So padding counts at the lower end: eps, rescaled, is nothing in fp16, and 0·NaN is what masks hide."""
    model = tiny.build(kind)
    model.config.pad_token_id = 0
    model.get_input_embeddings().weight.data[0] = 0
    out = convert(tiny.save(model, tmp_path / "source"), tmp_path / "out", target="norm-safe", run_model=False).out
    assert out is not None
    half = load(out, torch.float16).half()
    ids = torch.arange(3, 23).view(2, 10)
    ids[1, 7:] = 0
    for runtime, lost in ((nullcontext(), [0, 0]), (fp16_runtime(half, sums=False), [0, 7])):
        with torch.no_grad(), runtime:
            made = half(input_ids=ids, attention_mask=(ids != 0).long())[0]
        assert [int(row[:7].isnan().any(-1).sum()) for row in made] == lost


def test_what_torch_runs_well_comes_to_nothing_where_norms_square_in_fp16(gated: dict[str, Conversion]) -> None:
    ids = torch.arange(3, 63).view(2, 30)
    right = {}
    for target, result in gated.items():
        assert result.out is not None
        exact, half = (load(result.out, dtype) for dtype in (torch.float32, torch.float16))
        encoder = half.half().get_encoder()
        with torch.no_grad():
            true = exact.get_encoder()(input_ids=ids).last_hidden_state
            with fp16_runtime(half, sums=False):
                found = encoder(input_ids=ids).last_hidden_state.float()
        right[target] = float((found - true).norm() / true.norm()) < 0.02
    assert right == {"auto": False, "half": False, "norm-safe": True}
