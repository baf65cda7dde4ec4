"""How large weights should begin, and how far a checkpoint's are from that.

Four rules are in use. "Transformers without Tears" (Nguyen and Salazar, arXiv:1910.05895) draws with a standard
deviation of √(2/(5h)) for a hidden size h; MT-NLG 530B (Smith et al., arXiv:2201.11990) with √(1/(3h)); T5 gives every
matrix one over the root of its inputs, queries a further 1/√d_kv (instead of scaling the scores), and embeddings 1;
Pegasus 0.02 everywhere. Training moves weights by factors of a few, so what is several times from its own family's rule
was not drawn by it, has been rescaled, or has grown.

Root mean squares stand for standard deviations: means of weights are near 0, and gains of norms compare with their 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..families.configs import axis_size
from ..families.known import FAMILIES, family_of
from ..families.types import Family, Initialisation
from ..progress import Progress, shown_by
from .configs import FAR, config_alone, judged_config, megatron, small
from .formats import chosen, open_weights, tensor_pieces

if TYPE_CHECKING:
    from ..checkpoint.reader import Checkpoint


def rules_for(hidden: int) -> dict[str, Any]:
    """Return every rule for a hidden size: ``small``, ``megatron``, and by the names of the families one number for
    every matrix, or one each by the kind of matrix.

    Those with heads of 64, as many as fill the hidden size, and four times as many neurons. Raises UserError for a size
    that is not positive.
    """
    if hidden < 1:
        raise UserError(f"the hidden size is {hidden}; give a positive number")
    usual = {"model": hidden, "ff": 4 * hidden, "inner": hidden, "head": 64}
    rules: dict[str, Any] = {"hidden_size": hidden, "small": small(hidden), "megatron": megatron(hidden)}
    for family in FAMILIES:
        own = family.initialisation
        rules[family.name] = (
            {name: deviation(own, name, usual.__getitem__) for name in own.shown} if own.shown else own.default
        )
    return rules


def deviation(
    rules: Initialisation, module: str, length: Callable[[str], int], factor: float | None = None
) -> float | None:
    """Return the standard deviation with which the module at a path begins; None where the rules know none.

    length: gives the number of elements along a named axis. factor: what the config says, by default what stock code
    takes.
    """
    names = (module, module.rpartition(".")[2])
    drawn = next((d for p, d in rules.modules.items() if any(fnmatchcase(name, p) for name in names)), None)
    if drawn is None:
        return None
    root = math.prod(map(length, drawn.over)) ** -0.5
    return root * (rules.default if factor is None else factor) if drawn.scaled else root


def own_rule(family: Family, config: Mapping[str, Any], name: str) -> float | None:
    """Return the root mean square with which a family's stock class begins a tensor; None for zeros and tables."""
    parts = name.split(".")
    module, kind = ".".join(parts[:-1]), parts[-1]
    if kind != "weight":
        return None  # biases begin at 0
    factor = config.get(family.initialisation.factor)
    return deviation(
        family.initialisation, module, partial(axis_size, family, config), float(factor) if factor else None
    )


def advise_init(
    source: str | Path,
    *,
    tensors: Sequence[str] = (),
    subfolder: str | None = None,
    progress: Progress | bool | None = None,
) -> dict[str, Any]:
    """Return the rules for a hidden size or a checkpoint's, and for a checkpoint how far each tensor is from them.

    source: folder or Hub id, a config (a ``.json`` or a folder without weights) of any transformer, or a hidden size
    such as "14336". ``config`` of the result: what ``judged_config`` says, None for a hidden size. tensors: names with
    wildcards, of those to look at. ``tensors`` of the result: name, elements, ``rms``, ``own_rule`` (None where the
    family has none) and how many times it, ``times``, whether that is ``far`` (4 times either way), and ``times_small``
    and ``times_megatron``. Raises UserError for a source that cannot be read or is of no known family.
    """
    text = str(source)
    if text.isdigit() and not Path(text).exists():
        rules, unused = rules_for(int(text)), "subfolder" if subfolder is not None else "tensor" if tensors else None
        if unused is not None:
            raise UserError(f"{text} is a hidden size, of which there is no {unused}; leave out --{unused}")
        return {"mode": "init", "source": None, "rules": rules, "config": None, "tensors": [], "far": []}
    if (alone := config_alone(source)) is not None:
        config, kind = alone
        judged = judged_config(config, text)
        about = {"mode": "init", "source": text, "family": kind, "rules": rules_for(judged["hidden_size"])}
        return about | {"config": judged, "tensors": [], "far": []}
    checkpoint = open_weights(source, subfolder)
    if not checkpoint.config:
        known = ", ".join(family.title for family in FAMILIES)
        raise UserError(f"{source}: a file alone does not say what its tensors are ({known}); give the folder")
    try:
        family = family_of(checkpoint.config)
    except UserError as error:
        raise UserError(f"{checkpoint.source}/{error}") from None
    hidden = axis_size(family, checkpoint.config, "model")
    rules = rules_for(hidden)
    names = chosen(checkpoint, tensors)
    rows = []
    with shown_by(progress).step("Measuring the weights") as advance:
        for place, name in enumerate(names):
            rows.append(beside_rules(checkpoint, family, name, rules))
            advance(place + 1, len(names))
    return {
        "mode": "init",
        "source": checkpoint.source,
        "family": family.name,
        "rules": rules,
        "config": judged_config(checkpoint.config, checkpoint.source, hidden),
        "tensors": rows,
        "far": [row["name"] for row in rows if row["far"]],
    }


def beside_rules(checkpoint: Checkpoint, family: Family, name: str, rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return one tensor's root mean square beside the rules; ``nonfinite`` elements are left out of it."""
    square, elements, broken = 0.0, 0, 0
    for part in tensor_pieces(checkpoint, name):
        finite = part[part.isfinite()]
        square += float(finite.double().square().sum())
        elements += finite.numel()
        broken += part.numel() - finite.numel()
    rms = math.sqrt(square / elements) if elements else 0.0
    rule = own_rule(family, checkpoint.config, name)
    times = None if rule is None else rms / rule
    matrix = len(checkpoint.tensors[name].shape) > 1
    return {
        "name": name,
        "elements": elements + broken,
        "nonfinite": broken,
        "rms": rms,
        "own_rule": rule,
        "times": times,
        "far": broken > 0 or (times is not None and not 1 / FAR <= times <= FAR),
        "times_small": rms / rules["small"] if matrix else None,
        "times_megatron": rms / rules["megatron"] if matrix else None,
    }
