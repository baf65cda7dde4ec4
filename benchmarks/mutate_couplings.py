"""Declare couplings wrongly, one at a time, and show that the families' contract notices every one.

    python benchmarks/mutate_couplings.py

Perturbed is the resolved layout: an axis left out, its sign turned, its signal given to the other axis, a whole tensor
left out; or the norms' eps scaled by 2^r in place of 4^r. What only exponents with a price move is left out: these
change the function, and tests/rescaling/test_edits.py holds them to their bounds. Exits with 1 where a mutant survives.
"""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from support import contract, tiny

from bf16_to_fp16.errors import UserError
from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.families.types import RESIDUAL, Axis, carried_by, divided_by, multiplied_by
from bf16_to_fp16.rescaling.apply import apply

KINDS = ("t5", "gated", "gelu", "umt5", "pegasus", "t5-encoder")

CAUGHT = (AssertionError, UserError, RuntimeError, ValueError)
"""The couplings' check fails, or the plan is refused because it does not fit."""


def noticed(model: Any, layout: Layout) -> bool:
    """Return whether the couplings' check notices that a layout is wrong."""
    try:
        contract.check_couplings(copy.deepcopy(model), 1, layout)
    except CAUGHT:
        return True
    return False


def turned(axis: Axis) -> Axis:
    """Return an axis with the other sign."""
    return divided_by(axis.signal) if axis.sign > 0 else multiplied_by(axis.signal)


def is_exact(layout: Layout, axis: Axis | None) -> bool:
    """Return whether an axis carries anything that moves without a price."""
    return any(not layout.signals[each.signal].kind.has_price for each in carried_by(axis))


def perturbed(layout: Layout) -> Iterator[tuple[str, str, Layout]]:
    """Yield (what, tensor, layout) with one axis of one tensor declared wrongly, for each tensor of a layer once."""
    seen = set()
    for name, tensor in layout.tensors.items():
        template = re.sub(r"\.\d+\.layer\.", ".N.layer.", re.sub(r"layers\.\d+\.", "layers.N.", name))
        if template in seen:
            continue
        seen.add(template)
        for position, axis in enumerate(tensor.axes):
            if axis is None or not is_exact(layout, axis):
                continue
            ways = {
                "axis left out": (*tensor.axes[:position], None, *tensor.axes[position + 1 :]),
                "sign turned": (*tensor.axes[:position], turned(axis), *tensor.axes[position + 1 :]),
            }
            # The residual stream has one exponent for all channels, on whichever axis.
            moved = [a for a in tensor.axes if a is not None and is_exact(layout, a) and a.signal != RESIDUAL]
            if len(tensor.axes) == 2 and moved and axis == next(a for a in tensor.axes if a is not None):
                ways["axes exchanged"] = tensor.axes[::-1]
            for what, axes in ways.items():
                yield what, template, replace(layout, tensors={**layout.tensors, name: replace(tensor, axes=axes)})


def couplings() -> dict[str, list[tuple[str, bool]]]:
    """Return for each way of perturbing a declaration the tensors and whether each was noticed."""
    found: dict[str, list[tuple[str, bool]]] = {}
    for kind in KINDS:
        model = tiny.build(kind)
        layout = contract.layout_of(model)
        contract.check_couplings(copy.deepcopy(model), 1)  # the control
        for what, name, wrong in perturbed(layout):
            found.setdefault(what, []).append((f"{kind}: {name}", noticed(model, wrong)))
        for name in sorted(layout.tensors)[:: max(1, len(layout.tensors) // 6)]:
            if any(is_exact(layout, axis) for axis in layout.tensors[name].axes):
                wrong = replace(layout, tensors={k: v for k, v in layout.tensors.items() if k != name})
                found.setdefault("tensor left out", []).append((f"{kind}: {name}", noticed(model, wrong)))
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


def main() -> int:
    """Perturb and print the table."""
    torch.set_num_threads(1)
    survivors = []
    print("| coupling | mutants | noticed |\n|---|---|---|")
    for what, found in (couplings() | {"eps scaled by 2^r": wrong_eps()}).items():
        print(f"| {what} | {len(found)} | {sum(seen for _, seen in found)} |", flush=True)
        survivors += [f"{what}: {name}" for name, seen in found if not seen]
    print("\n".join(["", *(f"survived: {name}" for name in survivors)]))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
