"""What bf16 and fp16 make of numbers: value, gap, what vanishes beside it, and how much of a checkpoint each holds.

A format with p significant bits has 2ᵖ⁻¹ values in every binade, so the gap between neighbours is 2⁻ᵖ⁺¹ of the power of
two below, and what is added to a value vanishes where it does not pass the middle between it and its neighbour: half a
gap. bf16 (p = 8) and fp16 (p = 11) differ in that, and in where they end.

Numbers are rounded here in exact arithmetic, not by torch, whose conversion from double rounds twice. Weights are
streamed through the checkpoint's reader, a few megabytes at a time.
"""

from __future__ import annotations

import ast
import fnmatch
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint import Checkpoint, open_checkpoint, read_header, read_pickle
from .errors import UserError
from .numerics import BF16_SIGNIFICANT_BITS, FP16_MAX, FP16_SIGNIFICANT_BITS
from .talk import Advance

FLOATING = ("F64", "F32", "F16", "BF16")
PIECE = 1 << 20
"""Elements that are looked at together."""

_LONGEST = 200  # characters of a number or expression
_POWERS = 2000  # largest exponent in one


@dataclass(frozen=True)
class Format:
    """A 16-bit format: significant bits, exponent of the smallest normal number, largest finite value."""

    name: str
    dtype: torch.dtype
    bits: int
    least: int
    largest: float

    def gap(self, value: float) -> float:
        """Return the distance from the binade of ``value``'s magnitude to the next larger value, as a power of two."""
        binade = math.frexp(value)[1] - 1 if value else self.least
        return math.ldexp(1.0, max(binade, self.least) - self.bits + 1)

    def nearest(self, value: float | Fraction) -> float:
        """Return the value of the format that is nearest, ties to even, ±inf past the middle beyond the largest."""
        if isinstance(value, float) and (not math.isfinite(value) or value == 0):
            return value
        exact = Fraction(value)
        size = abs(exact)
        binade = size.numerator.bit_length() - size.denominator.bit_length()
        binade -= Fraction(2) ** binade > size
        gap = Fraction(2) ** (max(binade, self.least) - self.bits + 1)
        rounded = round(size / gap) * gap
        return math.copysign(math.inf if rounded > self.largest else float(rounded), exact)


BF16 = Format("bf16", torch.bfloat16, BF16_SIGNIFICANT_BITS, -126, float(torch.finfo(torch.bfloat16).max))
FP16 = Format("fp16", torch.float16, FP16_SIGNIFICANT_BITS, -14, FP16_MAX)
FORMATS: dict[str, Format] = {f.name: f for f in (BF16, FP16)}
"""The formats by name."""


def half_gaps(x: Tensor, target: Format, towards_zero: Tensor | None = None) -> Tensor:
    """Return half the distance from each value to its neighbour in ``target``: an update below it vanishes.

    x: fp32 with finite values of the format. towards_zero: bool, where the neighbour below is meant instead of the one
    above; they differ at powers of two, where the lower gap is half as large. Returns fp32 powers of two.
    """
    binade = torch.frexp(x).exponent - 1
    binade = torch.where(x == 0, torch.full_like(binade, target.least), binade)
    if towards_zero is not None:
        power = (torch.frexp(x).mantissa.abs() == 0.5) & towards_zero
        binade = binade - power.to(binade.dtype)
    exponent = binade.clamp(min=target.least) - target.bits
    # 2⁻¹³⁴, half of bf16's last step, is subnormal in fp32 and still exact.
    return torch.ldexp(torch.ones_like(x), exponent)


# ---- numbers --------------------------------------------------------------------------------------------------------

_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(text: str, target: Format | None = None) -> float:
    """Return the value of a number, or of an expression with + − × / and powers; ``x`` and ``×`` multiply.

    target: round every number in it and every result to this format, as a program does that computes there; None for
    the exact value, rounded once to a double. A power such as 2^-14 is a number. Raises ValueError for what is no
    expression of numbers, UserError where it divides by zero or has powers too large to write out.
    """
    plain = text.strip().lower()
    for mark, meaning in (("×", "*"), ("·", "*"), ("÷", "/"), ("−", "-"), ("^", "**"), ("_", " ")):
        plain = plain.replace(mark, meaning)
    words = [word if "inf" in word or "nan" in word else word.replace("x", "*") for word in plain.split()]
    try:
        if len(plain) > _LONGEST:
            raise ValueError("too long")
        tree = ast.parse(" ".join(words), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is not a number") from error
    value = _value(tree, target, text)
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _value(node: ast.expr, target: Format | None, text: str) -> float | Fraction:
    def rounded(value: float | Fraction) -> float | Fraction:
        return value if target is None else target.nearest(value)

    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return rounded(Fraction(node.value) if math.isfinite(node.value) else node.value)
    if isinstance(node, ast.Name) and node.id in ("inf", "nan"):
        return float(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        inner = _value(node.operand, target, text)
        if isinstance(node.op, ast.UAdd):
            return inner
        return -float(inner) if inner == 0 else -inner  # the sign of zero is a float's
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, power = _value(node.left, None, text), _value(node.right, None, text)
        whole = _finite(power) and Fraction(power).denominator == 1 and abs(Fraction(power)) <= _POWERS
        if not whole or not _finite(base) or abs(Fraction(base)) > 1e9 or (base == 0 and power < 0):
            raise UserError(f"{text}: a power is too large or not whole; write the number out")
        return rounded(Fraction(base) ** int(power))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _value(node.left, target, text), _value(node.right, target, text)
        if isinstance(node.op, ast.Div) and right == 0:
            raise UserError(f"{text}: divides by zero; give another number")
        finite, operation = _finite(left) and _finite(right), _OPERATIONS[type(node.op)]
        return rounded(operation(Fraction(left), Fraction(right)) if finite else operation(float(left), float(right)))
    raise ValueError(f"{text!r} is not a number")


_SUM = re.compile(r"[\s\d.eExX×*/()+-]*\d[\s\d.eExX×*/()+-]*")


def is_number(thing: str) -> bool:
    """Return whether ``thing`` is a number or an expression of numbers, and no file or folder of that name."""
    try:
        return not Path(thing).expanduser().exists() and evaluate(thing) is not None
    except UserError:
        return True  # of numbers, and wrong
    except (ValueError, OSError, RuntimeError):
        # A broken sum is a sum still, unless it has the name of something.
        return bool(_SUM.fullmatch(thing)) and not Path(thing).exists()


def _finite(value: float | Fraction) -> bool:
    """Whether a value is a number; a fraction may be one that no double holds."""
    return isinstance(value, Fraction) or math.isfinite(value)


def number(text: str) -> dict[str, Any]:
    """Return what each format makes of a number or expression: its ``value`` (exact, as a double) and ``formats``.

    Of each format: ``value``, in arithmetic that rounds every step of an expression, with ``relative_error``, ``exact``
    and ``overflow``; ``nearest``, the exact number rounded once; and where that is finite whether it is ``subnormal``,
    the ``gap`` and ``half_gap`` there, its neighbours ``below`` and ``above``, and ``adding_from`` and
    ``subtracting_from``: how much must be added to or taken from the number to be rounded elsewhere. Raises what
    ``evaluate`` does.
    """
    exact = evaluate(text)
    return {"number": text, "value": exact, "formats": {f.name: _in_format(text, exact, f) for f in FORMATS.values()}}


def _in_format(text: str, exact: float, target: Format) -> dict[str, Any]:
    value = evaluate(text, target)
    found: dict[str, Any] = {
        "value": value,
        "exact": value == exact,
        "overflow": math.isinf(value) and math.isfinite(exact),
        "relative_error": abs(value / exact - 1) if exact and math.isfinite(exact) and math.isfinite(value) else None,
    }
    stored = found["nearest"] = target.nearest(exact)
    if not math.isfinite(stored):
        return found
    gap = target.gap(stored)
    lower = target.gap(math.nextafter(abs(stored), 0)) if stored else gap
    outwards = abs(stored) + gap
    inwards = abs(stored) - lower if stored else -gap
    shown = math.inf if outwards > target.largest else outwards
    sign = math.copysign(1.0, stored)
    up, down = (outwards, inwards) if sign > 0 else (-inwards, -outwards)
    middle = Fraction(stored)
    return found | {
        "subnormal": 0 < abs(stored) < math.ldexp(1.0, target.least),
        "gap": gap,
        "half_gap": gap / 2,
        "below": inwards if sign > 0 else -shown,
        "above": shown if sign > 0 else -inwards,
        "adding_from": float((middle + Fraction(up)) / 2 - Fraction(exact)),
        "subtracting_from": float(Fraction(exact) - (middle + Fraction(down)) / 2),
    }


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@dataclass
class Held:
    """How much of some weights a format holds, in elements: ``exact`` ones, those that overflow to inf, subnormal ones,
    and those not zero that become zero."""

    exact: int = 0
    overflow: int = 0
    subnormal: int = 0
    zeroed: int = 0


def open_weights(source: str | Path, subfolder: str | None = None) -> Checkpoint:
    """Open a checkpoint as ``open_checkpoint`` does, or a single ``.safetensors`` or ``.bin`` file without a config."""
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
    names = [n for n in checkpoint.tensors if not patterns or any(fnmatch.fnmatchcase(n, p) for p in patterns)]
    if not names:
        known = ", ".join(list(checkpoint.tensors)[:3])
        raise UserError(f"{checkpoint.source}: no tensor {' or '.join(patterns)}; it has {known}, ...")
    for name in names:
        if checkpoint.tensors[name].dtype not in FLOATING:
            raise UserError(
                f"{checkpoint.source}: tensor {name} is {checkpoint.tensors[name].dtype}, whole numbers, which have no"
                " gaps to fall into; choose floating tensors with --tensor"
            )
    return names


def pieces(checkpoint: Checkpoint, name: str) -> Iterator[Tensor]:
    """Yield a tensor in its own dtype, flat, at most about ``PIECE`` elements (or one row) at a time."""
    shape = checkpoint.tensors[name].shape
    if not shape:
        yield checkpoint.read(name).reshape(-1)
        return
    rows = max(1, PIECE // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield checkpoint.read_rows(name, start, min(start + rows, shape[0])).reshape(-1)


def count_held(x: Tensor, target: Format) -> Held:
    """Count what a format makes of a tensor's finite elements."""
    narrow = x.to(target.dtype)
    same = narrow.to(x.dtype) == x
    size = narrow.abs()
    smallest = math.ldexp(1.0, target.least)
    finite = x.isfinite()
    return Held(
        exact=int((same & finite).sum()),
        overflow=int((narrow.isinf() & finite).sum()),
        subnormal=int(((size > 0) & (size < smallest)).sum()),
        zeroed=int(((narrow == 0) & (x != 0)).sum()),
    )


def held(
    source: str | Path,
    *,
    tensors: Sequence[str] = (),
    subfolder: str | None = None,
    progress: Advance | None = None,
) -> dict[str, Any]:
    """Return how much of each tensor of a checkpoint, and of them all, bf16 and fp16 hold.

    source: folder, Hub id or weight file; tensors: names, with shell wildcards. The result has ``tensors``, a list with
    ``name``, ``dtype``, ``elements``, ``amax``, ``nonfinite`` and ``formats`` (of each the fields of ``Held`` and
    ``exact_fraction``), and the same sums under ``total``. Raises UserError for a source that cannot be read and for
    tensors of whole numbers.
    """
    checkpoint = open_weights(source, subfolder)
    names = chosen(checkpoint, tensors)
    rows = []
    for place, name in enumerate(names):
        row: dict[str, Any] = {"name": name, "dtype": checkpoint.tensors[name].dtype}
        row |= {"elements": 0, "nonfinite": 0, "amax": 0.0}
        counts = {f: Held() for f in FORMATS}
        for part in pieces(checkpoint, name):
            row["elements"] += part.numel()
            finite = part.isfinite()
            row["nonfinite"] += int((~finite).sum())
            row["amax"] = max(row["amax"], float(part[finite].abs().max()) if bool(finite.any()) else 0.0)
            for f, sums in counts.items():
                for field, count in asdict(count_held(part, FORMATS[f])).items():
                    setattr(sums, field, getattr(sums, field) + count)
        rows.append(row | {"formats": {f: _with_share(sums, row["elements"]) for f, sums in counts.items()}})
        if progress is not None:
            progress(place + 1, len(names))
    elements = sum(row["elements"] for row in rows)
    total = {
        "elements": elements,
        "nonfinite": sum(row["nonfinite"] for row in rows),
        "amax": max(row["amax"] for row in rows),
        "formats": {
            f: _with_share(Held(**{k: sum(row["formats"][f][k] for row in rows) for k in vars(Held())}), elements)
            for f in FORMATS
        },
    }
    return {"source": checkpoint.source, "tensors": rows, "total": total}


def _with_share(sums: Held, elements: int) -> dict[str, Any]:
    return asdict(sums) | {"exact_fraction": sums.exact / max(1, elements)}


def advise_format(
    *things: str,
    tensors: Sequence[str] = (),
    subfolder: str | None = None,
    progress: Advance | None = None,
) -> dict[str, Any]:
    """Return what bf16 and fp16 make of numbers, expressions and checkpoints: ``numbers`` and ``checkpoints``.

    things: each a number ("0.0129"), an expression ("283 x 10"), or what ``held`` takes; what exists as a path is one.
    Raises UserError for anything else.
    """
    report: dict[str, Any] = {"mode": "format", "numbers": [], "checkpoints": []}
    for thing in things:
        if is_number(thing):
            try:
                report["numbers"].append(number(thing))
            except ValueError as error:
                raise UserError(f"{error}; give one like 0.0129, or an expression like '283 x 10'") from error
        else:
            report["checkpoints"].append(held(thing, tensors=tensors, subfolder=subfolder, progress=progress))
    if not things:
        raise UserError("--format needs a number, an expression like '283 x 10', or a checkpoint")
    return report
