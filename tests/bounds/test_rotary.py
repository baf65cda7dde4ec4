"""Bounds of queries and keys that are turned by rotary positions without a norm before: sound for every angle, and
reached by some."""

import math

import pytest
import torch
from torch import Tensor

from bf16_to_fp16.bounds.arithmetic import TINY, UNIT, Arithmetic
from bf16_to_fp16.bounds.attention import pair_order, rotated, rotated_score_bounds
from bf16_to_fp16.bounds.factored import Factored
from bf16_to_fp16.bounds.linear import LinearBound, bound_linear, rms_normalised
from bf16_to_fp16.families.wiring import Rotary

WIDTH, SIZE, HEADS, KV_HEADS = 24, 10, 4, 2


def drawn(heads: int, bias: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return a projection's weight and bias, some of whose channels outweigh the others."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(heads * SIZE, WIDTH, generator=generator, dtype=torch.float64)
    weight[:: SIZE - 3] *= 6
    return weight, bias * torch.randn(heads * SIZE, generator=generator, dtype=torch.float64)


def lengths(values: Tensor) -> Tensor:
    """Return the lengths of pairs, whose first channels are before the second ones."""
    return values.view(2, -1).norm(dim=0)


def largest_product(query: tuple[Tensor, Tensor], key: tuple[Tensor, Tensor]) -> float:
    """Return the largest product of a query and a key that an adversary finds who turns every pair as she likes; both
    are a map of a normalised vector plus a bias."""
    best = 0.0
    for seed in range(8):
        drawing = torch.Generator().manual_seed(seed)
        inputs = list(torch.randn(2, WIDTH, generator=drawing, dtype=torch.float64))
        for _ in range(60):
            for side in (0, 1):
                inputs = [math.sqrt(WIDTH) * x / x.norm() for x in inputs]
                made = [weight @ x + bias for (weight, bias), x in zip((query, key), inputs, strict=True)]
                # The other is turned into this one's direction; along the gradient this one's input does best.
                inputs[side] = (query, key)[side][0].t() @ (
                    made[side] * (lengths(made[1 - side]) / lengths(made[side])).repeat(2)
                )
            best = max(best, float(lengths(made[0]) @ lengths(made[1])))
    return best


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("bias", [0.0, 5.0])
def test_no_rotation_passes_the_bound_of_its_scores_and_one_comes_close(bias: float, interleaved: bool) -> None:
    exact, gain = Arithmetic(exact=True), torch.linspace(0.5, 2, WIDTH, dtype=torch.float64)
    sides = drawn(HEADS, bias, 1), drawn(KV_HEADS, bias, 2)
    source = rms_normalised(gain, exact)
    one, other = (
        rotated(bound_linear(source, *side, exact), heads, turning(interleaved), exact)
        for side, heads in zip(sides, (HEADS, KV_HEADS), strict=True)
    )
    made = rotated_score_bounds(one, other, exact, 1.0)
    order = pair_order(SIZE, turning(interleaved))
    assert order.tolist()[:2] == [0, 2 if interleaved else 1]
    for h in range(HEADS):
        places = order + h * SIZE, order + h // (HEADS // KV_HEADS) * SIZE
        query, key = (
            (weight[place] * gain, fixed[place]) for (weight, fixed), place in zip(sides, places, strict=True)
        )
        found, near = largest_product(query, key), 1.12 if bias else 1.08
        assert found <= float(made.product[h]) < near * found and found <= float(made.partial[h])
        # The same key, turned by half a turn, gives the negative product.
        assert 2 * found <= float(made.span[h]) < near * 2 * found
        # Turned far enough, one channel is as long as its pair.
        for (weight, fixed), bound in ((query, one.bound[places[0]]), (key, other.bound[places[1]])):
            pairs = weight.view(2, -1, WIDTH).transpose(0, 1)
            reach = math.sqrt(WIDTH) * torch.linalg.matrix_norm(pairs, 2) + (0 if bias else lengths(fixed))
            assert bool((bound.view(2, -1) >= reach).all())
            assert bias or bool((bound.view(2, -1) <= 1.001 * reach).all())


def turning(interleaved: bool = False, turned: int = 0) -> Rotary:
    return Rotary("", interleaved=interleaved, turned=turned)


def test_pairs_of_a_head_of_which_a_part_turns_are_in_either_part() -> None:
    assert pair_order(8, turning(turned=4)).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert pair_order(8, turning(turned=6)).tolist() == [0, 1, 2, 6, 3, 4, 5, 7]


def alone(scale: float, error: float, radius: float) -> LinearBound:
    """Return the bounds of one pair of channels of any direction, that are a normalised vector of length ``radius``
    times ``scale``, off by ``error`` each."""
    pair = torch.ones(2, dtype=torch.float64)
    most = pair * (scale * radius + error)
    eye = Factored(torch.eye(2, dtype=torch.float64) * scale, pair)
    return LinearBound(eye, radius, pair * scale * radius, 0 * pair, pair * error, most, most)


@pytest.mark.parametrize("scale", [1.0, 2.0**-20])
def test_rotations_of_projections_need_the_allowance_of_their_roundings(scale: float) -> None:
    """One pair of channels, in every direction and turned by every angle, in fp16 as stock code computes it."""
    ways = torch.linspace(0, 2 * math.pi, 1201, dtype=torch.float64)[:, None]
    left, right = (scale * math.sqrt(2) * ways.cos()).half(), (scale * math.sqrt(2) * ways.sin()).half()
    radius = float(torch.hypot(left.double(), right.double()).max()) / scale
    angles = torch.linspace(0, 2 * math.pi, 997)[None]
    cos, sin = angles.cos().half(), angles.sin().half()
    x, y = (left * cos + -right * sin).double(), (right * cos + left * sin).double()
    made = rotated(alone(scale, 0.0, radius), 1, turning(), Arithmetic())
    most, longest = float(torch.maximum(x.abs(), y.abs()).max()), float(torch.hypot(x, y).max())
    assert scale * radius < most <= float(made.bound.min())
    assert scale * radius < longest <= float(made.peaks[0, 0] + made.errors[0, 0])
    # Against a key so large that what a subnormal query gains by its roundings counts.
    key = rotated(alone(256.0, 0.0, 1.0), 1, turning(), Arithmetic())
    scores = rotated_score_bounds(made, key, Arithmetic(splits=0), 1.0)
    assert 256 * longest <= float(scores.product[0]) and 2 * 256 * longest <= float(scores.span[0])
    if scale == 1:
        assert 256 * longest > 0.99 * float(scores.product[0])
    else:
        assert longest > scale * radius * (1 + 2 * UNIT) ** 2 + TINY


def test_what_a_projection_is_off_by_is_in_the_bound_of_turned_scores() -> None:
    """Queries and keys that are off by half of themselves, in both channels of their pair."""
    exact = Arithmetic(exact=True)
    query, key = rotated(alone(3.0, 1.5, 1.0), 1, turning(), exact), rotated(alone(5.0, 2.5, 1.0), 1, turning(), exact)
    most = (3 + math.sqrt(2) * 1.5) * (5 + math.sqrt(2) * 2.5)
    made = rotated_score_bounds(query, key, exact, 1.0)
    assert most <= float(made.product[0]) < 1.001 * most
    assert most <= float(made.partial[0]) and 2 * most <= float(made.span[0])
    assert 3 + math.sqrt(2) * 1.5 <= float(query.bound[1]) < 1.001 * (3 + math.sqrt(2) * 1.5)


def test_what_queries_grow_by_multiplies_what_their_subnormals_are_off_by() -> None:
    arithmetic, gain = Arithmetic(), torch.ones(WIDTH, dtype=torch.float64)
    silent = bound_linear(rms_normalised(gain, arithmetic), torch.zeros(SIZE, WIDTH), None, arithmetic)
    plain, grown = (rotated(silent, 1, turning(False), arithmetic, factor).errors for factor in (1.0, 8.0))
    assert bool((plain > 0).all()) and bool((grown >= 8 * plain).all())
