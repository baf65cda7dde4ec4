"""What bf16 and fp16 make of numbers (value, gap, what vanishes beside it, how inf becomes NaN), and weights in pieces.

The formats themselves are in ``optim.formats``. Weights are streamed through the checkpoint's reader, a few megabytes
at a time; torch is imported for them alone.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..optim.formats import FORMATS, Format

if TYPE_CHECKING:
    from torch import Tensor

    from ..checkpoint.reader import Checkpoint

PIECE = 1 << 20  # elements that are looked at together

# ---- numbers --------------------------------------------------------------------------------------------------------


def number_report(text: str) -> dict[str, Any]:
    """Return what each format makes of a number: its ``value`` as a double, ``formats``, and where it is past fp16's
    range ``to_nan``, what becomes of it in a layer.

    Of each format: ``value`` and ``nearest``, both the value nearest to the number, with ``relative_error``, ``exact``
    and ``overflow``; and where that is finite whether it is ``subnormal``, the ``gap`` and ``half_gap`` there, its
    neighbours ``below`` and ``above``, and ``adding_from`` and ``subtracting_from``: how much must be added to or taken
    from the number to be rounded elsewhere. Raises UserError for what is no number.
    """
    try:
        exact = float(text)
    except ValueError:
        raise UserError(f"{text!r} is not a number; give one like 0.0129 or 2e-5 (sums are not worked out)") from None
    formats = {f.name: _in_format(exact, f) for f in FORMATS.values()}
    past = formats["fp16"]["overflow"] and abs(exact) <= LARGEST
    return {"number": text, "value": exact, "formats": formats, "to_nan": to_nan(exact) if past else []}


def _in_format(exact: float, target: Format) -> dict[str, Any]:
    stored = target.nearest(exact)
    entry: dict[str, Any] = {
        "value": stored,
        "exact": stored == exact,
        "overflow": math.isinf(stored) and math.isfinite(exact),
        "relative_error": abs(stored / exact - 1) if exact and math.isfinite(exact) and math.isfinite(stored) else None,
        "nearest": stored,
    }
    if not math.isfinite(stored):
        return entry
    gap = target.gap(stored)
    lower = target.gap(math.nextafter(abs(stored), 0)) if stored else gap
    outwards = abs(stored) + gap
    inwards = abs(stored) - lower if stored else -gap
    shown = math.inf if outwards > target.largest else outwards
    sign = math.copysign(1.0, stored)
    up, down = (outwards, inwards) if sign > 0 else (-inwards, -outwards)
    middle = Fraction(stored)
    return entry | {
        "subnormal": 0 < abs(stored) < math.ldexp(1.0, target.least),
        "gap": gap,
        "half_gap": gap / 2,
        "below": inwards if sign > 0 else -shown,
        "above": shown if sign > 0 else -inwards,
        "adding_from": float((middle + Fraction(up)) / 2 - Fraction(exact)),
        "subtracting_from": float(Fraction(exact) - (middle + Fraction(down)) / 2),
    }


# ---- on the way to NaN ----------------------------------------------------------------------------------------------

# Overflow alone gives inf, which is wrong but ordered. NaN comes from operations whose result no ordering decides:
# inf − inf (a softmax takes the largest score from all, a LayerNorm the mean), 0 · inf (a norm multiplies by one over
# the root of what overflowed, attention by a weight of 0) and inf / inf.
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "x": lambda v: v[0],
    "softmax: x - the largest of (x, 1)": lambda v: v[0] - v.max(),
    "softmax of (x, 1), at x": lambda v: v.softmax(0)[0],
    "RMSNorm: x squared": lambda v: v[0] * v[0],
    "RMSNorm: 1 / root of the mean square": lambda v: (v * v).mean().rsqrt(),
    "RMSNorm: x times that": lambda v: v[0] * (v * v).mean().rsqrt(),
    "LayerNorm: x - the mean of (x, 1)": lambda v: v[0] - v.mean(),
    "x / the sum of (x, 1)": lambda v: v[0] / v.sum(),
    "attention: a weight of 0 times x": lambda v: v[0] * 0,
    "a residual of -x added to x": lambda v: v[0] + -v[0],
}
"""What a layer does with a vector (x, 1), on its way from inf to NaN."""

LARGEST = 1e150  # numbers of which doubles hold the squares


def to_nan(value: float) -> list[dict[str, Any]]:
    """Return each operation with its result in fp16 and bf16, each step stored in the format, and in doubles.

    value: finite, up to ``LARGEST``; its magnitude is taken. ``operation``, ``fp16``, ``bf16``, ``true`` of each, and
    what it ``becomes`` in fp16: "inf", "NaN" or "finite".
    """
    import torch

    rows = []
    for name, operation in OPERATIONS.items():
        row: dict[str, Any] = {"operation": name}
        for kind, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("true", torch.float64)):
            vector = torch.tensor([abs(value), 1.0], dtype=torch.float64).to(dtype)
            row[kind] = float(operation(vector))
        result = row["fp16"]
        row["becomes"] = "NaN" if math.isnan(result) else "finite" if math.isfinite(result) else "inf"
        rows.append(row)
    return rows


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def open_weights(source: str | Path, subfolder: str | None = None) -> Checkpoint:
    """Open a checkpoint as ``open_checkpoint`` does, or a single ``.safetensors`` or ``.bin`` file without a config."""
    from ..checkpoint.formats import read_pickle
    from ..checkpoint.headers import read_header
    from ..checkpoint.reader import Checkpoint, open_checkpoint

    path = Path(source).expanduser()
    if subfolder is None and path.is_file():
        if path.suffix not in (".safetensors", ".bin"):
            raise UserError(f"{path} is not a checkpoint; give its folder, a .safetensors file or a Hub id")
        tensors = (read_header if path.suffix == ".safetensors" else read_pickle)(path)
        return Checkpoint(path.parent, str(source), None, {}, dict(sorted(tensors.items())), (path,), None)
    return open_checkpoint(source, subfolder)


def chosen(checkpoint: Checkpoint, patterns: Sequence[str] = ()) -> list[str]:
    """Return the names of the tensors that match one of ``patterns`` (shell wildcards), all where there are none.

    Raises UserError where none matches, and for a tensor of whole numbers.
    """
    from ..checkpoint.headers import FLOATING_DTYPES

    names = [n for n in checkpoint.tensors if not patterns or any(fnmatch.fnmatchcase(n, p) for p in patterns)]
    if not names:
        known = ", ".join(list(checkpoint.tensors)[:3])
        raise UserError(f"{checkpoint.source}: no tensor {' or '.join(patterns)}; it has {known}, ...")
    for name in names:
        if checkpoint.tensors[name].dtype not in FLOATING_DTYPES:
            raise UserError(
                f"{checkpoint.source}: tensor {name} is {checkpoint.tensors[name].dtype}, whole numbers, which have no"
                " gaps to fall into; choose floating tensors with --tensor"
            )
    return names


def tensor_pieces(checkpoint: Checkpoint, name: str) -> Iterator[Tensor]:
    """Yield a tensor in its own dtype, flat, at most about ``PIECE`` elements (or one row) at a time."""
    shape = checkpoint.tensors[name].shape
    if not shape:
        yield checkpoint.read(name).reshape(-1)
        return
    rows = max(1, PIECE // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield checkpoint.read_rows(name, start, min(start + rows, shape[0])).reshape(-1)


def advise_format(*numbers: str) -> dict[str, Any]:
    """Return what bf16 and fp16 make of ``numbers`` ("0.0129"); raise UserError for what is none."""
    if not numbers:
        raise UserError("--format needs a number, like 0.0129")
    return {"mode": "format", "numbers": [number_report(number) for number in numbers]}
