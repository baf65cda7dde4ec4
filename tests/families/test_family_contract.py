"""Every family keeps the contract: each of its models in ``tiny``, and architectures drawn from its entry."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from support import contract, exhaustive, tiny
from support.contract import MOVABLE, layout_of, outputs, random_plan
from support.priced import Check, Values, check_asymptotic, check_logits, left_out, logits_of, values_at_sites

from bf16_to_fp16 import UserError
from bf16_to_fp16.families.known import FAMILIES, may_be_absent
from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.families.resolve import ModelTensors, eps_attribute, resolve
from bf16_to_fp16.families.signals import LOGITS, Kind, carried_by
from bf16_to_fp16.families.wiring import Attention
from bf16_to_fp16.rescaling.apply import apply, scale
from bf16_to_fp16.rescaling.exponents import exponents_of

each_kind = pytest.mark.parametrize("kind", tiny.KINDS)
each_part = pytest.mark.parametrize("kind", exhaustive.beyond(tiny.SEARCHED, tiny.KINDS))
one_of_each = pytest.mark.parametrize("kind", exhaustive.beyond(tiny.CORE, tiny.KINDS))
each_family = pytest.mark.parametrize("entry", tiny.ENTRIES, ids=lambda entry: next(iter(entry.kinds)))
UNDONE = [entry for entry in tiny.ENTRIES if entry.kinds.keys() & {"pegasus", "gemma3"}]


def test_every_family_and_every_tiny_model_is_under_contract() -> None:
    entered = [{tiny.config(kind).model_type for kind in entry.kinds} for entry in tiny.ENTRIES]
    assert sorted(map(sorted, entered)) == sorted([family.model_type] for family in FAMILIES)
    assert len(tiny.KINDS) == sum(len(entry.kinds) for entry in tiny.ENTRIES)


@each_kind
def test_all_couplings_at_once_are_exact_and_undone_to_the_bit(kind: str) -> None:
    model = tiny.small(kind)
    contract.check_classified(model)
    contract.check_couplings(model, seed=1)


@each_part
def test_every_output_has_the_factor_that_is_told_of_it(kind: str) -> None:
    """Of a plan that moves every channel of every signal, and of one that has an edit of the logits besides."""
    model = tiny.small(kind)
    layout = layout_of(model)
    plan = random_plan(layout, MOVABLE, seed=2)
    contract.check_outputs(model, layout, plan)
    if layout.head is not None and layout.cap(layout.head) is None:
        contract.check_outputs(model, layout, plan.model_copy(update={"exponents": plan.exponents | {LOGITS: -2}}))


@one_of_each
def test_the_norms_eps_goes_with_the_square_of_a_quiet_stream(kind: str) -> None:
    """With a variance not far above eps, the outputs keep their bits with eps·4^r and lose them with eps."""
    model = tiny.build(kind, factor=1e-3)
    layout, before = layout_of(model), outputs(model)
    apply(model, layout, random_plan(layout, (Kind.RESIDUAL,)))
    assert all(torch.equal(a, b) for a, b in zip(before, outputs(model), strict=True))
    norms: list[Any] = [model.get_submodule(path) for path in layout.norms]
    assert {getattr(norm, eps_attribute(norm)) for norm in norms} == {layout.eps * 4.0**-4}
    for norm in norms:
        setattr(norm, eps_attribute(norm), layout.eps)
    assert not torch.equal(before[0], outputs(model)[0])


@pytest.mark.parametrize("kind", exhaustive.beyond(exhaustive.of_today(tiny.SEARCHED, 6), tiny.KINDS))
def test_every_axis_matters(kind: str) -> None:
    """Leaving out any one declared axis changes the outputs, so a wrong declaration cannot pass the tests above."""
    few = tiny.few_layers(kind)
    normed = any(getattr(w, "post_norm", "") for w in layout_of(tiny.build(kind, **few)).topology)
    model = tiny.build(kind, factor=1e-3, **few) if normed else tiny.build(kind, **few)
    layout, before = layout_of(model), outputs(model)
    plan = random_plan(layout, MOVABLE, seed=2)
    weights, moved = model.state_dict(), apply(deepcopy(model), layout, plan)
    for name, tensor in layout.tensors.items():
        if name == layout.family.embedding and set(layout.family.copies) & set(layout.tensors):
            continue  # what is read are its copies
        for position, axis in enumerate(tensor.axes):
            if all(layout.signals[each.signal].kind.has_price for each in carried_by(axis)):
                continue
            axes = tuple(None if p == position else a for p, a in enumerate(tensor.axes))
            stored = moved.state_dict()[name]
            right = stored.clone()
            stored.copy_(weights[name])
            scale(stored, exponents_of(replace(tensor, axes=axes), plan).full(tensor.shape), tensor.offset)
            after = outputs(moved)
            assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), (name, position)
            stored.copy_(right)
    assert all(torch.equal(a, b) for a, b in zip(before, outputs(moved), strict=True))


@one_of_each
def test_a_tensor_that_is_missing_not_declared_or_of_another_shape_is_named(kind: str) -> None:
    model = tiny.small(kind)
    source, layout = ModelTensors(model), layout_of(model)
    family = layout.family
    # Of another model inside it, stock code alone knows what it consists of.
    inside = {
        n for n in source.tensors if layout.family.projector and n.startswith(f"{layout.family.projector.tower}.")
    }
    for name in set(source.tensors) - inside - {family.head, *family.copies} - may_be_absent(family):
        others = {family.head, *family.copies} if name == family.embedding else set()
        without = ModelTensors(model)
        without.tensors = {k: v for k, v in source.tensors.items() if k != name and k not in others}
        with pytest.raises(UserError, match=name.replace(".", r"\.")):
            resolve(without)
    query = next(f"{w.query}.weight" for w in layout.topology if isinstance(w, Attention))
    misshapen = replace(source.tensors[query], shape=(7, 7))
    for name, tensor in {query: misshapen, "encoder.block.7.surprise.weight": misshapen}.items():
        other = ModelTensors(model)
        other.tensors[name] = tensor
        with pytest.raises(UserError, match=name.replace(".", r"\.")):
            resolve(other)


Examples = Callable[..., None]


@pytest.fixture
def on_examples(pytestconfig: pytest.Config) -> Examples:
    """Return what checks so many drawn architectures of a family, half as many in ``make test``."""
    parts = 1 if pytestconfig.getoption("--exhaustive") else 2
    slow = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    same = settings(deadline=None, derandomize=True, database=None, suppress_health_check=slow)

    def run(entry: tiny.Entry, count: int, check: Callable[[contract.Drawn], None], **options: Any) -> None:
        drawn = given(drawn=contract.architectures(entry, **options))
        settings(same, max_examples=count // parts)(drawn(check))()

    return run


@each_family
def test_all_couplings_are_exact_whatever_the_architecture(entry: tiny.Entry, on_examples: Examples) -> None:
    def check(drawn: contract.Drawn) -> None:
        model = drawn.build()
        contract.check_classified(model)
        contract.check_couplings(model, drawn.seed)

    on_examples(entry, 8, check)


@each_family
def test_no_bound_is_passed(entry: tiny.Entry, on_examples: Examples) -> None:
    factors = (1.0, 2.0**-10, 8.0)
    on_examples(entry, 6, lambda drawn: contract.check_bounds(drawn.build(), drawn.seed), factors=factors)


@pytest.mark.parametrize("entry", exhaustive.beyond(UNDONE, tiny.ENTRIES), ids=lambda entry: next(iter(entry.kinds)))
def test_undo_gives_back_what_was_carried_over(entry: tiny.Entry, on_examples: Examples) -> None:
    on_examples(entry, 4, lambda drawn: contract.check_round_trip(drawn.build(), drawn.dtype), factors=(1.0, 900.0))


HEADLESS = {"embeddinggemma", "mistral", "seed_oss-biased"}
HEADLESS |= {kind for kind in tiny.KINDS if kind.endswith(("-encoder", "-states", "vl_text"))}
FEW = {*tiny.CORE, "gelu", "t5-classifier", "t5-spans", "gemma3-untied", "llama-biased", "mbart"}
each_priced = pytest.mark.parametrize("kind", exhaustive.beyond(FEW, tiny.KINDS))
each_with_logits = pytest.mark.parametrize(
    "kind", exhaustive.beyond(FEW, [kind for kind in tiny.KINDS if kind not in HEADLESS])
)


def model_of(kind: str) -> tuple[Any, Layout]:
    """Return a kind's model with a bias of logits where it has one, in eager attention, and its layout."""
    own: dict[str, Any] = {"activation_function": "gelu"} if kind in ("pegasus", "mbart", "bigbird_pegasus") else {}
    model = tiny.small(kind, factor=1.0, **own)
    model.set_attn_implementation("eager")
    layout = layout_of(model)
    assert (LOGITS in layout.signals) == (kind not in HEADLESS)
    if layout.family.logits_bias in layout.tensors:
        model.get_buffer(layout.family.logits_bias).normal_()
    return model, layout


def check_every_axis(kind: str, check: Check, values: Callable[[Any, Layout], Values], of: Kind) -> None:
    """A model passes a check of its exponents, beside the values before, and with any axis left out it does not."""
    model, layout = model_of(kind)
    before = values(model, layout)
    check(model, layout, before)
    axes, state = [*left_out(layout, of)], {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert axes
    for what, wrong in axes:
        with pytest.raises(AssertionError):
            check(model, wrong, before)
            pytest.fail(what)
        model.load_state_dict(state)


@each_priced
def test_exponents_before_a_homogeneous_function_move_what_they_say_and_nothing_else(kind: str) -> None:
    """Pre-activations of gates and plain neurons, scores of every head, a classifier's dense: each axis counts."""
    check_every_axis(kind, check_asymptotic, values_at_sites, Kind.ASYMPTOTIC)


@each_with_logits
def test_exponents_of_logits_multiply_them_exactly_before_a_soft_cap(kind: str) -> None:
    check_every_axis(kind, check_logits, logits_of, Kind.LOGITS)
