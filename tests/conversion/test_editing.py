"""Which edits are taken, by what each costs: with a trial whose costs are given, and on files."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support import tiny
from support.contract import layout_of

from bf16_to_fp16 import convert
from bf16_to_fp16.checkpoint.files import sha256_of
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.conversion.editing import (
    MANY,
    Cost,
    Edits,
    NeededExponents,
    ReferenceOutputs,
    Trial,
    least_edits,
    outputs_on_text,
    scales_logits,
    some_of,
    with_logits,
)
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.families.signals import LOGITS
from bf16_to_fp16.measuring.fidelity import add_outputs, compared, fidelity, reference_of
from bf16_to_fp16.measuring.lanes import Walk
from bf16_to_fp16.measuring.probe import batches
from bf16_to_fp16.measuring.source_runs import change_by
from bf16_to_fp16.measuring.stock import load_config
from bf16_to_fp16.progress import Progress
from bf16_to_fp16.rescaling.exponents import OfChannels
from bf16_to_fp16.rescaling.plan import Plan

BF16 = 0.128  # so that a proof may cost 0.001


def frozen(exponents: OfChannels) -> Any:
    return tuple(exponents) if isinstance(exponents, list) else exponents


@dataclass
class Given:
    """A trial in which edits cost what ``prices`` say, by signal and exponents, and together their sum."""

    prices: Mapping[tuple[str, Any], float]
    tied: bool | None = False
    untie: str = "copy"
    language_model: bool = True
    on_text: float = 1.0  # how much larger a share they cost on text
    centring: Plan = field(default_factory=lambda: Plan(family="t5", centred_keys=["here"]))
    asked: list[list[dict[str, OfChannels]]] = field(default_factory=list)
    numbers: list[int | None] = field(default_factory=list)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    deeper: dict[str, list[int]] = field(default_factory=dict)

    @property
    def layout(self) -> Any:
        family, stock = SimpleNamespace(untie=self.untie), SimpleNamespace(is_language_model=self.language_model)
        return SimpleNamespace(tied=self.tied, family=family, stock=stock, head="head", cap=lambda _: None)

    @property
    def references(self) -> list[ReferenceOutputs]:
        return [ReferenceOutputs([], [], BF16)]

    alone = Trial.alone

    def columns(self, rows: Mapping[str, OfChannels]) -> dict[str, list[int]]:
        return {name: e for name, e in self.cuts.items() if name.removesuffix(".columns") in rows}

    def in_step(self, cuts: Mapping[str, list[int]]) -> dict[str, list[int]]:
        return self.deeper or dict(cuts)

    def costs(self, trials: Sequence[Mapping[str, OfChannels]], what: str, number: int | None = None) -> list[Cost]:
        self.asked.append([dict(trial) for trial in trials])
        self.numbers.append(number)
        found = [sum(self.prices[name, frozen(e)] for name, e in trial.items()) for trial in trials]
        return [Cost(each, each * self.on_text / BF16) for each in found]


def chosen(trial: Given, needed: Mapping[str, NeededExponents], max_kl: float | None = None) -> Edits | None:
    return least_edits(cast("Trial", trial), needed, max_kl)


def exponents(edits: Edits | None) -> dict[str, OfChannels]:
    assert edits is not None
    return dict(edits.plan.exponents)


def test_edits_that_something_observed_needs_may_cost_what_bf16_costs() -> None:
    needed = {"a": NeededExponents([-3, 0], -1), "b": NeededExponents(-2, None)}
    trial = Given({("a", (-3, 0)): 0.1, ("b", -2): 0.02})
    edits = chosen(trial, needed)
    assert edits is not None and edits.predicted == {"a": 0.1, "b": 0.02} and not edits.apart
    # With what was made before, and each tried alone and all together.
    assert edits.plan == Plan(family="t5", centred_keys=["here"], exponents={"a": [-3, 0], "b": -2})
    assert trial.asked == [[{"b": -2}, {"a": [-3, 0]}], [{"a": [-3, 0], "b": -2}]]


def test_what_was_observed_is_worth_any_price() -> None:
    prices = {("a", -2): 0.8, ("b", -1): math.nan}
    edits = chosen(Given(prices), {"a": NeededExponents(-2, -2), "b": NeededExponents(-1, -1)})
    assert edits is not None and edits.plan.exponents == {"a": -2, "b": -1} and edits.predicted["a"] == 0.8


@pytest.mark.parametrize("cost,taken", [(BF16 / 128, True), (BF16 / 128 * 1.01, False), (math.nan, False)])
def test_edits_for_a_proof_alone_may_cost_a_128th_of_bf16(cost: float, taken: bool) -> None:
    """All of them are taken or none, since one that is missing leaves no proof; a higher price buys none either."""
    for needed in ({"a": NeededExponents(-2, None)}, {"a": NeededExponents(-2, None), "b": NeededExponents(-1, None)}):
        for max_kl in (None, 1.0):
            edits = chosen(Given({("a", -2): cost, ("b", -1): 0.0}), needed, max_kl)
            assert (edits is not None) == taken and (edits is None or edits.plan.exponents.keys() == needed.keys())


@pytest.mark.parametrize("cost,taken", [(1.74, True), (1.76, False), (math.inf, False)])
def test_where_edits_are_needed_those_of_a_proof_may_cost_nearly_twice_what_bf16_does(cost: float, taken: bool) -> None:
    prices = {("a", -3): cost * BF16, ("a", -1): 0.9 * BF16}
    assert (chosen(Given(prices), {"a": NeededExponents(-3, -1)}) is not None) == taken


def test_max_kl_is_never_less_than_what_bf16_costs() -> None:
    needed, prices = {"a": NeededExponents(-5, -2)}, {("a", -5): 0.5}
    assert [chosen(Given(prices), needed, max_kl=kl) is not None for kl in (None, 0.4, 0.6)] == [False, False, True]
    assert exponents(chosen(Given({("a", -5): BF16}), needed, max_kl=1e-9)) == {"a": -5}


def test_what_edits_cost_on_text_counts_as_well() -> None:
    needed = {"a": NeededExponents(-5, -2), "b": NeededExponents(-1, None)}
    prices = {("a", -5): 0.05, ("b", -1): 0.01}
    assert exponents(chosen(Given(prices), needed)) == {"a": -5, "b": -1}
    assert chosen(Given(prices, on_text=4.0), needed) is None


@pytest.mark.parametrize("dear", [None, "20", "3", "all"])
def test_of_many_edits_the_last_are_tried_first_and_no_more_once_they_cost_too_much(dear: str | None) -> None:
    """Each costs a little; no two of them are tried twice, and all together only where each is cheap."""
    names = [str(n) for n in range(24)]
    little = BF16 / 128 / (15 if dear == "all" else 25)
    trial = Given({(name, -1): BF16 if name == dear else little for name in names})
    edits = chosen(trial, {name: NeededExponents(-1, None) for name in names})
    last, first = ([{name: -1} for name in reversed(some)] for some in (names[8:], names[:8]))
    asked = {None: [last, first, [dict.fromkeys(names, -1)]], "20": [last], "3": [last, first], "all": [last]}
    assert trial.asked == asked[dear] and trial.numbers == [24, 24, None][: len(trial.asked)]
    assert (edits is None) is bool(dear)
    assert edits is None or list(edits.predicted) == names


def test_columns_are_cut_where_rows_are_dear_and_columns_cost_less() -> None:
    """Also where rows alone cost too much for a proof, and where what was observed is worth any price."""
    rows = {("a", -3): 0.5 * BF16, ("b", -2): 0.05 * BF16}
    cheap, dear = {("a.columns", (0, -3)): 0.0}, {("a.columns", (0, -3)): 0.6 * BF16}
    cuts = {"a.columns": [0, -3]}
    for observed in (-3, None):
        needed = {"a": NeededExponents(-3, observed), "b": NeededExponents(-2, -2)}
        edits = chosen(Given(rows | cheap, cuts=cuts), needed)
        assert exponents(edits) == {"a.columns": [0, -3], "b": -2}
        assert edits is not None and edits.predicted == {"a.columns": 0.0, "b": 0.05 * BF16}
        assert exponents(chosen(Given(rows | dear, cuts=cuts), needed)) == {"a": -3, "b": -2}
    for_proof = {"a": NeededExponents(-3, None), "b": NeededExponents(-2, None)}
    little = rows | {("b", -2): BF16 / 200}
    assert chosen(Given(little), for_proof) is None
    assert chosen(Given(rows | dear, cuts=cuts), {"a": NeededExponents(-3, None)}) is None
    assert exponents(chosen(Given(little | cheap, cuts=cuts), for_proof)) == {"a.columns": [0, -3], "b": -2}
    # Where rows are cheap no column is tried.
    trial = Given({("a", -3): 0.09 * BF16}, cuts=cuts)
    assert exponents(chosen(trial, {"a": NeededExponents(-3, -3)})) == {"a": -3} and len(trial.asked) == 1


@pytest.mark.parametrize("together", [0.01, 0.29])
def test_cuts_in_step_are_made_where_they_cost_less_than_each_alone_or_its_rows(together: float) -> None:
    cuts = {"a.columns": [-3], "b.columns": [-2]}
    deeper = {"a.columns": [-3], "b.columns": [-6]}
    costs = {("a", -3): 0.2, ("b", -2): 0.1, ("a.columns", (-3,)): 0.0, ("b.columns", (-2,)): 0.3}
    costs |= {("b.columns", (-6,)): together, ("c", -1): 0.001}
    needed = {name: NeededExponents(e, e) for name, e in (("a", -3), ("b", -2), ("c", -1))}
    edits = chosen(Given({key: cost * BF16 for key, cost in costs.items()}, cuts=cuts, deeper=deeper), needed)
    assert edits is not None
    if together < 0.1:
        assert exponents(edits) == {"c": -1} | deeper
        assert edits.predicted == pytest.approx(
            {"a.columns": together * BF16, "b.columns": together * BF16, "c": 0.001 * BF16}
        )
    else:
        assert exponents(edits) == {"a.columns": [-3], "b": -2, "c": -1}


EACH = [-4, 0, -1]
LOGITS_NEEDED = {LOGITS: NeededExponents(EACH, [-3, 0, 0])}


@pytest.mark.parametrize("together,each", [(0.0009, 0.0), (0.0, 0.0009), (0.0, 0.0), (0.02, 0.03), (0.03, 0.02)])
def test_a_head_of_its_own_has_one_exponent_or_one_for_each_choice_by_the_cost(together: float, each: float) -> None:
    """One keeps the order of the choices: where the loud ones are chosen among, one for each costs hundreds of nats."""
    edits = chosen(Given({(LOGITS, -4): together, (LOGITS, tuple(EACH)): each}), LOGITS_NEEDED)
    one = together <= each
    assert exponents(edits) == {LOGITS: -4 if one else EACH} and edits is not None and not edits.apart
    assert edits.predicted == {LOGITS: together if one else each}


@pytest.mark.parametrize("tied", [False, True])
def test_where_all_choices_need_as_much_one_exponent_is_not_tried_twice(tied: bool) -> None:
    trial = Given({(LOGITS, -4): 0.01}, tied=tied)
    assert exponents(chosen(trial, {LOGITS: NeededExponents(-4, -3)})) == {LOGITS: -4}
    assert trial.asked == [[{LOGITS: -4}]]


@pytest.mark.parametrize(
    "together,each,apart",
    [
        (0.0009, 0.0, False),  # little enough for the head to stay as it is
        (0.0011, 0.0, True),
        (0.0011, 0.0012, False),
        (0.0012, 0.0012, False),
    ],
)
def test_a_tied_head_is_separated_where_one_exponent_costs_more(together: float, each: float, apart: bool) -> None:
    trial = Given({(LOGITS, -4): together, (LOGITS, tuple(EACH)): each}, tied=True)
    edits = chosen(trial, LOGITS_NEEDED)
    assert edits is not None and edits.apart == apart
    assert edits.plan.exponents == {LOGITS: EACH if apart else -4}
    assert edits.predicted == {LOGITS: each if apart else together}


@pytest.mark.parametrize("own", [{"untie": ""}, {"language_model": False}])
def test_a_tied_head_that_cannot_be_separated_has_one_exponent(own: dict[str, Any]) -> None:
    trial = Given({(LOGITS, -4): 0.1, (LOGITS, -3): 0.05}, tied=True, **own)
    needed, apart = with_logits(cast("Trial", trial), LOGITS_NEEDED)
    assert needed == {LOGITS: NeededExponents(-4, -3)} and not apart
    assert trial.asked == []


@pytest.mark.parametrize(
    "kind,scales", {"t5": True, "gemma": True, "gemma3-untied": False, "t5-spans": False, "t5-encoder": False}.items()
)
def test_only_logits_of_a_language_model_without_a_soft_cap_are_scaled_afterwards(kind: str, scales: bool) -> None:
    assert scales_logits(layout_of(tiny.small(kind))) == scales


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    root = tmp_path_factory.mktemp("trial")
    source = open_checkpoint(tiny.save(tiny.small("gelu", factor=1.0), root / "source"))
    layout = resolve(source)
    inputs = batches(load_config(source.folder), None, None)[:4]
    fp32 = reference_of(source, inputs).fp32
    references = [ReferenceOutputs(inputs, fp32, 0.5), ReferenceOutputs(inputs[:1], fp32[:1], 0.25, unit_factor=2.0)]
    return Trial(source, layout, references, Progress(quiet=True), Plan(family="t5"))


def test_a_trial_tells_what_edits_cost_each_for_itself(trial: Trial) -> None:
    name = f"{trial.layout.feed_forwards[0].at}.neuron"
    logits: list[OfChannels] = [-1, [-1, *[0] * 96]]
    first = trial.costs([{name: 0}, {name: -1}, {name: -6}, {}], "edits")
    nothing, little, much, none = (cost.divergence for cost in first)
    all_logits, one = (cost.divergence for cost in trial.costs([{LOGITS: e} for e in logits], "logits"))
    assert nothing == none == 0 and 0 < little < much
    assert 0 < one < all_logits
    [both] = trial.costs([{name: -6, LOGITS: -1}], "both")
    assert both.divergence > all_logits / 2 and both.divergence not in (much, all_logits)


def test_a_share_is_the_largest_of_what_bf16_costs_on_each_kind_of_input(trial: Trial) -> None:
    [cost] = trial.costs([{LOGITS: -3}], "logits")
    owns = [replace(trial, references=[reference]) for reference in trial.references]
    each = [own.costs([{LOGITS: -3}], "logits")[0] for own in owns]
    assert [one.share for one in each] == [one.divergence / 0.5 for one in each]
    assert cost == Cost(each[0].divergence, max(one.share for one in each))


def test_more_edits_than_a_few_are_tried_one_by_one_on_less(trial: Trial) -> None:
    inputs = compared(trial.references[0].inputs)
    assert some_of(inputs, MANY) == inputs and len(some_of(inputs, MANY + 1)) == 2 < len(inputs)
    sizes = [batch.size for batch in inputs]
    assert sorted(batch.size for batch in some_of(inputs, MANY + 1)) == sorted(sizes)[:2]
    trials: list[dict[str, OfChannels]] = [{LOGITS: -3}] * (MANY + 1)
    few = {id(batch) for batch in some_of(inputs, MANY + 1)}
    pairs = [pair for pair in zip(inputs, trial.references[0].fp32, strict=True) if id(pair[0]) in few]
    reference = ReferenceOutputs([batch for batch, _ in pairs], [fp32 for _, fp32 in pairs], 0.5)
    [alone] = replace(trial, references=[reference]).costs([{LOGITS: -3}], "")
    assert {cost.divergence for cost in trial.costs(trials, "many")} == {alone.divergence}
    assert trial.costs(trials[:1], "one of many", len(trials))[0].divergence == alone.divergence


def test_exponents_of_logits_cost_the_same_by_the_head_and_behind_it(trial: Trial) -> None:
    each: OfChannels = [-1, -2, 1, *[0] * 94]
    [cost] = trial.costs([{LOGITS: each}], "logits")
    head, plan = f"{trial.layout.family.head}", Plan(family="t5", exponents={LOGITS: each})
    weight = trial.checkpoint.read(head).float()
    change = change_by(trial.checkpoint, trial.layout, plan)
    assert torch.equal(change(head, weight)[:4], weight[:4] * torch.tensor([[0.5], [0.25], [2.0], [1.0]]))
    walk, inputs, source = Walk(trial.checkpoint), trial.references[0].inputs, trial.references[0].fp32
    lanes = add_outputs(walk, inputs, torch.float32, change=change)
    walk.run()
    assert cost.divergence == fidelity(source, None, [lane.result for lane in lanes], probabilities=True).kl_fp16


def test_a_tokenizer_that_cannot_be_used_is_none(tmp_path: Path) -> None:
    """It stops no conversion that was given no text."""
    source = tiny.save(tiny.small("gelu", factor=1.0), tmp_path / "source")  # whose vocabulary has no letters
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    checkpoint, notes = open_checkpoint(source), list[str]()
    said = Progress(quiet=True)
    object.__setattr__(said, "say", notes.append)
    assert outputs_on_text(checkpoint, resolve(checkpoint), load_config(source), said) == []
    assert len(notes) == 1 and "past the vocabulary" in notes[0]


def test_where_nothing_is_needed_an_exact_conversion_is_the_same_bit_by_bit(tmp_path: Path) -> None:
    source = tiny.save(tiny.small("t5-encoder", factor=1.0), tmp_path / "source")
    reports = [convert(source, tmp_path / out, exact=out == "exact", run_model=False).report for out in ("a", "exact")]
    for report in reports:
        assert report["verdict"] == "safe" and report["proof"] == "certified"
        assert not {"inexact", "max_kl"} & report.keys()
        assert not any(name.endswith((".gate", ".scores")) or name == LOGITS for name in report["plan"]["exponents"])
    assert reports[0]["plan"] == reports[1]["plan"] and reports[0]["fidelity"] == reports[1]["fidelity"]
    assert sha256_of(tmp_path / "a" / "model.safetensors") == sha256_of(tmp_path / "exact" / "model.safetensors")
