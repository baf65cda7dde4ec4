"""Signals whose exponents have a price: every family declares on which axes they stand, and none too few."""

from collections.abc import Callable
from typing import Any

import pytest
from support import exhaustive, tiny
from support.contract import layout_of
from support.priced import Check, Values, check_asymptotic, check_logits, left_out, logits_of, values_at_sites

from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.families.signals import LOGITS, Kind

HEADLESS = {"embeddinggemma", "mistral", "seed_oss-biased"}
HEADLESS |= {kind for kind in tiny.KINDS if kind.endswith(("-encoder", "-states", "vl_text"))}
FEW = {*tiny.CORE, "gelu", "t5-classifier", "t5-spans", "gemma3-untied", "llama-biased", "mbart"}
each_kind = pytest.mark.parametrize("kind", exhaustive.beyond(FEW, tiny.KINDS))
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


@each_kind
def test_exponents_before_a_homogeneous_function_move_what_they_say_and_nothing_else(kind: str) -> None:
    """Pre-activations of gates and plain neurons, scores of every head, a classifier's dense: each axis counts."""
    check_every_axis(kind, check_asymptotic, values_at_sites, Kind.ASYMPTOTIC)


@each_with_logits
def test_exponents_of_logits_multiply_them_exactly_before_a_soft_cap(kind: str) -> None:
    check_every_axis(kind, check_logits, logits_of, Kind.LOGITS)
