"""Axes whose elements share channels: which element has which channel, and back."""

import math

import pytest
import torch

from bf16_to_fp16.families.signals import Spread
from bf16_to_fp16.families.spread import carrying, channels_along, shared, spread_out

HEADS, GROUP, SIZE = 2, 3, 4


def channel(element: int, kind: str) -> int:
    """Return the channel of an element, head by head and pair by pair."""
    head, inside = divmod(element, SIZE)
    if kind == "values":  # of which each is read by several heads of queries
        return head // GROUP * SIZE + inside
    pair = inside % (SIZE // 2) if kind == "halves" else inside // 2
    return head * (SIZE // 2) + pair


@pytest.mark.parametrize(
    ("kind", "spread"),
    [("values", (HEADS, GROUP, SIZE)), ("halves", (HEADS, 2, SIZE // 2)), ("neighbours", (HEADS, 1, SIZE // 2, 2))],
)
def test_every_element_has_its_channel(kind: str, spread: Spread) -> None:
    elements = torch.arange(math.prod(spread))
    wanted = torch.tensor([channel(int(i), kind) for i in elements])
    channels = channels_along(len(elements), spread)
    assert channels == len(wanted.unique())
    assert torch.equal(spread_out(torch.arange(channels), spread), wanted)
    table = torch.stack([elements, elements * 10], 1)
    assert torch.equal(spread_out(table[:channels], spread), table[wanted])
    found = shared(table, spread)
    assert found.shape == (channels, len(elements) // channels, 2)
    for number, rows in enumerate(found):
        assert torch.equal(rows, table[wanted == number])


@pytest.mark.parametrize(("spread", "start"), [((-3, 4), 3), ((4, -3), 0), ((-1, 2, 2, -2), 1)])
def test_elements_at_either_end_may_carry_nothing(spread: Spread, start: int) -> None:
    x = torch.arange(10, 17)
    channels = channels_along(7, spread)
    out = spread_out(torch.arange(1, channels + 1), spread)
    carries = out > 0
    assert len(out) == 7 and torch.equal(carrying(x, spread), x[carries])
    assert int(carries.int().argmax()) == start and bool(carries[start : start + 4].all())
    assert torch.equal(shared(x, spread).flatten(), x[carries])
    with pytest.raises(AssertionError, match="8 elements"):
        channels_along(8, spread)


def test_without_a_spread_each_element_is_a_channel() -> None:
    x = torch.arange(5)
    assert channels_along(5, ()) == 5
    assert torch.equal(spread_out(x, ()), x) and torch.equal(shared(x, ()), x[:, None])
    with pytest.raises(AssertionError, match="5 elements"):
        channels_along(5, (2, 3, 4))
