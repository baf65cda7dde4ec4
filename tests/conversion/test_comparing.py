"""How far a recorded number may be from one that was found again, on both sides of each limit."""

import pytest

from bf16_to_fp16.conversion.comparison import near


@pytest.mark.parametrize(
    ("key", "said", "found", "same"),
    [
        ("nonfinite", 3, 9, True),
        ("saturated", 0, 1, False),
        ("amax", 100.0, 111.0, True),
        ("amax", 100.0, 120.0, False),
        ("amax", 0.001, 0.01, True),  # 22 bits from the limit
        ("amax", 0.01, 0.5, False),
        ("amax", 100.0, 70000.0, False),  # of an overflow the other must be one too
        ("amax", 66000.0, 900000.0, True),
        ("headroom_bits", 3.0, 3.15, True),
        ("headroom_bits", 3.0, 3.3, False),
        ("headroom_bits", 21.0, 40.0, True),
        ("kl_fp16", 1e-6, 1.9e-6, True),
        ("kl_fp16", 1e-6, 2.1e-6, False),
        ("kl_fp16", 0.0, 5e-10, True),  # the noise of fp32 logits
        ("top1_fp16", 0.99, 0.95, True),
        ("top1_fp16", 0.99, 0.9, False),
        ("elements", 1000.0, 1000.0001, False),
        ("bound", 3.0, 3.0 * (1 + 5e-10), True),
        ("bound", float("inf"), float("inf"), True),
        ("limit", float("nan"), 1.0, False),
    ],
)
def test_a_number_is_the_same_up_to_what_another_machine_changes(
    key: str, said: float, found: float, same: bool
) -> None:
    assert near(key, said, found) is same and near(key, found, said) is same
