"""Write figures for people, rounded. A claim of safety is never rounded up: headroom and exact shares are rounded down,
bounds and excesses up, measurements to the nearest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from .numerics import FP16_MAX, OVERFLOWED

FULL_HEADROOM_BITS = 39.0  # more headroom than this is all that fp16 has
MOST_EXCESS_BITS = 23.0  # no number is shown for a bound further over its limit
MOST_FACTOR = 1_000_000  # no number is shown for a ratio over this, such as one of distances next to 0


def infinite(value: float) -> bool:
    """Return whether a number stands for infinity, that is, whether its absolute value is 1e308 or more."""
    return abs(value) >= 1e308  # JSON has no infinity: reports have the largest double instead, and pages have 1e308


def rounded_down(value: float, decimals: int) -> float:
    return float(Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-decimals), ROUND_FLOOR))


def rounded_up(value: float, digits: int) -> float:
    """Return ``value`` ≥ 0 rounded up to ``digits`` significant digits. Whole numbers up to ten million keep all their
    digits, such as 65504's five."""
    if value <= 0 or not math.isfinite(value):
        return value
    exact = Decimal(repr(float(value)))
    last = exact.adjusted() + 1 - digits
    return float(exact.quantize(Decimal(1).scaleb(min(last, 0) if value < 1e7 else last), ROUND_CEILING))


def headroom(value: float | None) -> str:
    """Return headroom bits as text, rounded down, such as "3.2 × (1.7 bits)". It is "none" under 0, "all" over 39, and
    "no limit" for None."""
    if value is None or math.isnan(value):
        return "no limit"
    if value < 0:
        return "none"
    if value > FULL_HEADROOM_BITS:
        return "all"
    return f"{factor(value)} × ({bits(value)} bits)"


def bits(value: float) -> str:
    decimals = 2 if 0 <= value < 1 else 1
    return f"{rounded_down(value, decimals):.{decimals}f}"


def below_limit(value: float | None) -> str:
    """Return headroom bits as text like "3.2 × below the limit (1.7 bits)", or "over the limit" if negative or None."""
    text = headroom(value)
    if text[0].isdigit():
        return text.replace("×", "× below the limit")
    return "more than 2³⁹ × below the limit" if text == "all" else "over the limit"


def reached(value: float | None) -> str:
    """Return the text of a site's largest |x|. It is "overflow" for None, NaN, infinity and 65536."""
    if value is None or not value <= FP16_MAX:
        return "overflow" if value is None or not OVERFLOWED < value < 1e308 else magnitude(value)
    return magnitude(value)


def headroom_or_excess(bits: float | None, largest: float | None, limit: float = FP16_MAX) -> str:
    """Return a site's headroom bits as text. If ``largest``, the largest |x| in fp32, is over the limit, the text is
    the excess, such as "5.5 × over". If ``largest`` is within the limit but the headroom is negative, an earlier site
    overflowed, and the text is "passed on"."""
    if largest is None or known(largest) is None or FP16_MAX < largest <= OVERFLOWED:
        return headroom(bits)
    if largest > limit:
        return over_limit(largest, limit)
    return headroom(bits) if bits is None or bits >= 0 else "passed on"


def over_limit(value: float, limit: float = FP16_MAX) -> str:
    ratio = value / limit
    return f"{ratio:.2g} × over" if ratio < 99.5 else f"{ratio:,.0f} × over"


def headroom_by_bound(bits: float) -> str:
    """Return a bound's headroom as text: "5.6 × over" if negative, and "none" (no headroom) below −23 bits."""
    return headroom(bits) if bits >= 0 or bits < -MOST_EXCESS_BITS else f"{rounded_up(2.0**-bits, 2):,g} × over"


def factor(bits: float) -> str:
    """Return the text of 2^bits, rounded down, with two decimals below 2, one below 100 and none above."""
    ratio = 2.0 ** rounded_down(bits, 4)  # the same digits as the page's script
    decimals = 2 if ratio < 2 else 1 if ratio < 100 else 0
    return f"{rounded_down(ratio, decimals):,.{decimals}f}"


def excess(value: float | None, decimals: int = 1) -> str:
    if value is None or math.isnan(value) or infinite(value):
        return "∞"
    return f"{0.0 - rounded_down(-value, decimals):.{decimals}f}"


def percent(fraction: float) -> str:
    """Return a fraction in percent, rounded down to four decimals, so that only 1 gives 100%."""
    return f"{rounded_down(fraction, 6) * 100:.4f}".rstrip("0").rstrip(".") + "%"


def about(ratio: float) -> str:
    if ratio >= MOST_FACTOR:
        return f"over {MOST_FACTOR:,} ×"
    two = float(f"{ratio:.2g}")
    return f"about {two:,.0f} ×" if two >= 10 else f"about {two:g} ×"


def known(value: float | None) -> float | None:
    """Return the number, or None if it is missing, NaN or infinite."""
    return None if value is None or math.isnan(value) or infinite(value) else value


def magnitude(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "NaN"
    if infinite(value):
        return "∞"
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.4g}" if 0.01 <= abs(value) < 1000 else scientific(value)


def bound_magnitude(value: float | None) -> str:
    """Return the text of a bound, rounded up, formatted by ``magnitude``; "–" for None, "∞" for NaN and infinity."""
    if value is None:
        return "–"
    if math.isnan(value) or infinite(value):
        return "∞"
    return magnitude(rounded_up(value, 4 if 0.01 <= value < 1e7 else 3))


def scientific(value: float | None) -> str:
    if value is None or math.isnan(value) or infinite(value):
        return "∞"
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.3g}"
    digits, exponent = f"{value:.2e}".split("e")
    return f"{digits}×10{superscript(int(exponent))}"


def power(exponent: float) -> str:
    """Return 2^exponent as text, such as 2⁻³. If the exponent is not whole, it is rounded up, and a factor in eighths
    comes before the power: 5/8·2⁻³ stands for 2^-3.68."""
    whole = math.ceil(exponent)
    fraction = "" if whole == exponent else f"{round(8 * 2 ** (exponent - whole))}/8"
    return "·".join(filter(None, (fraction, f"2{superscript(whole)}" if whole or not fraction else "")))


def superscript(exponent: int) -> str:
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def signed(exponent: float) -> str:
    return f"{exponent:+.3g}".replace("-", "−") if exponent else "0"


def listed(names: Sequence[str], last: str = "and") -> str:
    return f" {last} ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
