"""Perturb the couplings and the bounds one at a time, and show that the checks of the tests notice every one.

    python benchmarks/mutation.py

A coupling is perturbed in the resolved layout: an axis left out, its sign turned, its signal given to the other axis;
the norms' eps scaled by 2^r in place of 4^r. A bound is perturbed in the text of one function of the certificate, which
is compiled again and put in its place: a rounding, a bias or a head left out, a row's bound made a tenth smaller. Then
the checks run that the tests run (``tests/contract.py``, ``tests/test_certificate.py``). Exits with 1 where a mutant
survives.
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
    (certified.test_partial_sums_of_any_split_stay_under_their_bound, (3,)),
    (certified.test_dropout_multiplies_the_bounds_in_train_mode, ()),
    (certified.test_the_norm_safe_bound_covers_the_length_of_the_stream, ("t5",)),
    (certified.test_the_rounding_of_a_long_row_of_attention_weights_is_covered, ()),
    (certified.test_the_length_enters_the_bound, ()),
    (certified.test_no_model_input_passes_a_bound_and_every_audited_site_has_one, ("t5",)),
    (certified.test_no_model_input_passes_a_bound_and_every_audited_site_has_one, ("pegasus",)),
    (certified.test_without_the_additive_rounding_terms_the_bound_would_be_unsound, (None,)),
    (certified.test_no_adversarial_input_passes_a_bound_in_fp32_or_fp16, ("t5",)),
    (certified.test_a_rows_own_eigenvalue_is_tighter_and_still_sound, ()),
)
"""Tests of the certificate that a mutant meets where no model shows it."""

W, A, N = bounds._Walk, bounds.Arithmetic, bounds.Normalised

MUTANTS: tuple[tuple[str, Any, str, str], ...] = (
    ("a linear's bias left out", bounds.image, "centre + bias.double(), bias", "centre, bias"),
    ("a norm's shift left out", bounds.image, "if source.shift is not None", "if False"),
    ("a linear's row bound a tenth smaller", bounds.image, "norms = source.radius *", "norms = 0.9 * source.radius *"),
    ("a linear's column gain left out", bounds.image, "matrix = weight * source.gain.to(dtype)", "matrix = weight"),
    (
        "all roundings of a linear left out",
        bounds.image,
        "error = error + 2 * arithmetic.unit * (exact + error) + arithmetic.floor",
        "error = 0 * error",
    ),
    ("partial sums without their bias and rounding", bounds.image, "spread + added + error)", "0.5 * spread)"),
    ("the roundings of a linear's inputs left out", bounds.image, "computed + incoming +", "computed +"),
    ("the floor of subnormals left out of a linear", bounds.image, "+ arithmetic.floor", ""),
    ("the roundings of what attention gathers left out", W.summed, "return values *", "return values + 0 * values *"),
    ("a radius of √(d−1)", W.norm, "radius = math.sqrt(width)", "radius = math.sqrt(width - 1)"),
    ("a norm's bound a tenth smaller", N.bound.fget, "return (", "return 0.9 * ("),
    ("a sublayer not added to the stream", W.add, "self.rounded(self.stream + branch)", "self.rounded(self.stream)"),
    ("the stream's length without its sublayer", W.add, "(self.stream_norm + length)", "(self.stream_norm)"),
    ("positions not added to the embedding", W.begin, "self.rounded(amax + extra)", "self.rounded(amax)"),
    ("the embedding's √d left out", W.begin, "amax * math.sqrt(width)), square", "amax), square"),
    ("the context a tenth smaller", W.attention, "self.summed(values.bound *", "self.summed(0.9 * values.bound *"),
    (
        "the length of rows left out",
        A.attention_sum.fget,
        "(self.max_length + 8) * UNIT32) + self.max_length * TINY",
        "UNIT32)",
    ),
    ("dropout's factor left out", W.kept, "return (1 - rate) / (1 + UNIT) if rate else 1.0", "return 1.0"),
    ("negative activations left out", bounds._Plain.__init__, "LOWEST[activation]", "0 * LOWEST[activation]"),
)


def caught_by(made: list[tuple[Any, Arithmetic, Seen]]) -> str:
    """Return what notices the mutant that is in place, "" where nothing does."""
    for model, arithmetic, seen in made:
        _, certificate = certified.certified(model, arithmetic)
        wrong = certified.broken(certificate, seen, certified.FREE)
        if wrong:
            return f"`{wrong[0].split(':')[0].split('.')[-1]}` passed its bound"
    for test, arguments in TESTS:
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
        print(f"| {what} | {noticed or '**nothing**'} |", flush=True)
        survivors += [] if noticed else [what]
    print("\n".join(["", *(f"survived: {name}" for name in survivors)]))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
