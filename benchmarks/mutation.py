"""Perturb the couplings and the bounds one at a time, and show that the checks of the tests notice every one.

    python benchmarks/mutation.py

A coupling is perturbed in the resolved layout: an axis left out, its sign turned, its signal given to the other axis;
the norms' eps scaled by 2^r in place of 4^r. A bound is perturbed in the text of one function of the certificate, which
is compiled again and put in its place: a rounding, a bias or a head left out, a row's bound made a tenth smaller. Then
the checks run that the tests run (``tests/contract.py``, ``tests/test_certificate.py``). Exits with 1 where a mutant
survives that ``COVERED`` does not show to be covered by another allowance.
"""

from __future__ import annotations

import copy
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import contract
import test_certificate as certified
import tiny
import torch
from adversary import adverse_inputs, observe

from bf16_to_fp16 import certificate as bounds
from bf16_to_fp16.certificate import Arithmetic
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.families import Layout
from bf16_to_fp16.families.types import RESIDUAL
from bf16_to_fp16.rescaling import apply

KINDS = ("t5", "gated", "gelu", "umt5", "pegasus", "t5-encoder")

EPS = (1e-5, 1e-12)

CAUGHT = (AssertionError, UserError, RuntimeError, ValueError)
"""A check that fails, or a plan that is refused because it does not fit."""


def fails(check: Callable[[], object]) -> bool:
    """Return whether a check notices something."""
    try:
        check()
    except CAUGHT:
        return True
    return False


# --- couplings -------------------------------------------------------------------------------------------------------


def perturbed(layout: Layout) -> Iterator[tuple[str, str, Layout]]:
    """Yield (what, tensor, layout) with one axis of one tensor declared wrongly, for each tensor of a layer once."""
    seen = set()
    for name, tensor in layout.tensors.items():
        template = re.sub(r"\.\d+\.layer\.", ".N.layer.", re.sub(r"layers\.\d+\.", "layers.N.", name))
        if template in seen:
            continue
        seen.add(template)
        for position, axis in enumerate(tensor.axes):
            if axis is None:
                continue
            ways = {
                "axis left out": (*tensor.axes[:position], None, *tensor.axes[position + 1 :]),
                "sign turned": (*tensor.axes[:position], (-axis[0], axis[1]), *tensor.axes[position + 1 :]),
            }
            # The residual stream has one exponent for all channels, on whichever axis.
            moved = [a for a in tensor.axes if a is not None and a[1] != RESIDUAL]
            if len(tensor.axes) == 2 and moved and axis == next(a for a in tensor.axes if a is not None):
                ways["axes exchanged"] = tensor.axes[::-1]
            for what, axes in ways.items():
                yield what, template, replace(layout, tensors={**layout.tensors, name: replace(tensor, axes=axes)})


def couplings() -> dict[str, list[tuple[str, bool]]]:
    """Return for each way of perturbing a declaration the tensors and whether each was noticed."""
    found: dict[str, list[tuple[str, bool]]] = {}
    for kind in KINDS:
        model = tiny.build(kind)
        contract.check_couplings(copy.deepcopy(model), 1)  # the control
        layout = contract.layout_of(model)
        for what, name, wrong in perturbed(layout):
            changed = copy.deepcopy(model)
            noticed = fails(lambda changed=changed, wrong=wrong: contract.check_couplings(changed, 1, wrong))  # type: ignore[misc]
            found.setdefault(what, []).append((f"{kind}: {name}", noticed))
        for name in sorted(layout.tensors)[:: max(1, len(layout.tensors) // 6)]:
            rest = {k: v for k, v in layout.tensors.items() if k != name}
            changed, wrong = copy.deepcopy(model), replace(layout, tensors=rest)
            moved = any(axis is not None for axis in layout.tensors[name].axes)
            if moved:
                noticed = fails(lambda changed=changed, wrong=wrong: contract.check_couplings(changed, 1, wrong))  # type: ignore[misc]
                found.setdefault("tensor left out", []).append((f"{kind}: {name}", noticed))
    return found


def wrong_eps() -> list[tuple[str, bool]]:
    """Scale the norms' eps by 2^r and return for each kind whether the outputs of a quiet stream show it."""
    found = []
    for kind in KINDS:
        model = tiny.build(kind, factor=1e-3)
        layout = contract.layout_of(model)
        before = contract.outputs(model)
        plan = contract.random_plan(layout, contract.MOVABLE, 1)
        apply(model, layout, plan)
        right = all(torch.equal(a, b) for a, b in zip(before, contract.outputs(model), strict=True))
        for path in layout.norms:
            norm: Any = model.get_submodule(path)
            attribute = "eps" if hasattr(norm, "eps") else "variance_epsilon"
            setattr(norm, attribute, getattr(norm, attribute) * 2.0**-plan.residual_exponent)
        after = contract.outputs(model)
        found.append((kind, right and not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))))
    return found


# --- bounds ----------------------------------------------------------------------------------------------------------


@contextmanager
def rewritten(function: Any, old: str, new: str) -> Iterator[None]:
    """Put other text in place of ``old``, which stands once in a function, for the length of the block."""
    text = textwrap.dedent(inspect.getsource(function))
    if text.count(old) != 1:
        raise LookupError(f"{function.__qualname__} has {old!r} {text.count(old)} times")
    text = text[text.index("def ") :]  # a property's decorator would hide the function
    space = dict(function.__globals__)
    exec(compile(text.replace(old, new), "<mutant>", "exec", flags=0x1000000), space)  # annotations stay text
    before = function.__code__
    function.__code__ = space[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = before


Seen = dict[str, float]


def cases() -> list[tuple[Any, Arithmetic, Seen]]:
    """Return models, arithmetics and what an adversary makes of every site: fp16 and, in exact arithmetic, fp32."""
    made = []
    for kind in ("t5", "gated", "gelu", "umt5", "pegasus"):
        for seed, factor in ((1, 1.0), (2, 0.02)):
            half = tiny.build(kind, seed, factor=factor).half()
            half = certified.scaled(half, seed, 12) if seed == 2 else half
            layout = contract.layout_of(half)
            wide = copy.deepcopy(half).float()
            inputs = adverse_inputs(wide, layout, 48, seed)
            made.append((half, Arithmetic(), observe(half, layout, inputs)))
            if seed == 1:
                seen = {name: amax * (1 - 1e-4) for name, amax in observe(wide, layout, inputs).items()}
                made.append((wide, Arithmetic(exact=True), seen))
    half = certified.cancelling()
    layout = contract.layout_of(half)
    inputs = adverse_inputs(copy.deepcopy(half).float(), layout, 128, 0)
    made.append((half, Arithmetic(), observe(half, layout, inputs)))
    return made


TESTS: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (certified.test_the_roundings_of_a_norm_need_their_allowance, ()),
    (certified.test_the_roundings_of_a_linears_inputs_need_their_allowance, ()),
    *((certified.test_inputs_that_are_subnormal_need_their_allowance, (kind,)) for kind in ("t5", "gated")),
    (certified.test_results_that_are_subnormal_need_their_allowance, ()),
    (certified.test_the_partial_sums_of_a_linear_need_their_allowance, ()),
    (certified.test_long_sums_in_fp32_need_their_allowance, ()),
    (certified.test_the_two_roundings_of_a_products_result_need_their_allowance, ()),
    *(
        (certified.test_rows_of_attention_weights_need_their_allowance, case)
        for case in ((64, 63, 2.0**-6 * (1 + 1.01 * bounds.UNIT)), (1 << 17, 130411, 128.52 * 2.0**-24))
    ),
    *(
        (certified.test_what_fp32_loses_of_a_long_row_of_attention_needs_its_allowance, case)
        for case in ((1 << 17, 0.495), (117440, 4.49))
    ),
    (certified.test_a_norm_that_is_multiplied_once_more_needs_its_allowance, ()),
    (certified.test_one_more_rounding_needs_its_allowance, ()),
    (certified.test_a_layer_norms_subnormals_need_their_allowance, ()),
    *(
        (certified.test_roundings_that_all_go_up_stay_under_the_bounds_and_come_close, (kind, small))
        for kind in KINDS[:-1]
        for small in (False, True)
    ),
    *((certified.test_the_streams_roundings_need_their_allowance, (kind,)) for kind in ("t5", "pegasus")),
    *((certified.test_activations_below_zero_need_their_allowance, (name,)) for name in ("gelu", "gelu_new", "silu")),
    (certified.test_scores_that_cancel_need_their_roundings, ()),
    *((certified.test_a_model_whose_rows_point_one_way_reaches_every_bound, (kind,)) for kind in KINDS),
    (certified.test_one_heads_products_reach_the_bounds_of_two_matrices_at_once, ()),
    *(
        (certified.test_neurons_that_share_an_inputs_length_reach_the_feed_forwards_bound, case)
        for case in (("t5", False), ("t5", True), ("gated", False))
    ),
    *((certified.test_dropout_that_keeps_everything_reaches_every_bound, (k,)) for k in ("t5", "gated", "pegasus")),
    (certified.test_without_the_additive_rounding_terms_the_bound_would_be_unsound, ()),
    (certified.test_the_norm_safe_bound_covers_the_length_of_the_stream, ("t5",)),
    (certified.test_the_rounding_of_a_long_row_of_attention_weights_is_covered, ()),
    (certified.test_the_length_enters_the_bound, ()),
    (certified.test_activations_stay_where_the_bounds_need_them, ()),
    *((certified.test_layer_norms_outputs_stay_in_the_ball_however_near_constant_their_inputs_are, (e,)) for e in EPS),
    (certified.test_partial_sums_of_any_split_stay_under_their_bound, (3,)),
    (certified.test_a_rows_own_eigenvalue_is_tighter_and_still_sound, ()),
)
"""Quick tests of the certificate, which a mutant meets first."""

SLOW_TESTS: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (certified.test_dropout_multiplies_the_bounds_in_train_mode, ()),
    (certified.test_no_model_input_passes_a_bound_and_every_audited_site_has_one, ("t5",)),
    (certified.test_no_model_input_passes_a_bound_and_every_audited_site_has_one, ("pegasus",)),
    (certified.test_no_adversarial_input_passes_a_bound_in_fp32_or_fp16, ("t5",)),
    (certified.test_no_adversarial_input_passes_a_bound_in_fp32_or_fp16, ("gated",)),
    (certified.test_no_adversarial_input_passes_a_bound_in_fp32_or_fp16, ("pegasus",)),
)
"""Tests that only mutants meet which neither a quick test nor a model has shown."""

W, A, N = bounds._Walk, bounds.Arithmetic, bounds.Normalised
G, P = bounds._Gated, bounds._Plain

MUTANTS: tuple[tuple[str, Any, str, str], ...] = (
    # Too small: the value itself.
    ("a linear's bias left out", bounds.image, "centre + bias.double(), bias", "centre, bias"),
    ("a norm's shift left out", bounds.image, "if source.shift is not None", "if False"),
    ("a linear's row bound a tenth smaller", bounds.image, "norms = source.radius *", "norms = 0.9 * source.radius *"),
    ("a linear's column gain left out", bounds.image, "matrix = weight * source.gain.to(dtype)", "matrix = weight"),
    ("a radius of √(d−1)", W.norm, "radius = math.sqrt(width)", "radius = math.sqrt(width - 1)"),
    ("a norm's bound a tenth smaller", N.bound.fget, "return (", "return 0.9 * ("),
    ("a sublayer not added to the stream", W.add, "self.rounded(self.stream + branch)", "self.rounded(self.stream)"),
    ("the stream's length without its sublayer", W.add, "(self.stream_norm + length)", "(self.stream_norm)"),
    ("positions not added to the embedding", W.begin, "self.rounded(amax + extra)", "self.rounded(amax)"),
    ("the embedding's √d left out", W.begin, "amax * math.sqrt(width)), square", "amax), square"),
    ("a head left out of the scores", W.score, "for h in range(heads)", "for h in range(heads - 1)"),
    ("the position bias left out of the scores", W.score, "self.rounded(scaled + offset)", "self.rounded(scaled)"),
    ("the context a tenth smaller", W.attention, "self.summed(values.bound *", "self.summed(0.9 * values.bound *"),
    ("a head left out of the attention's output", W.attended, "for h in range(heads)", "for h in range(1, heads)"),
    ("the bias of the attention's output left out", W.attended, "signed.abs() + error", "error"),
    ("the values' bias left out behind the output", W.attended, "(o @ values.centre[part]).abs())", "0)"),
    ("a gate's product a tenth smaller", G.__init__, "scale = gate.norms *", "scale = 0.9 * gate.norms *"),
    ("a product's sign taken for positive", G.__init__, "(1 + self.cosine.abs()) / 2", "(1 + self.cosine) / 2"),
    (
        "half the gated neurons at their maximum",
        G.__init__,
        "largest_eigenvalue(both) / 2",
        "largest_eigenvalue(both) / 4",
    ),
    (
        "half the plain neurons at their maximum",
        P.__init__,
        "gram(made.unit_rows())) *",
        "gram(made.unit_rows())) / 2 *",
    ),
    ("a plain neuron's bias left out", P.__init__, "self.offset = made", "self.offset = 0 * made"),
    ("negative activations left out", P.__init__, "LOWEST[activation]", "0 * LOWEST[activation]"),
    ("negative activations left out of sums", P.__init__, "self.depth = self.lowest", "self.depth = 0 * self.lowest"),
    ("the feed-forward's bias left out", W.projected, "* COMPUTED + extra", "* COMPUTED"),
    ("the logits' bias left out", W.head, "self.rounded(bound + offset)", "self.rounded(bound)"),
    ("the head's factor left out", W.head, "final.scaled(scale, self.arithmetic)", "final"),
    ("dropout's factor left out", W.kept, "return (1 - rate) / (1 + UNIT) if rate else 1.0", "return 1.0"),
    ("dropout left out of a stack's end", W.run, "final.scaled(1 / keep, self.arithmetic)", "final"),
    ("dropout left out of attention", W.attention, "total = total / keep *", "total = total *"),
    ("dropout left out of the stream", W.add, "self.rounded(branch / keep)", "self.rounded(branch)"),
    ("dropout left out of gated neurons", G.__init__, "self.size = scale / keep", "self.size = scale"),
    ("dropout left out of plain neurons", P.__init__, "self.size = made.norms / keep", "self.size = made.norms"),
    # Too small: what arithmetic adds.
    (
        "all roundings of a linear left out",
        bounds.image,
        "error = error + 2 * arithmetic.unit * (exact + error) + arithmetic.floor",
        "error = 0 * error",
    ),
    ("the roundings of a linear's inputs left out", bounds.image, "computed + incoming +", "computed +"),
    ("their relative part left out", bounds.image, "source.relative * spread + ", ""),
    ("their subnormal part left out", bounds.image, "+ magnitudes(weight, source.absolute) * COMPUTED", ""),
    ("the rounding of a linear's result left out", bounds.image, "2 * arithmetic.unit * (exact + error) +", ""),
    ("the floor of subnormals left out of a linear", bounds.image, "+ arithmetic.floor", ""),
    ("partial sums without their bias and rounding", bounds.image, "spread + added + error)", "0.5 * spread)"),
    ("the splits of a sum left out", A.gamma, "+ self.splits * UNIT", ""),
    ("the length of a sum in fp32 left out", A.gamma, "(terms + 2) * UNIT32 +", ""),
    ("one of a norm's two roundings left out", W.norm, "2 * a.unit + a.unit**2", "a.unit"),
    ("subnormals left out of a norm", W.norm, "a.tiny * (gain.abs() * (1 + a.unit) + 1)", "0 * gain"),
    ("fp32's deviations left out of a LayerNorm", bounds.lengthened, "4 * off * off", "0 * off"),
    ("the roundings of what attention gathers left out", W.summed, "return values *", "return values + 0 * values *"),
    (
        "one of a result's two roundings left out",
        W.summed,
        "(1 + self.arithmetic.unit) ** 2",
        "(1 + self.arithmetic.unit)",
    ),
    (
        "the length of rows left out",
        A.attention_sum.fget,
        "(self.max_length + 8) * UNIT32) + self.max_length * TINY",
        "UNIT32)",
    ),
    ("the rounding of attention weights left out", A.attention_sum.fget, "(1 + UNIT) *", "1.0 *"),
    ("what fp32 loses of a row left out", A.attention_sum.fget, "(self.max_length + 8) * UNIT32", "UNIT32"),
    (
        "a factor's rounding left out of a norm",
        N.scaled,
        "(1 + arithmetic.unit) + arithmetic.unit,",
        "(1 + arithmetic.unit),",
    ),
    (
        "subnormals left out of a norm's factor",
        N.scaled,
        "(1 + arithmetic.unit) + arithmetic.tiny",
        "(1 + arithmetic.unit)",
    ),
    ("a norm's subnormals left out of its factor", N.scaled, "self.absolute * factor *", "0 * self.absolute *"),
    ("a norm's bound without subnormals", N.bound.fget, "+ self.absolute) *", ") *"),
    ("one more rounding left out", W.rounded, "values * (1 + self.arithmetic.unit)", "values"),
    ("subnormals left out of one more rounding", W.rounded, "+ self.arithmetic.tiny", ""),
    ("one more rounding left out of a length", W.longer, "length * (1 + self.arithmetic.unit)", "length"),
    ("subnormals left out of a length", W.longer, "+ self.arithmetic.tiny * math.sqrt(width)", ""),
    ("the floor of subnormals left out of a result", W.summed, "+ self.arithmetic.floor", ""),
    (
        "the rounding of the embedding's √d left out",
        W.begin,
        "self.rounded(amax * math.sqrt(width))",
        "amax * math.sqrt(width)",
    ),
    ("the rounding of positions left out", W.begin, "self.rounded(amax + extra)", "(amax + extra)"),
    ("the rounding of the stream left out", W.add, "self.rounded(self.stream + branch)", "(self.stream + branch)"),
    ("the rounding of dropout's factor left out", W.kept, "(1 - rate) / (1 + UNIT)", "(1 - rate)"),
    ("subnormals left out of a LayerNorm", W.norm, "torch.full_like(gain, 2 * a.tiny)", "torch.zeros_like(gain)"),
    ("the bare norm's rounding left out", W.norm, "radius * (1 + UNIT)", "radius"),
    ("the sum's rounding left out of scores", W.score, "rounding = a.gamma(size) * partial", "rounding = 0 * partial"),
    ("the sum's rounding left out of the context", W.attention, "* total * (1 + gamma))", "* total)"),
    (
        "the context's rounding left out behind the output",
        W.attended,
        "rounding = (1 + gamma) * (1 + a.unit) ** 2 - 1",
        "rounding = 0",
    ),
    ("the context's subnormals left out behind the output", W.attended, "values.bound + a.floor", "values.bound"),
    (
        "the output's sum's rounding left out",
        W.attended,
        "* COMPUTED + a.gamma(weight.shape[1]) * partial",
        "* COMPUTED",
    ),
    ("the feed-forward's sum's rounding left out", W.projected, "summed * (1 + a.gamma(weight.shape[1]))", "summed"),
    (
        "a gate's and a product's rounding left out",
        G.__init__,
        "factor = (1 + 2 * a.unit) * (1 + a.unit) - 1",
        "factor = 0.0",
    ),
    (
        "the errors of a gate's two sides left out",
        G.__init__,
        "(product + off) * (1 + factor) + absolute",
        "product * (1 + factor) + absolute",
    ),
    ("a plain activation's rounding left out", P.__init__, "else 2 * a.unit", "else 0.0"),
    ("subnormals left out of a row of attention weights", A.attention_sum.fget, "+ self.max_length * TINY", ""),
    ("all errors of scores left out", W.score, "exact * COMPUTED + error + rounding", "exact * COMPUTED"),
    (
        "the errors of queries and keys left out",
        W.score,
        "exact * COMPUTED + error + rounding",
        "exact * COMPUTED + rounding",
    ),
    ("the values' errors left out behind the output", W.attended, "total * values.error + total", "total"),
    (
        "all errors left out behind the output",
        W.attended,
        "error = against(magnitude, off) * COMPUTED + a.gamma(weight.shape[1]) * partial",
        "error = 0 * partial",
    ),
    ("the neurons' errors left out", W.projected, "(exact + off) * COMPUTED", "exact * COMPUTED"),
    # Too large.
    ("a linear's row bound a tenth larger", bounds.image, "norms = source.radius *", "norms = 1.1 * source.radius *"),
    ("scores a tenth larger", W.score, "exact[h] = crossed", "exact[h] = 1.1 * crossed"),
    ("the attention's output a tenth larger", W.attended, "exact += total *", "exact += 1.1 * total *"),
    ("the context a tenth larger", W.attention, "self.summed(values.bound *", "self.summed(1.1 * values.bound *"),
    ("a gate's product a tenth larger", G.__init__, "product = scale *", "product = 1.1 * scale *"),
    (
        "twice the gated neurons at their maximum",
        G.__init__,
        "largest_eigenvalue(both) / 2",
        "largest_eigenvalue(both) / 1",
    ),
    (
        "twice the plain neurons at their maximum",
        P.__init__,
        "gram(made.unit_rows())) *",
        "gram(made.unit_rows())) * 2 *",
    ),
    (
        "plain neurons counted without their mean",
        P.side,
        "half = (straight[at : at + len(part)] + self.product_error(values) + ball) / 2",
        "half = ball",
    ),
    ("a stream that grows a tenth too fast", W.add, "self.stream + branch", "self.stream + 1.1 * branch"),
)


COVERED = {
    "a gate's and a product's rounding left out": "covered: an activation of an fp16 number x rounds to at most x, and"
    " each of the two linears is allowed a unit more than inputs, sum and result round by (no gated family has biases)",
    "a plain activation's rounding left out": "covered: an activation of an fp16 number x rounds to at most x, and near"
    " its least value the linear's own error, two units of |x| and more, is larger than what the rounding adds",
}
"""Mutants that stay above what arithmetic does, because another allowance covers what they leave out, and why."""


def caught_by(made: list[tuple[Any, Arithmetic, Seen]]) -> str:
    """Return what notices the mutant that is in place, "" where nothing does."""
    for test, arguments in TESTS:
        if fails(lambda test=test, arguments=arguments: test(*arguments)):  # type: ignore[misc]
            return f"`{test.__name__}`"
    for model, arithmetic, seen in made:
        _, certificate = certified.certified(model, arithmetic)
        wrong = certified.broken(certificate, seen, certified.FREE)
        if wrong:
            return f"`{wrong[0].split(':')[0].split('.')[-1]}` passed its bound"
    for test, arguments in SLOW_TESTS:
        if fails(lambda test=test, arguments=arguments: test(*arguments)):  # type: ignore[misc]
            return f"`{test.__name__}`"
    return ""


def main() -> int:
    """Perturb and print the tables."""
    torch.set_num_threads(1)
    survivors = []
    print("| coupling | mutants | noticed |\n|---|---|---|")
    for what, found in (couplings() | {"eps scaled by 2^r": wrong_eps()}).items():
        print(f"| {what} | {len(found)} | {sum(noticed for _, noticed in found)} |", flush=True)
        survivors += [f"{what}: {name}" for name, noticed in found if not noticed]
    made = cases()
    control = caught_by(made)
    if control:
        print(f"the checks fail without a mutant: {control}")
        return 1
    print("\n| bound | noticed by |\n|---|---|")
    for what, function, old, new in MUTANTS:
        with rewritten(function, old, new):
            noticed = caught_by(made)
        print(f"| {what} | {noticed or COVERED.get(what, '**nothing**')} |", flush=True)
        survivors += [] if noticed or what in COVERED else [what]
    print("\n".join(["", *(f"survived: {name}" for name in survivors)]))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
