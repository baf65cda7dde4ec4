"""What the formats make of numbers is exact."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from bf16_to_fp16.advise.formats import advise_format, number_report
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.optim import rounding
from bf16_to_fp16.optim.formats import BF16, FORMATS, FP16, Format, half_gaps

BOTH = pytest.mark.parametrize("target", [BF16, FP16], ids=["bf16", "fp16"])


def values_of(target: Format) -> Tensor:
    """Return all finite values of a format in fp32."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(target.dtype).float()
    return values[values.isfinite()]


@BOTH
def test_a_number_is_rounded_as_hardware_rounds_it(target: Format) -> None:
    torch.manual_seed(0)
    values = values_of(target).unique()
    ties = (values[1:].double() + values[:-1].double()) / 2
    beside = torch.nextafter(ties.float(), torch.tensor(0.0))
    x = torch.cat([values[::7], ties.float()[::7], beside[::7], torch.tensor([65519.9, 65520.0, 3.39e38, 3.4e38, 0.0])])
    for given, want in zip(x.tolist(), x.to(target.dtype).tolist(), strict=True):
        got = target.nearest(given)
        assert got == want and math.copysign(1, got) == math.copysign(1, want), given
    assert math.copysign(1, target.nearest(-1e-60)) == -1
    # Where a double lies just above a tie, rounding through fp32 loses what decides.
    tie = 1 + target.gap(1) / 2
    assert target.nearest(tie) == 1 and target.nearest(math.nextafter(tie, 2)) == 1 + target.gap(1)


def test_2830_is_2832_in_bf16() -> None:
    found = number_report("2830")["formats"]
    assert found["bf16"]["value"] == found["bf16"]["nearest"] == float(torch.tensor(2830.0).bfloat16()) == 2832
    assert found["fp16"]["value"] == 2830 and found["fp16"]["exact"] and not found["bf16"]["exact"]
    assert (found["bf16"]["gap"], found["fp16"]["half_gap"]) == (16, 1)


def test_what_vanishes_beside_00129_is_half_a_gap() -> None:
    """A popular claim has it that differences under 0.0009999 vanish there in bf16."""
    found = number_report("0.0129")["formats"]["bf16"]
    assert found["half_gap"] == 2.0**-15  # 3.05e-5
    assert found["adding_from"] == pytest.approx(8.94e-6, rel=1e-3)
    assert found["subtracting_from"] == pytest.approx(5.21e-5, rel=1e-3)
    stored = torch.tensor(0.0129).bfloat16()

    def vanishes(difference: float) -> bool:
        return bool(torch.tensor(0.0129 + difference).bfloat16() == stored)

    assert vanishes(8.9e-6) and not vanishes(9.0e-6) and not vanishes(0.0009999)
    assert vanishes(-5.2e-5) and not vanishes(-5.3e-5)


@BOTH
def test_the_relative_error_is_that_of_the_value(target: Format) -> None:
    for text, exact in (("0.1", 0.1), ("-3.3", -3.3), ("2830", 2830.0)):
        found = number_report(text)["formats"][target.name]
        assert found["relative_error"] == pytest.approx(abs(found["value"] - exact) / abs(exact), rel=1e-9, abs=1e-15)
    assert number_report("2830")["formats"]["bf16"]["relative_error"] == pytest.approx(2 / 2830)
    assert number_report("70000")["formats"]["fp16"]["relative_error"] is None


@BOTH
def test_neighbours_and_thresholds_are_those_of_the_format(target: Format) -> None:
    values = values_of(target).double().unique().tolist()
    for place in [*range(1, len(values) - 1, 997), 1, len(values) // 2, len(values) - 2]:
        found = number_report(repr(values[place]))["formats"][target.name]
        assert found["exact"] and found["value"] == values[place]
        assert (found["below"], found["above"]) == (values[place - 1], values[place + 1])
        assert found["adding_from"] == (values[place + 1] - values[place]) / 2
        assert found["subtracting_from"] == (values[place] - values[place - 1]) / 2
        assert found["gap"] == max(values[place + 1] - values[place], values[place] - values[place - 1])


def test_the_ends_of_fp16() -> None:
    assert not number_report("65519.9")["formats"]["fp16"]["overflow"]
    assert (
        number_report("65520")["formats"]["fp16"]["overflow"]
        and not number_report("65520")["formats"]["bf16"]["overflow"]
    )
    last = number_report("65504")["formats"]["fp16"]
    assert last["above"] == math.inf and last["adding_from"] == 16
    least, normal, nothing = (number_report(repr(2.0**power))["formats"]["fp16"] for power in (-24, -14, -25))
    assert least["subnormal"] and not normal["subnormal"] and nothing["value"] == 0
    assert not number_report("inf")["formats"]["fp16"]["overflow"]


@BOTH
def test_an_update_vanishes_below_half_a_gap_and_not_above(target: Format) -> None:
    torch.manual_seed(0)
    values = values_of(target)
    x = values[values.abs() < target.largest]
    if target is BF16:
        x = x[x.abs() > 2.0**-100]  # below, an update is no longer a number of fp32
    for sign in (1.0, -1.0):
        towards_zero = sign * x < 0
        half = half_gaps(x, target, towards_zero=towards_zero)
        for share, moves in ((0.999, False), (1.001, True)):
            got = rounding.nearest(x + sign * share * half, target.dtype)
            assert torch.equal(got != x, torch.full_like(x, moves, dtype=torch.bool)), (sign, share)
    up = half_gaps(x, target)
    assert torch.equal(up, half_gaps(x, target, towards_zero=torch.zeros_like(x, dtype=torch.bool)))


@pytest.mark.parametrize(
    ("text", "value"), [("-2", -2.0), ("+0.5", 0.5), (" 1E-3 ", 1e-3), ("1e999", math.inf), ("-INF", -math.inf)]
)
def test_a_number_is_read_as_it_is_written(text: str, value: float) -> None:
    (found,) = advise_format(text)["numbers"]
    assert (found["number"], found["value"]) == (text, value)


SUMS = ["283 x 10", "283×10", "1/3", "2^-14", "(1 + 2) * 3", "3 +", "283 x", "(2+3", "1e"]


@pytest.mark.parametrize("text", [*SUMS, "abc", "__import__('os').getcwd()", "[1]", "True", "1 if 1 else 2"])
def test_nothing_but_a_number_is_one(text: str) -> None:
    with pytest.raises(UserError, match=r"is not a number; give one like 0\.0129 or 2e-5 \(sums are not worked out\)"):
        advise_format(text)
    with pytest.raises(UserError, match="needs a number"):
        advise_format()


def becoming(number: str) -> dict[str, str]:
    return {row["operation"]: row["becomes"] for row in number_report(number)["to_nan"]}


def test_a_number_past_fp16_becomes_nan_where_inf_meets_itself_or_0() -> None:
    rows = {row["operation"].split(":")[-1].strip(): row for row in number_report("70000")["to_nan"]}
    # In another library's arithmetic of 16 bits.
    with np.errstate(all="ignore"):
        x, one = np.float16(70000), np.float16(1)
        root = np.float16(1) / np.sqrt((x * x + one) / np.float16(2))
        wanted = {"x": x, "x squared": x * x, "1 / root of the mean square": root, "x times that": x * root}
        wanted |= {"x - the largest of (x, 1)": x - x, "a weight of 0 times x": x * np.float16(0)}
    for name, value in wanted.items():
        np.testing.assert_equal(rows[name]["fp16"], float(value))
    assert [rows[name]["becomes"] for name in wanted] == ["inf", "inf", "finite", "NaN", "NaN", "NaN"]
    assert len(rows) == 10 and sum(row["becomes"] == "NaN" for row in rows.values()) == 7
    for row in rows.values():  # bf16 has the range, and 8 bits
        assert row["bf16"] == pytest.approx(row["true"], rel=2.0**-7, abs=1e-30)
    assert rows["x times that"]["true"] == pytest.approx(math.sqrt(2), rel=1e-9)


def test_only_what_overflows_has_a_way_to_nan() -> None:
    assert becoming("65519") == {} and becoming("0.0129") == {} and becoming("inf") == {} and becoming("1e200") == {}
    assert becoming("65520")["x"] == "inf"
    assert becoming("-70000") == becoming("70000")


def test_formats_are_what_torch_says() -> None:
    for target in FORMATS.values():
        info = torch.finfo(target.dtype)
        assert target.largest == info.max and 2.0**target.least == info.smallest_normal
        assert 2.0 ** (1 - target.bits) == info.eps
