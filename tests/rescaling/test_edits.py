"""Edits: as large as bounds ask for and no larger, told apart from what is exact, and taken back to the bit."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from support import exhaustive, tiny
from support.contract import MOVABLE, certified, layout_of, random_plan
from support.priced import asymptotic_plan, attentions, exponents
from torch import Tensor

from bf16_to_fp16.bounds.findings import Certificate
from bf16_to_fp16.conversion.editing import needed_edits
from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.families.resolve import ModelTensors
from bf16_to_fp16.families.signals import LOGITS, Kind
from bf16_to_fp16.families.wiring import Experts
from bf16_to_fp16.measuring.meter import observe_ranges
from bf16_to_fp16.measuring.probe import batches
from bf16_to_fp16.numerics import FP16_MAX, PROOF_MARGIN_BITS
from bf16_to_fp16.rescaling.apply import apply
from bf16_to_fp16.rescaling.centred import centrable
from bf16_to_fp16.rescaling.edits import (
    edited,
    edited_weights,
    edits_of,
    excess_of_signals,
    exponents_for,
    least,
    listed_edits,
    sites_of,
    with_edits,
    without_edits,
)
from bf16_to_fp16.rescaling.exponents import exponents_of
from bf16_to_fp16.rescaling.plan import OfChannels, Plan, inverse

LIMIT = FP16_MAX * 2.0**-PROOF_MARGIN_BITS
SCORES = ("scores", "masked scores")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a gate, scores with a position bias, a head of its own": ("gated", {}),
    "a plain GELU": ("gelu", {}),
    "a tied head": ("t5", {}),
    "biases and GELU": ("pegasus", {"activation_function": "gelu"}),
    "queries that share keys": ("llama-biased", {}),
    "normalised queries": ("qwen3", {}),
    "gains less an offset, a soft cap of logits": ("gemma3-untied", {}),
    "a soft cap of scores": ("gemma2", {}),
    "a soft cap under 1": ("gemma2", {"attn_logit_softcapping": 0.25}),
    "gate and neurons in one matrix": ("glm4", {}),
    "experts": ("switch-untied", {}),
    "sums of blocks": ("longt5", {}),
    "a dense with a tanh": ("t5-classifier", {}),
    "labels of tokens": ("t5-token-classifier", {}),
    "no head": ("umt5-encoder", {}),
    "two streams": ("t5gemma", {}),
}
each_case = pytest.mark.parametrize("kind,own", CASES.values(), ids=CASES)


def saturated(kind: str, own: dict[str, Any], bits: int = 16) -> tuple[Any, Layout]:
    """Return a model in which all that has a price is multiplied, by up to 2^bits and a few channels by nothing."""
    model = tiny.small(kind, factor=1.0, **own)
    layout = layout_of(model)
    drawn = asymptotic_plan(layout).exponents
    moved: dict[str, OfChannels] = {name: larger(e, bits) for name, e in drawn.items()}
    if LOGITS in layout.signals:
        rows = exponents(layout.signals[LOGITS].size, torch.Generator().manual_seed(3))
        moved[LOGITS] = bits if layout.tied else larger(rows, bits)
    return apply(model, layout, Plan(family=layout.family.name, exponents=moved)), layout


def larger(drawn: OfChannels, bits: int) -> OfChannels:
    assert isinstance(drawn, list)
    return [bits + e if e > 0 or max(drawn) < 0 else 0 for e in drawn]


def sites_under(layout: Layout, certificate: Certificate) -> dict[str, dict[str, float]]:
    """Return by signal with a price the bounds of the sites that its exponents must bring under their limits."""
    bounds = {site.name: (site.kind, site.largest) for site in certificate.sites}
    found = {name: {s.seen[0].module: bounds[s.seen[0].module][1]} for name, s in priced(layout).items() if s.seen}
    for w in layout.feed_forwards:
        name = f"{w.at}.gate" if w.gate else f"{w.at}.neuron"
        if name in found:
            # Of a gate or an activation that gives inf at no harm nothing is a site.
            found[name] |= {n: b for n, (_, b) in bounds.items() if n.startswith(f"{w.act}:")}
    for a in attentions(layout):
        of = {n: b for n, (kind, b) in bounds.items() if n.startswith(f"{a.at}:") and kind in SCORES}
        assert f"{a.at}:scores" in of
        found[f"{a.at}.scores"] = of
    if LOGITS in found:
        found[LOGITS] |= {n: b for n, (kind, b) in bounds.items() if kind == "logits"}
    return found


def priced(layout: Layout) -> dict[str, Any]:
    return {name: s for name, s in layout.signals.items() if s.kind.has_price}


def excess(layout: Layout, certificate: Certificate) -> dict[str, Tensor]:
    return excess_of_signals(layout, certificate.ranges, LIMIT)


def exponents_of_edit(signal: str, bits: torch.Tensor) -> OfChannels:
    return exponents_for(bits, 8 if signal.endswith(".scores") else 2)


@pytest.mark.parametrize("steps", [2, 8])
def test_exponents_are_the_largest_of_their_kind_that_take_enough_off(steps: int) -> None:
    bits = torch.cat([torch.linspace(0, 20, 401, dtype=torch.float64), -torch.tensor([7 / 8, 5 / 8]).double().log2()])
    exponents = torch.tensor(exponents_for(bits, steps))
    fractions, _ = torch.frexp(2.0**exponents)
    assert torch.allclose((steps * fractions).round(), steps * fractions, atol=1e-12)
    assert bool((-exponents >= bits - 1e-5).all())
    next_larger = 2.0**exponents * (1 + 1 / (steps * fractions).round())
    assert bool((next_larger.log2() > -bits + 1e-5).all())
    assert exponents_for(torch.tensor([0.0, 0.0]), steps) == 0


@each_case
def test_exponents_by_bounds_bring_every_site_of_a_signal_under_its_limit(kind: str, own: dict[str, Any]) -> None:
    """For every input, with bias and under a mask; one bit less at the channel that needs most does not."""
    model, layout = saturated(kind, own)
    _, before = certified(model)
    needed = {n: exponents_of_edit(n, bits) for n, bits in excess(layout, before).items() if bool((bits > 0).any())}
    of_rows = {n for n in priced(layout) if layout.signals[n].kind is not Kind.COLUMNS}
    assert needed.keys() == {n for n in of_rows if n != LOGITS or layout.gives_probabilities}
    plan = {n: least(found) if n == LOGITS and layout.tied else found for n, found in needed.items()}
    _, after = certified(apply(deepcopy(model), layout, Plan(family=layout.family.name, exponents=plan)))
    under = sites_under(layout, after)
    held = {site.name for site in after.sites if site.holds}
    for name in needed:
        for site, reached in under[name].items():
            assert reached <= FP16_MAX and site in held, (name, site)
    less: dict[str, OfChannels] = {
        n: e + 1 if isinstance(e, int | float) else [x + (x == min(e)) for x in e] for n, e in plan.items()
    }
    _, short = certified(apply(model, layout, Plan(family=layout.family.name, exponents=less)))
    for name, sites in sites_under(layout, short).items():
        if name in needed:
            assert max(sites.values()) > LIMIT * (1 - 1e-4), name


def test_channels_that_fit_are_left_alone() -> None:
    model, layout = saturated("gated", {})
    found = excess(layout, certified(model)[1])
    for name, bits in found.items():
        needed = exponents_for(bits)
        moved = [needed] * len(bits) if isinstance(needed, int | float) else needed
        assert all((e < 0) == (b > 2.0**-20) for e, b in zip(moved, bits.tolist(), strict=True)), name
    gates = [exponents_for(bits) for name, bits in found.items() if name.endswith(".gate")]
    assert all(isinstance(e, list) and 0 in e and min(e) < -5 for e in gates)


def test_exponents_are_whole_bits_up_and_one_number_where_all_agree() -> None:
    assert exponents_for(torch.tensor([0.0, 1e-9, 0.1, 1.0, 1.0 + 1e-9, 1.001]).double()) == [0, 0, -1, -1, -1, -2]
    assert exponents_for(torch.tensor([1.5, 1.2]).double()) == -2
    assert exponents_for(torch.tensor(3.0).double()) == -3


def test_a_head_gets_one_exponent_and_gains_of_queries_one_for_all_heads() -> None:
    for kind in ("gated", "llama", "qwen3"):
        model, layout = saturated(kind, {})
        for w in attentions(layout):
            bits = excess(layout, certified(model)[1])[f"{w.at}.scores"]
            size = layout.head_size(w)
            wanted = () if w.query_norm else (layout.heads(w) * size,)
            assert bits.shape == torch.Size(wanted)
            if wanted:
                assert torch.equal(bits.view(-1, size)[:, :1].expand(-1, size).flatten(), bits)


def test_a_router_has_one_exponent_so_that_each_token_goes_where_it_went() -> None:
    model, layout = saturated("switch", {})
    for w in layout.topology:
        if isinstance(w, Experts):
            assert isinstance(exponents_for(excess(layout, certified(model)[1])[f"{w.classifier}.routing"]), int)


@pytest.mark.parametrize("kind", ["gated", "longt5", "longt5-local"])
def test_a_large_position_bias_leaves_scores_less_room(kind: str) -> None:
    """Under a mask, and where a position sees no further than its neighbours and its mask is no number."""
    model, layout = saturated(kind, {})
    first = attentions(layout)[0]
    with torch.no_grad():
        model.get_parameter(first.bias)[2] = 4e4
    bits = excess(layout, certified(model)[1])[f"{first.at}.scores"]
    plan = Plan(family=layout.family.name, exponents={f"{first.at}.scores": exponents_for(bits)})
    reached = sites_under(layout, certified(apply(model, layout, plan))[1])[f"{first.at}.scores"]
    assert reached[first.joining] > 4e4 and max(reached.values()) <= FP16_MAX


def test_a_position_bias_past_the_limit_is_nothing_that_queries_could_be_edited_for() -> None:
    """No exponent of a query makes room beside it: infinitely many bits, and not needed."""
    model = tiny.small("gated", factor=1.0)
    first = attentions(layout_of(model))[0]
    with torch.no_grad():
        model.get_parameter(first.bias)[2, 1] = 1e5
    layout, bounds = certified(model)
    size = layout.head_size(first)
    bits = excess(layout, bounds)[f"{first.at}.scores"]
    assert bool(bits[size : 2 * size].isinf().all()) and not bool(bits[:size].isinf().any())
    observed = observe_ranges(model, batches(model.config, None, None)[:1])
    found = needed_edits(layout, bounds.ranges, observed, 1.0)
    # Other attentions of the stack share the table.
    assert not any(name.startswith("encoder") and name.endswith(".scores") for name in found)


def test_nothing_is_needed_where_bounds_hold_and_by_observation_only_what_was_seen_to_pass() -> None:
    quiet = tiny.small("gated", factor=1.0)
    layout, bounds = certified(quiet)
    loud, passed = deepcopy(quiet), excess_of_signals(layout, bounds.ranges, 1.0)
    first, *_, last = layout.feed_forwards
    with torch.no_grad():  # bounds of the first pass the limit by 2%, those of the last by much more
        for w, over in ((first, 1.02), (last, 64.0)):
            loud.get_submodule(w.gate).weight.mul_(over * LIMIT / 2.0 ** float(passed[f"{w.at}.gate"].max()))
    given = batches(quiet.config, None, None)[:2]
    for model in (quiet, loud):
        model.set_attn_implementation("eager")
    assert needed_edits(layout, bounds.ranges, observe_ranges(quiet, given), 1.0) == {}
    layout, bounds = certified(loud)
    seen = observe_ranges(loud, given)
    found = needed_edits(layout, bounds.ranges, seen, 0.0)
    by_bounds = {n: exponents_of_edit(n, bits) for n, bits in excess(layout, bounds).items() if bool((bits > 0).any())}
    assert {name: each.proven for name, each in found.items()} == by_bounds
    passed = excess_of_signals(layout, seen, FP16_MAX)
    for name, each in found.items():
        if each.observed is None:
            assert not bool((torch.minimum(passed[name], excess(layout, bounds)[name]) > 0).any())
        else:
            assert least(each.proven) <= least(each.observed) < 0
    assert {each.observed is None for each in found.values()} == {True, False}
    more = needed_edits(layout, bounds.ranges, seen, 1.0)
    assert all(least(more[name].observed or 0) <= least(each.observed or 0) for name, each in found.items())
    assert more != found


def test_what_needs_more_than_any_exponent_is_not_edited() -> None:
    model, layout = saturated("gated", {}, bits=40)
    bounds = certified(model)[1]
    assert needed_edits(layout, bounds.ranges, {}, 1.0).keys() & priced(layout).keys() == set()


def test_outputs_that_are_no_choice_are_not_edited() -> None:
    model = tiny.small("t5-classifier", factor=1.0, problem_type="regression")
    layout = layout_of(model)
    plan = Plan(family="t5", exponents={LOGITS: 20})
    found = excess(layout, certified(apply(model, layout, plan))[1])
    assert LOGITS not in found and "classification_head.dense.tanh" in found


@pytest.mark.parametrize("kind", exhaustive.beyond(["gated", "pegasus", "qwen3", "glm4", "t5-classifier"], tiny.KINDS))
def test_a_plan_is_its_edits_and_an_exact_rest(kind: str) -> None:
    model = tiny.small(kind, factor=1.0)
    layout = layout_of(model)
    edits = asymptotic_plan(layout)
    if LOGITS in layout.signals:
        edits = edits.model_copy(update={"exponents": {**edits.exponents, LOGITS: 2}})
    edits = edits.model_copy(update={"centred_keys": sorted(w.at for w in centrable(layout))})
    rest = random_plan(layout, MOVABLE, 4)
    whole = with_edits(rest, edits)
    assert edits_of(layout, whole) == edits and without_edits(layout, whole) == rest
    assert with_edits(without_edits(layout, whole), edits_of(layout, whole)) == whole
    assert edits_of(layout, rest) == Plan(family=layout.family.name) and without_edits(layout, edits).exponents == {}
    # One after the other as at once, and back, to the bit.
    edits = edits.model_copy(update={"centred_keys": []})
    whole = with_edits(rest, edits)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    one = apply(apply(deepcopy(model), layout, edits), layout, rest).state_dict()
    apply(model, layout, whole)
    assert all(torch.equal(tensor, one[name]) for name, tensor in model.state_dict().items())
    apply(model, layout, inverse(whole))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_listed_edits_name_the_site_that_must_fall_the_least_exponent_and_what_each_costs() -> None:
    layout = layout_of(tiny.small("gated"))
    gate, scores = "encoder.block.1.layer.1.DenseReluDense.gate", "decoder.block.0.layer.1.EncDecAttention.scores"
    gates = [0, -5, *[-2] * 35]
    made: dict[str, OfChannels] = {scores: -3, gate: gates, "encoder.block.0.layer.0.layer_norm": 1, LOGITS: -1}
    plan = Plan(family="t5", residual_exponent=-2, exponents=made)
    edits = listed_edits(layout, plan, {gate: 0.25}).items()
    listed = [(signal, e.site, e.exponent, e.predicted, e.measured) for signal, e in edits]
    assert sorted(listed) == [
        (scores, "decoder.block.0.layer.1.EncDecAttention:scores", -3, None, None),
        (gate, "encoder.block.1.layer.1.DenseReluDense.wi_0", -5, 0.25, None),
        (LOGITS, "lm_head", -1, None, None),
    ]
    assert listed_edits(layout, without_edits(layout, plan)) == {}


@pytest.mark.parametrize("kind", exhaustive.beyond(tiny.CORE, tiny.KINDS))
def test_every_signal_with_a_price_has_a_site_of_the_certificate(kind: str) -> None:
    layout, certificate = certified(tiny.small(kind, factor=1.0))
    assert sites_of(layout).keys() == priced(layout).keys()
    assert set(sites_of(layout).values()) <= {site.name for site in certificate.sites}


def test_a_weight_under_edits_is_itself_where_they_leave_it_and_is_never_changed_in_place() -> None:
    model = tiny.small("gemma3", factor=1.0)
    source, layout = ModelTensors(model), layout_of(model)
    edits = asymptotic_plan(layout)
    read, plain = edited_weights(source, layout, edits), edited_weights(source, layout, None)
    moved = apply(deepcopy(model), layout, edits).state_dict()
    norm = next(w.query_norm for w in attentions(layout)) + ".weight"
    for name, tensor in layout.tensors.items():
        weight = plain(name)
        before = weight.clone()
        found = edited(tensor, weight, edits)  # as read, with what stock code adds
        still = not bool((exponents_of(tensor, edits).full(tensor.shape) != 0).any())
        assert (found is weight) == still and torch.equal(weight, before)
        assert torch.equal(read(name).float(), moved[name] + tensor.offset), name
    stored = source.read(norm)
    assert torch.equal(edited(layout.tensors[norm], stored, edits, 1.0), moved[norm])
    assert not torch.equal(stored, moved[norm])
