"""Eigenvalues that are carried over from a source: sound for what was written, close to what its files alone give."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.adversary import adverse_inputs, observe
from support.contract import FREE, broken
from torch import Tensor

from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.bounds.certificate import bound, fp16_weights
from bf16_to_fp16.bounds.factored import Factored, Tall
from bf16_to_fp16.bounds.spectral import CARRIED, Spectra, gram, largest_eigenvalue, without_weights
from bf16_to_fp16.bounds.tiers import bounded
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.conversion.comparison import near
from bf16_to_fp16.conversion.convert import convert
from bf16_to_fp16.devices import Device
from bf16_to_fp16.families.resolve import resolve, source_weights
from bf16_to_fp16.measuring.stock import load
from bf16_to_fp16.progress import Progress
from bf16_to_fp16.results import BoundEntry


def tall(weights: dict[str, Tensor], factor: float = 1.0) -> Tall:
    """Return the sum of two matrices over a third, of which ``factor`` scales every row."""
    made = {}
    for name, weight in weights.items():
        rows = torch.full((len(weight),), factor, dtype=torch.float64)
        made[name] = Factored(weight, torch.linspace(0.5, 2, weight.shape[1], dtype=torch.float64), rows, name)
    length = sum(float((m[0 : len(m.weight)]).norm()) for m in made.values())
    return Tall(((made["a"], made["b"]), (made["c"],)), "a matrix", length)


def whole(matrix: Tall) -> Tensor:
    return torch.cat(list(matrix.parts(7))).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("power", [0, -5])
def test_a_carried_eigenvalue_is_above_that_of_the_worst_change(dtype: torch.dtype, power: int) -> None:
    generator = torch.Generator().manual_seed(power)
    weights = {name: torch.randn(n, 12, generator=generator).to(dtype) for name, n in (("a", 30), ("b", 30), ("c", 9))}
    spectra = Spectra(weights.__getitem__)
    before = spectra.largest(tall(weights))
    assert before >= float(torch.linalg.matrix_norm(whole(tall(weights)), 2)) ** 2
    # Along the leading singular vectors a change is added to the norm in full.
    left, values, right = torch.linalg.svd(whole(tall(weights)), full_matrices=False)
    change = 0.9 * CARRIED * values[0] * torch.outer(left[30:, 0], right[0]) / torch.linspace(0.5, 2, 12)
    changed = {name: weight.double() * 2.0**power for name, weight in weights.items()}
    changed["c"] += 2.0**power * change
    changed = {name: weight.float() for name, weight in changed.items()}
    found = spectra.for_others().from_source(tall(changed))
    true = float(torch.linalg.matrix_norm(whole(tall(changed)), 2)) ** 2
    assert found is not None and true <= found <= 4.0**power * before * (1 + CARRIED) ** 2 * (1 + 1e-4)
    assert true > 4.0**power * before * (1 + 1e-4)


def test_an_eigenvalue_of_other_weights_is_computed_and_not_kept() -> None:
    weights = {name: torch.randn(n, 12) for name, n in (("a", 30), ("b", 30), ("c", 9))}
    spectra = Spectra(weights.__getitem__)
    spectra.largest(tall(weights))
    others = {name: weight + 0.1 * torch.randn_like(weight) for name, weight in weights.items()}
    fixed = spectra.for_others()
    kept = dict(spectra.bounds)
    found = fixed.largest(tall(others))
    assert fixed.from_source(tall(others)) is None and fixed.bounds == kept
    assert found >= float(torch.linalg.matrix_norm(whole(tall(others)), 2)) ** 2
    fewer = {name: weight[:5] for name, weight in weights.items()}
    assert fixed.from_source(tall(fewer)) is None
    assert fixed.from_source(tall({name: weight * math.nan for name, weight in weights.items()})) is None


def test_verify_grants_what_is_carried_over_where_rounding_makes_the_norm_smaller() -> None:
    """Entries that come to 0 in fp16 lie along the leading singular vectors: a norm that falls by what is added to the
    source's."""
    weight = torch.eye(64) * 2.0**-11 + 2.0**-25 * 0.999

    def matrix(weight: Tensor) -> Tall:
        unit = Factored(weight, torch.ones(64, dtype=torch.float64), 1 / weight.double().norm(dim=1), "a")
        return Tall(((unit,),), "a matrix", 8.0)

    spectra = Spectra({"a": weight}.__getitem__)
    spectra.largest(matrix(weight))
    found = spectra.for_others().from_source(matrix(weight.half()))
    fresh = largest_eigenvalue(gram(matrix(weight.half())))
    assert found is not None and found > fresh * (1 + 3.9 * CARRIED)
    nowhere: dict[str, Any] = {"stack": None, "block": None, "role": None}
    largest: dict[str, Any] = {"bound": found, "partial": found, "limit": 65504, "headroom_bits": 1}
    claim = BoundEntry(name="", kind="output", observed=None, holds=True, **largest, **nowhere)
    assert near("bound", claim.bound, fresh) and not near("bound", claim.bound, fresh / 1.002)


def test_an_eigenvalue_that_overflowed_in_the_source_is_computed() -> None:
    """A source's squares may pass fp32 where those of the written weights do not."""
    weights = {name: torch.randn(n, 12) for name, n in (("a", 30), ("b", 30), ("c", 9))}
    spectra = Spectra(weights.__getitem__, fixed=True)
    for value in (math.inf, 0.0):
        spectra.bounds["a matrix"] = without_weights(tall(weights)), value
        assert spectra.largest(tall(weights)) == largest_eigenvalue(gram(tall(weights)))


def test_another_model_is_certified_as_if_nothing_had_been_kept(tmp_path: Path) -> None:
    source, other = (
        open_checkpoint(tiny.save(tiny.build("gated", seed, factor=8.0), tmp_path / str(seed))) for seed in (1, 2)
    )
    layout = resolve(source)
    spectra = Spectra(source_weights(source, layout))
    bound(layout, spectra.read, spectra=spectra)
    kept = dict(spectra.bounds)
    own = resolve(other)
    fresh = Spectra(fp16_weights(other, own))
    for target in ("half", "fp16-accumulate"):
        found, alone = (
            bounded(other, own, target, Arithmetic(64), Device("cpu"), Progress(quiet=True), spectra=s.for_others())
            for s in (spectra, replace(fresh, bounds={}))
        )
        assert found[0].sites == alone[0].sites and found[1] == alone[1]
    assert kept and spectra.bounds == kept


@pytest.mark.parametrize(
    ("kind", "dtype"), [("gated", torch.float32), ("t5", torch.float32), ("pegasus", torch.bfloat16)]
)
def test_no_adversarial_input_passes_a_carried_certificate(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The source's eigenvalues, the written weights: above what those reach, and within the slack of a certificate
    from the written files alone."""
    source = open_checkpoint(tiny.save(tiny.small(kind, 3, factor=8.0), tmp_path / "source", dtype))
    layout = resolve(source)
    spectra = Spectra(source_weights(source, layout))
    bound(layout, spectra.read, spectra=spectra)
    convert(source.source, tmp_path / "out", run_model=False)
    written = open_checkpoint(tmp_path / "out")
    found, alone = (
        bound(resolve(written), fp16_weights(written, resolve(written)), spectra=s)
        for s in (spectra.for_others(), None)
    )
    for one, other in zip(found.sites, alone.sites, strict=True):
        assert other.largest * (1 - 1e-9) <= one.largest * (1 + 2 * CARRIED)
        assert one.largest <= other.largest * (1 + 2 * CARRIED)
    half = load(tmp_path / "out", torch.float16, half=True)
    inputs = adverse_inputs(copy.deepcopy(half).float(), resolve(written), 8, 3)
    assert not broken(found, observe(half, resolve(written), inputs), FREE)


def test_convert_takes_every_eigenvalue_over_from_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.save(tiny.build("gated", 1), tmp_path / "source")
    computed: list[str] = []
    largest = Spectra.largest

    def watched(self: Spectra, matrix: Tall) -> float:
        known = matrix.label in self.bounds
        if not known:
            computed.append(matrix.label)
        elif self.from_source(matrix) is None:
            computed.append(f"again {matrix.label}")
        return largest(self, matrix)

    monkeypatch.setattr(Spectra, "largest", watched)
    report = convert(source, tmp_path / "out", run_model=False).report
    assert report["proof"] == "certified"
    # Each once, of the source.
    assert len(computed) == len(set(computed)) > 0 and not [label for label in computed if label.startswith("again")]
