"""How the figures of a report are rounded for people, in one place, so that terminal, page and card say the same.

The rule: a claim of safety is never rounded up. Headroom, and the share of weights that come through exactly, are
rounded down; a bound and its distance from what was found are rounded up. So "100%" means every weight, and a bound
that is shown under its limit is under it. What is merely measured is rounded to the nearest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from .numerics import FP16_MAX, OVERFLOWED

FULL_HEADROOM_BITS = 39.0  # more headroom than this is all that fp16 has
MOST_EXCESS_BITS = 23.0  # how far over its limit a bound is said to be in a number
MOST_FACTOR = 1_000_000  # the factor from which a number says no more
UNITS = ("B", "kB", "MB", "GB", "TB")
PRECISION_NOISE = 1e-6
"""Bits of precision that are the noise of their own computation: a prediction of 11 − 10⁻¹² is one of 11."""


def infinite(value: float) -> bool:
    """Return whether a number is infinite, also as JSON has it: ± the largest double, in a page ±1e308."""
    return abs(value) >= 1e308


def rounded_down(value: float, decimals: int) -> float:
    """Return the largest number of ``decimals`` decimals that is not above a finite ``value``, as it is written."""
    return float(Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-decimals), ROUND_FLOOR))


def rounded_up(value: float, digits: int) -> float:
    """Return the least number of ``digits`` significant digits that is not below a finite ``value`` of 0 or more.

    Whole numbers keep all digits up to ten million, since limits like 65504 have five.
    """
    if value <= 0 or not math.isfinite(value):
        return value
    exact = Decimal(repr(float(value)))
    last = exact.adjusted() + 1 - digits
    return float(exact.quantize(Decimal(1).scaleb(min(last, 0) if value < 1e7 else last), ROUND_CEILING))


def headroom(value: float | None) -> str:
    """Return headroom as a factor and in bits, rounded down: "3.2 × (1.7 bits)", with two decimals under one bit;
    "none" past the limit, "all" for more than fp16 has, "no limit" where there is none."""
    if value is None or math.isnan(value):
        return "no limit"
    if value < 0:
        return "none"
    if value > FULL_HEADROOM_BITS:
        return "all"
    return f"{factor(value)} × ({bits(value)} bits)"


def bits(value: float) -> str:
    """Return bits of headroom as a number, rounded down, with two decimals from 0 to one bit, else one."""
    decimals = 2 if 0 <= value < 1 else 1
    return f"{rounded_down(value, decimals):.{decimals}f}"


def in_bits(value: float) -> str:
    """Return a number of bits that was asked for as it was given: "1 bit", "1.5 bits"."""
    return f"{value:g} bit" + ("" if value == 1 else "s")


def below_limit(value: float | None) -> str:
    """Return headroom as the end of a sentence: "3.2 × below the limit (1.7 bits)", "past the limit"."""
    said = headroom(value)
    if said[0].isdigit():
        return said.replace("×", "× below the limit")
    return "all of fp16's range below the limit" if said == "all" else "past the limit"


def reached(value: float | None) -> str:
    """Return the largest |x| of an fp16 site or regime: a magnitude, beyond fp16 the one in fp32, "overflow" where only
    that is known, which an amax of 65536, of infinity or NaN says."""
    if value is None or not value <= FP16_MAX:
        return "overflow" if value is None or not OVERFLOWED < value < 1e308 else magnitude(value)
    return magnitude(value)


def headroom_or_excess(bits: float | None, largest: float | None, limit: float = FP16_MAX) -> str:
    """Return headroom, or how far over its limit a value is that is known in fp32: "5.5 × over"; "passed on" for what
    keeps the limit itself and broke since something before it did."""
    if largest is None or known(largest) is None or FP16_MAX < largest <= OVERFLOWED:
        return headroom(bits)
    if largest > limit:
        return over_limit(largest, limit)
    return headroom(bits) if bits is None or bits >= 0 else "passed on"


def over_limit(value: float, limit: float = FP16_MAX) -> str:
    """Return how far a magnitude is past its limit, "5.5 × over", rounded to the nearest."""
    ratio = value / limit
    return f"{ratio:.2g} × over" if ratio < 99.5 else f"{ratio:,.0f} × over"


def headroom_by_bound(bits: float) -> str:
    """Return headroom by a bound, or how far the bound is over its limit: "5.6 × over", rounded up; "none" from eight
    million times on, where a number says no more."""
    return headroom(bits) if bits >= 0 or bits < -MOST_EXCESS_BITS else f"{times(2.0**-bits, 2)} × over"


def factor(bits: float) -> str:
    """Return 2 to the power of some bits of headroom, rounded down: to two decimals under 2, to whole numbers from a
    hundred on, else to one decimal."""
    ratio = 2.0 ** rounded_down(bits, 4)  # what the script of a page gets
    decimals = 2 if ratio < 2 else 1 if ratio < 100 else 0
    return f"{rounded_down(ratio, decimals):,.{decimals}f}"


def excess(value: float | None, decimals: int = 1) -> str:
    """Return what a proof is over its limit by, or costs, in bits, rounded up."""
    if value is None or math.isnan(value) or infinite(value):
        return "∞"
    return f"{0.0 - rounded_down(-value, decimals):.{decimals}f}"


def percent(fraction: float) -> str:
    """Return a share in percent with at most four decimals, rounded down so that only 1 gives 100%."""
    return f"{rounded_down(fraction, 6) * 100:.4f}".rstrip("0").rstrip(".") + "%"


def significant_bits(value: float) -> str:
    """Return how many significant bits are kept with two decimals, rounded down, "11" where fp16 keeps all it has."""
    return f"{rounded_down(value + PRECISION_NOISE, 2):.2f}".removesuffix(".00")


def tightness(bound: float | None, observed: float | None) -> float | None:
    """Return how many times a bound lies above the worst value found, None where one is missing or overflows."""
    if bound is None or observed is None or not 0 < observed <= FP16_MAX or infinite(bound):
        return None
    return bound / observed


def times(ratio: float | None, digits: int = 3) -> str:
    """Return a ratio such as a tightness with some digits, rounded up; "–" where there is none."""
    return "–" if ratio is None else f"{rounded_up(ratio, digits):,g}"


def about(ratio: float) -> str:
    """Return a factor of 1 or more that is only measured as a plain number of two digits: "about 1,600 ×"."""
    if ratio >= MOST_FACTOR:
        return f"over {MOST_FACTOR:,} ×"
    two = float(f"{ratio:.2g}")
    return f"about {two:,.0f} ×" if two >= 10 else f"about {two:g} ×"


def known(value: float | None) -> float | None:
    """Return a number, None for one that is missing, NaN or infinite."""
    return None if value is None or math.isnan(value) or infinite(value) else value


def magnitude(value: float | None) -> str:
    """Return a magnitude with four digits, three where it needs a power of ten, rounded to the nearest."""
    if value is None or math.isnan(value):
        return "NaN"
    if infinite(value):
        return "∞"
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.4g}" if 0.01 <= abs(value) < 1000 else scientific(value)


def bound_magnitude(value: float | None) -> str:
    """Return a bound as ``magnitude`` writes it, rounded up; "–" for None, "∞" for NaN and infinity."""
    if value is None:
        return "–"
    if math.isnan(value) or infinite(value):
        return "∞"
    return magnitude(shown_bound(value))


def shown_bound(value: float) -> float:
    """Return the number that a finite bound is shown as: the least that ``magnitude`` can write and is not below it."""
    return rounded_up(value, 4 if 0.01 <= value < 1e7 else 3)


def scientific(value: float | None) -> str:
    """Return an error with three digits, "∞" for what is infinite or was too large to say."""
    if value is None or math.isnan(value) or infinite(value):
        return "∞"
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.3g}"
    digits, exponent = f"{value:.2e}".split("e")
    return f"{digits}×10{superscript(int(exponent))}"


def power(exponent: int) -> str:
    return "2" + superscript(exponent)


def superscript(exponent: int) -> str:
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def signed(exponent: int) -> str:
    """Return an integer with its sign, a true minus."""
    return f"{exponent:+d}".replace("-", "−") if exponent else "0"


def listed(names: Sequence[str], last: str = "and") -> str:
    """Return names as prose: "a", "a and b", "a, b and c", or with another word before the last."""
    return f" {last} ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def bytes_in_words(nbytes: int) -> str:
    power = min(len(UNITS) - 1, (len(str(max(1, nbytes))) - 1) // 3)
    return f"{nbytes:,} B" if power == 0 else f"{nbytes / 1000**power:.1f} {UNITS[power]}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where it is not one: "1 site", "1,200 sites"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
