"""Each tier's bounds hold in its arithmetic, which is emulated here, and not in the next stricter one."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support import tiny
from support.adversary import adverse_inputs, observe
from support.contract import FREE, broken, certified
from support.fp16_sums import fp16_runtime, one_by_one

from bf16_to_fp16.bounds.arithmetic import UNIT, Arithmetic, growth
from bf16_to_fp16.commands.convert import Conversion, convert
from bf16_to_fp16.run.stock import load

DEMO = Path(__file__).parents[2] / "bf16_to_fp16" / "demo_data" / "t5-gated-bytes"
LENGTH = Arithmetic(64)


@pytest.mark.parametrize("target", ["norm-safe", "fp16-accumulate"])
@pytest.mark.parametrize("kind", ["t5", "gated"])
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


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Conversion]:
    made = tmp_path_factory.mktemp("demo")
    return {t: convert(DEMO, made / t, target=t, run_model=False) for t in ("half", "auto")}


def test_auto_takes_the_strictest_tier_that_costs_next_to_nothing(demo: dict[str, Conversion]) -> None:
    half, auto = (demo[target].report for target in ("half", "auto"))
    assert (half["target"], auto["target"]) == ("half", "norm-safe")
    proofs = [[row["proof"] for row in report["tiers"].values()] for report in (half, auto)]
    assert proofs == [["certified", None, None], ["certified", "certified", None]]
    assert all(row["runtimes"] and bool(row["reason"]) is not row["holds"] for row in auto["tiers"].values())


def test_what_torch_runs_well_comes_to_nothing_where_norms_square_in_fp16(demo: dict[str, Conversion]) -> None:
    ids = torch.arange(3, 63).view(2, 30)
    right = {}
    for target, result in demo.items():
        assert result.out is not None
        exact, half = (load(result.out, dtype) for dtype in (torch.float32, torch.float16))
        encoder = half.half().get_encoder()
        with torch.no_grad():
            true = exact.get_encoder()(input_ids=ids).last_hidden_state
            with fp16_runtime(encoder, sums=False):
                found = encoder(input_ids=ids).last_hidden_state.float()
        right[target] = float((found - true).norm() / true.norm()) < 0.02
    assert right == {"half": False, "auto": True}
