"""Which edits are taken, by what each costs: with a trial whose costs are given, and on files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support import tiny
from support.contract import layout_of

from bf16_to_fp16 import convert
from bf16_to_fp16.checkpoint.folder import sha256_of
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.conversion.editing import (
    Edits,
    Exponents,
    Needed,
    Trial,
    change_by,
    least_edits,
    scaled_by,
    scales_logits,
    with_logits,
)
from bf16_to_fp16.conversion.planning import checkpoint_batches, reference_of
from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.families.types import LOGITS
from bf16_to_fp16.progress import Progress
from bf16_to_fp16.rescaling.plan import Plan

BF16 = 0.128  # so that a proof may cost 0.001


def frozen(exponents: Exponents) -> Any:
    return tuple(exponents) if isinstance(exponents, list) else exponents


@dataclass
class Given:
    """A trial in which edits cost what ``prices`` say, by signal and exponents, and together their sum."""

    prices: Mapping[tuple[str, Any], float]
    tied: bool | None = False
    untie: str = "copy"
    language_model: bool = True
    bf16: float = BF16
    made: Plan = field(default_factory=lambda: Plan(family="t5", centred_keys=["here"]))
    asked: list[list[dict[str, Exponents]]] = field(default_factory=list)

    @property
    def layout(self) -> Any:
        family, stock = SimpleNamespace(untie=self.untie), SimpleNamespace(is_language_model=self.language_model)
        return SimpleNamespace(tied=self.tied, family=family, stock=stock, head="head", cap=lambda _: None)

    def costs(self, trials: Sequence[Mapping[str, Exponents]], what: str) -> list[float]:
        self.asked.append([dict(trial) for trial in trials])
        return [sum(self.prices[name, frozen(e)] for name, e in trial.items()) for trial in trials]


def chosen(trial: Given, needed: Mapping[str, Needed], max_kl: float | None = None) -> Edits | None:
    return least_edits(cast("Trial", trial), needed, max_kl)


def exponents(edits: Edits | None) -> dict[str, Exponents]:
    assert edits is not None
    return dict(edits.plan.exponents)


def test_edits_that_something_observed_needs_may_cost_what_bf16_costs() -> None:
    needed = {"a": Needed([-3, 0], -1), "b": Needed(-2, None)}
    trial = Given({("a", (-3, 0)): 0.1, ("b", -2): BF16 - 0.1})
    edits = chosen(trial, needed)
    assert edits is not None and edits.predicted == {"a": 0.1, "b": BF16 - 0.1} and not edits.apart
    # With what was made before, and each tried alone and all together.
    assert edits.plan == Plan(family="t5", centred_keys=["here"], exponents={"a": [-3, 0], "b": -2})
    assert trial.asked == [[{"a": [-3, 0]}, {"b": -2}], [{"a": [-3, 0], "b": -2}]]


def test_the_dearest_falls_back_to_what_was_observed() -> None:
    needed = {"a": Needed([-5, -4], [-2, 0]), "b": Needed(-2, -1)}
    prices = {("a", (-5, -4)): 0.2, ("a", (-2, 0)): 0.02, ("b", -2): 0.1, ("b", -1): 0.05}
    edits = chosen(Given(prices), needed)
    assert edits is not None and edits.plan.exponents == {"a": [-2, 0], "b": -2}
    assert edits.predicted == {"a": 0.02, "b": 0.1}


def test_one_after_the_other_falls_back_and_what_is_observed_stays_whatever_it_costs() -> None:
    needed = {"a": Needed(-5, -2), "b": Needed(-3, -1)}
    prices = {("a", -5): 0.9, ("a", -2): 0.8, ("b", -3): 0.5, ("b", -1): 0.4}
    edits = chosen(Given(prices), needed)
    assert edits is not None and edits.plan.exponents == {"a": -2, "b": -1}
    assert edits.predicted == {"a": 0.8, "b": 0.4}


def test_an_edit_for_a_proof_alone_goes_first_only_where_it_is_the_dearest() -> None:
    needed = {"a": Needed(-2, -2), "b": Needed(-3, None), "c": Needed(-4, None)}
    prices = {("a", -2): 0.1, ("b", -3): 0.02, ("c", -4): 0.03}
    edits = chosen(Given(prices), needed)
    assert edits is not None and edits.plan.exponents == {"a": -2, "b": -3} and edits.predicted.keys() == {"a", "b"}


@pytest.mark.parametrize("cost,taken", [(BF16 / 128, True), (BF16 / 128 * 1.01, False)])
def test_edits_for_a_proof_alone_may_cost_a_128th_of_bf16(cost: float, taken: bool) -> None:
    edits = chosen(Given({("a", -2): cost}), {"a": Needed(-2, None)})
    assert (edits is not None) == taken
    # The dearest of several goes; the others are still worth it.
    edits = chosen(Given({("a", -2): cost, ("b", -1): 0.0}), {"a": Needed(-2, None), "b": Needed(-1, None)})
    assert exponents(edits) == ({"a": -2, "b": -1} if taken else {"b": -1})


def test_max_kl_is_for_what_was_observed_and_never_less_than_bf16() -> None:
    needed = {"a": Needed(-5, -2)}
    prices = {("a", -5): 0.5, ("a", -2): 0.3}
    assert exponents(chosen(Given(prices), needed)) == {"a": -2}
    assert exponents(chosen(Given(prices), needed, max_kl=0.6)) == {"a": -5}
    assert exponents(chosen(Given(prices), needed, max_kl=0.4)) == {"a": -2}
    cheap = {("a", -5): BF16, ("a", -2): 0.0}
    assert exponents(chosen(Given(cheap), needed, max_kl=1e-9)) == {"a": -5}
    # It buys no proof.
    assert chosen(Given({("a", -5): 0.5}), {"a": Needed(-5, None)}, max_kl=1.0) is None


def test_a_cost_that_is_no_number_is_too_much() -> None:
    needed = {"a": Needed(-5, None), "b": Needed(-1, -1)}
    edits = chosen(Given({("a", -5): math.nan, ("b", -1): 0.0}), {"a": needed["a"]})
    assert edits is None
    edits = chosen(Given({("a", -5): math.inf, ("b", -1): 0.0}), needed)
    assert exponents(edits) == {"b": -1}


# -- logits ------------------------------------------------------------------------------------------------------------

EACH = [-4, 0, -1]
LOGITS_NEEDED = {LOGITS: Needed(EACH, [-3, 0, 0])}


def test_a_head_of_its_own_has_an_exponent_for_each_choice_at_once() -> None:
    trial = Given({(LOGITS, tuple(EACH)): 0.01})
    edits = chosen(trial, LOGITS_NEEDED)
    assert exponents(edits) == {LOGITS: EACH} and edits is not None and not edits.apart


@pytest.mark.parametrize(
    "together,each,apart",
    [
        (0.0009, 0.0, False),  # little enough for the head to stay as it is
        (0.0011, 0.0, True),
        (0.0011, 0.0012, False),
        (0.0012, 0.0012, False),
    ],
)
def test_a_tied_head_is_separated_where_one_exponent_costs_more_than_little_and_than_one_for_each(
    together: float, each: float, apart: bool
) -> None:
    trial = Given({(LOGITS, -4): together, (LOGITS, tuple(EACH)): each}, tied=True)
    edits = chosen(trial, LOGITS_NEEDED)
    assert edits is not None and edits.apart == apart
    assert edits.plan.exponents == {LOGITS: EACH if apart else -4}
    assert edits.predicted == {LOGITS: each if apart else together}


@pytest.mark.parametrize("own", [{"untie": ""}, {"language_model": False}])
def test_a_tied_head_that_cannot_be_separated_has_one_exponent(own: dict[str, Any]) -> None:
    trial = Given({(LOGITS, -4): 0.1, (LOGITS, -3): 0.05}, tied=True, **own)
    needed, apart = with_logits(cast("Trial", trial), LOGITS_NEEDED, 0.001)
    assert needed == {LOGITS: Needed(-4, -3)} and not apart
    assert trial.asked == []


def test_a_head_is_not_separated_for_logits_that_stay_as_they_are() -> None:
    """Where what only a proof needs is too dear in every way."""
    trial = Given({(LOGITS, -4): 9.0, (LOGITS, tuple(EACH)): 8.0, ("a", -1): 0.0}, tied=True)
    edits = chosen(trial, {LOGITS: Needed(EACH, None), "a": Needed(-1, None)})
    assert edits is not None and edits.plan.exponents == {"a": -1} and not edits.apart


def test_logits_times_powers_of_two_are_one_for_each_choice() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert torch.equal(scaled_by(values, [-1, 0, 1]), values * torch.tensor([0.5, 1.0, 2.0]))
    assert torch.equal(scaled_by(values, -2), values / 4)


@pytest.mark.parametrize(
    "kind,scales",
    {"t5": True, "gemma": True, "gemma3-untied": False, "t5-spans": False, "t5-encoder": False}.items(),
)
def test_only_logits_of_a_language_model_without_a_soft_cap_are_scaled_afterwards(kind: str, scales: bool) -> None:
    assert scales_logits(layout_of(tiny.small(kind))) == scales


# -- on files ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """A trial of a tiny model with plain GELU and a head of its own."""
    root = tmp_path_factory.mktemp("trial")
    source = open_checkpoint(tiny.save(tiny.small("gelu", factor=1.0), root / "source"))
    layout = resolve(source)
    inputs = checkpoint_batches(source, layout, None, 0)[:4]
    made = Plan(family="t5")
    return Trial(source, layout, reference_of(source, inputs), inputs, Progress(quiet=True), made)


def neuron(layout: Layout) -> str:
    return f"{layout.feed_forwards[0].at}.neuron"


def test_a_trial_tells_what_edits_cost_each_for_itself(trial: Trial) -> None:
    name = neuron(trial.layout)
    logits: list[Exponents] = [-1, [-1, *[0] * 96]]
    trials: list[dict[str, Exponents]] = [{name: 0}, {name: -1}, {name: -6}, *({LOGITS: e} for e in logits), {}]
    nothing, little, much, all_logits, one, none = trial.costs(trials, "edits")
    assert nothing == none == 0 and 0 < little < much
    assert 0 < one < all_logits and 0 < trial.bf16 < all_logits
    [both] = trial.costs([{name: -6, LOGITS: -1}], "both")
    assert both > max(much, all_logits) / 2 and both not in (much, all_logits)


def test_exponents_of_logits_cost_the_same_by_the_head_and_behind_it(trial: Trial) -> None:
    each: Exponents = [-1, -2, 1, *[0] * 94]
    [cost] = trial.costs([{LOGITS: each}], "logits")
    head = f"{trial.layout.family.head}"
    change = change_by(trial.checkpoint, trial.layout, Plan(family="t5", exponents={LOGITS: each}))
    weight = trial.checkpoint.read(head).float()
    assert torch.equal(change(head, weight)[:4], weight[:4] * torch.tensor([[0.5], [0.25], [2.0], [1.0]]))
    outputs = [x * 2.0 ** torch.tensor(each) for x in trial.reference.fp32]
    assert cost == trial.divergence(outputs) > 0


def test_where_nothing_is_needed_an_exact_conversion_is_the_same_bit_by_bit(tmp_path: Path) -> None:
    source = tiny.save(tiny.small("gated", factor=1.0), tmp_path / "source")
    with tiny.no_pictures():
        plain, exact = (convert(source, tmp_path / out, exact=out == "exact").report for out in ("plain", "exact"))
    for report in (plain, exact):
        assert report["verdict"] == "safe" and report["proof"] == "certified"
        assert not {"inexact", "max_kl"} & report.keys()
        assert not any(name.endswith((".gate", ".scores")) or name == LOGITS for name in report["plan"]["exponents"])
    assert plain["plan"] == exact["plan"] and plain["fidelity"] == exact["fidelity"]
    one, other = (sha256_of(tmp_path / out / "model.safetensors") for out in ("plain", "exact"))
    assert one == other
