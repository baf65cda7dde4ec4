"""Compare a checkpoint's weights with the standard deviations of their initialisation. A tensor's root mean square
counts as its standard deviation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rich.table import Table

from ..errors import UserError, first_line
from ..families.configs import axis_size
from ..families.from_config import in_folder
from ..families.known import family_of, stock_class
from ..progress import Progress
from ..quiet import quiet
from ..report.screen import console
from ..wording import counted

if TYPE_CHECKING:
    from ..checkpoint.reader import Checkpoint

FAR = 4.0  # times a rule, either way, from which a weight is flagged


def rules_for(hidden: int) -> dict[str, Any]:
    if hidden < 1:
        raise UserError(f"the hidden size is {hidden}; give a positive number")
    # "Transformers without Tears" (Nguyen and Salazar, arXiv:1910.05895); MT-NLG 530B (Smith et al., arXiv:2201.11990).
    return {"hidden_size": hidden, "small": math.sqrt(2 / (5 * hidden)), "megatron": math.sqrt(1 / (3 * hidden))}


def stock_deviations(checkpoint: Checkpoint) -> dict[str, float]:
    """Return the standard deviation with which transformers initialises each parameter, by name. A parameter filled
    with a constant has the constant's magnitude instead. Parameters filled with zeros or copies are left out. Raises
    UserError if transformers cannot build the model from its config."""
    import torch
    import transformers
    from torch.utils._python_dispatch import TorchDispatchMode

    from ..measuring.stock import STOCK_LOCK, load_config, ready

    ops = torch.ops.aten
    filling = (ops.normal_.default, ops.fill_.Scalar, ops.zero_.default, ops.copy_.default)
    drawn: dict[int, float] = {}

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if call in filling and args[0].nbytes == args[0].untyped_storage().nbytes():  # not one row of a table
                numbers = [number for number in args[1:] if isinstance(number, (int, float))]
                drawn[args[0].untyped_storage()._cdata] = abs(numbers[-1]) if numbers else float(call is filling[0])
            return call(*args, **(kwargs or {}))

    config = load_config(checkpoint.folder)
    with STOCK_LOCK, torch.device("meta"), torch.no_grad():
        try:
            with patch.object(transformers.PreTrainedModel, "initialize_weights"):
                model = ready(getattr(transformers, stock_class(checkpoint.config))(config))
        except Exception as error:  # each class raises its own
            raise UserError(
                f"{checkpoint.source}/config.json: transformers cannot make the model ({first_line(error)}); take"
                " config.json from the original checkpoint"
            ) from error
        with Recording():
            model.initialize_weights()
    parameters = model.named_parameters(remove_duplicate=False)
    sizes = {name: drawn.get(parameter.untyped_storage()._cdata) for name, parameter in parameters}
    return {name: size for name, size in sizes.items() if size}


def advise_init(
    source: str | Path, *, subfolder: str | None = None, progress: Progress | bool | None = None
) -> dict[str, Any]:
    """Compare a checkpoint's weights with its family's initialisation, and return the result with two published rules.

    source: a folder, a Hub id, or a hidden size such as "14336", for which only the rules are returned. ``rules`` has
    the published standard deviations for the hidden size. In ``tensors``, ``own_rule`` is the standard deviation with
    which transformers initialises a tensor, and ``times`` is the tensor's ``rms`` divided by ``own_rule``. ``far`` is
    true beyond a factor of 4 either way, and for inf or NaN. Raises UserError for an unknown family, or a source that
    is unreadable or has no config."""
    text = str(source)
    if text.isdecimal() and not Path(text).exists():
        return {"mode": "init", "source": None, "tensors": [], "far": [], "rules": rules_for(int(text))}
    from .weight_statistics import floating_names, open_weights  # not for a width, which needs no torch

    checkpoint = open_weights(source, subfolder)
    if not checkpoint.config:
        raise UserError(f"{source}: a weight file does not name its model; give the folder, with its config.json")
    with in_folder(checkpoint.source):
        family = family_of(checkpoint.config)
    with quiet():
        rules = stock_deviations(checkpoint)
    rows = [beside_rule(checkpoint, name, rules.get(name)) for name in floating_names(checkpoint, progress)]
    return {
        "mode": "init",
        "source": checkpoint.source,
        "family": family.name,
        "rules": rules_for(axis_size(family, checkpoint.config, "model")),
        "tensors": rows,
        "far": [row["name"] for row in rows if row["far"]],
    }


def beside_rule(checkpoint: Checkpoint, name: str, rule: float | None) -> dict[str, Any]:
    from .weight_statistics import tensor_pieces

    square, elements, broken = 0.0, 0, 0
    for part in tensor_pieces(checkpoint, name):
        finite = part[part.isfinite()]
        square += float(finite.double().square().sum())
        elements += finite.numel()
        broken += part.numel() - finite.numel()
    rms = math.sqrt(square / elements) if elements else 0.0
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
        screen.print(f"every root mean square is within a factor of {FAR:g} of {result['family']}'s own rule")
    for row in (row for row in far if row["nonfinite"]):
        screen.print(f"inf or NaN in {row['name']}: {counted(row['nonfinite'], 'weight')}", markup=False)
    if any((row["times"] or 0) > FAR for row in far):
        screen.print("Large weights that write the residual stream make it large: bf16-to-fp16 certify says how large.")
