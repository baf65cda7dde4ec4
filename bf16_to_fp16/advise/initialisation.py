"""Initial standard deviations of weights, and how far a checkpoint's weights are from them.

"Transformers without Tears" (Nguyen and Salazar, arXiv:1910.05895) draws with a standard deviation of √(2/(5h)) for a
hidden size h; MT-NLG 530B (Smith et al., arXiv:2201.11990) with √(1/(3h)). A family has the rule of its stock class.

Root mean squares stand for standard deviations, since weights have means near 0; norm gains are compared with 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ..errors import UserError
from ..families.configs import axis_size, default_of, looked_up
from ..families.known import family_of
from ..families.types import Family, Initialisation
from ..progress import Progress
from ..report.screen import console
from ..wording import counted

if TYPE_CHECKING:
    from ..checkpoint.reader import Checkpoint

FAR = 4.0  # times a rule, either way, from which a weight is flagged


def rules_for(hidden: int) -> dict[str, Any]:
    if hidden < 1:
        raise UserError(f"the hidden size is {hidden}; give a positive number")
    return {"hidden_size": hidden, "small": math.sqrt(2 / (5 * hidden)), "megatron": math.sqrt(1 / (3 * hidden))}


def deviation(rules: Initialisation, module: str, length: Callable[[str], int], factor: float) -> float | None:
    """Return a module's initial standard deviation; None without a rule. length: returns the size of a named axis."""
    names = (module, module.rpartition(".")[2])
    drawn = next((d for p, d in rules.modules.items() if any(fnmatchcase(name, p) for name in names)), None)
    if drawn is None:
        return None
    root = math.prod(map(length, drawn.over)) ** -0.5
    return root * factor if drawn.scaled else root


def advise_init(
    source: str | Path, *, subfolder: str | None = None, progress: Progress | bool | None = None
) -> dict[str, Any]:
    """Return the rules for a hidden size, and how far each tensor of a checkpoint is from its family's rule.

    source: folder or Hub id, or a hidden size such as "14336". In ``tensors`` of the result, ``times`` is ``rms`` over
    ``own_rule``, the family's rule. ``far`` is true for a factor of more than 4 either way, and for inf or NaN. Raises
    UserError for a source that cannot be read or is of no known family."""
    text = str(source)
    if text.isdecimal() and not Path(text).exists():
        return {"mode": "init", "source": None, "tensors": [], "far": [], "rules": rules_for(int(text))}
    from .weight_statistics import floating_names, open_weights  # not for a width, which needs no torch

    checkpoint = open_weights(source, subfolder)
    if not checkpoint.config:
        raise UserError(f"{source}: a file alone does not say what its tensors are; give the folder")
    try:
        family = family_of(checkpoint.config)
    except UserError as error:
        raise UserError(f"{checkpoint.source}/{error}") from None
    rows = [beside_rule(checkpoint, family, name) for name in floating_names(checkpoint, progress)]
    return {
        "mode": "init",
        "source": checkpoint.source,
        "family": family.name,
        "rules": rules_for(axis_size(family, checkpoint.config, "model")),
        "tensors": rows,
        "far": [row["name"] for row in rows if row["far"]],
    }


def beside_rule(checkpoint: Checkpoint, family: Family, name: str) -> dict[str, Any]:
    from .weight_statistics import tensor_pieces

    square, elements, broken = 0.0, 0, 0
    for part in tensor_pieces(checkpoint, name):
        finite = part[part.isfinite()]
        square += float(finite.double().square().sum())
        elements += finite.numel()
        broken += part.numel() - finite.numel()
    rms = math.sqrt(square / elements) if elements else 0.0
    module, _, kind = name.rpartition(".")
    rule = None  # biases begin at 0
    if kind == "weight":
        own, length = family.initialisation, partial(axis_size, family, checkpoint.config)
        factor = looked_up(checkpoint.config, own.factor) or default_of(family, own.factor)
        rule = deviation(own, module, length, float(str(factor)))
    times = None if rule is None else rms / rule
    far = broken > 0 or (times is not None and not 1 / FAR <= times <= FAR)
    return {"name": name, "elements": elements + broken, "nonfinite": broken, "rms": rms, "own_rule": rule} | {
        "times": times,
        "far": far,
    }


def print_init(result: Mapping[str, Any]) -> None:
    screen, rules = console(), result["rules"]
    screen.print(
        f"standard deviation at h = {rules['hidden_size']:,}: Transformers without Tears, √(2/(5h)):"
        f" {rules['small']:.3g}; MT-NLG 530B, √(1/(3h)): {rules['megatron']:.3g}"
    )
    if not result["tensors"]:
        return
    rows = Table("tensor", "root mean square", f"times {result['family']}'s own rule", title=result["source"])
    for row in result["tensors"]:
        if row["own_rule"] is not None:
            times = f"{row['times']:,.0f}" if row["times"] >= 99.5 else f"{row['times']:.2g}"
            rows.add_row(row["name"], f"{row['rms']:.3g}", times + " !" * row["far"])
    screen.print(rows)
    far = [row for row in result["tensors"] if row["far"]]
    if not far:
        screen.print(f"all within {FAR:g} times the rule of the family")
    for row in (row for row in far if row["nonfinite"]):
        screen.print(f"inf or NaN in {row['name']}: {counted(row['nonfinite'], 'weight')}", markup=False)
    if any((row["times"] or 0) > FAR for row in far):
        screen.print("Large weights that write the residual stream make it large: bf16-to-fp16 certify says how large.")
