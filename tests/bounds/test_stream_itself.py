"""Bounds of a stream that linears read without a norm: sound for every sum of normalised vectors, reached by one."""

import math

import pytest
import torch
from support import tiny
from support.contract import certified
from torch import Tensor

from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.bounds.linear import enclosing_axes, summed_axes

WIDTH = 24


def gains(number: int, seed: int) -> Tensor:
    """Return gains of so many norms, some of whose channels outweigh the others: fp64 [number, d]."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(number, WIDTH, generator=generator, dtype=torch.float64).abs()
    made[:, ::5] *= 30
    return made


@pytest.mark.parametrize("number", [1, 2, 9])
def test_no_sum_of_normalised_vectors_leaves_the_ellipsoid_and_one_comes_close(number: int) -> None:
    every, axes = gains(number, number), torch.zeros(WIDTH, dtype=torch.float64)
    for gain in every:
        axes = summed_axes(axes, gain.square() * WIDTH)
    rows = torch.randn(300, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bound = (rows * axes.sqrt()).norm(dim=1)
    # What a row reaches: each term points where the row has it.
    reached = sum(math.sqrt(WIDTH) * (rows * gain).norm(dim=1) for gain in every)
    assert bool((reached <= bound).all()) and bool((bound < 1.5 * reached).all())
    assert number > 1 or bool((bound < 1.001 * reached).all())


def test_rows_of_a_table_lie_in_the_ellipsoid_of_their_box_and_length() -> None:
    rows = torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows[:, 3] *= 100
    rows[:, 7] = 0
    caps, length = rows.abs().amax(0), float(rows.norm(dim=1).max())
    axes = enclosing_axes(caps, length)
    inside = (rows.square() / axes.clamp(min=1e-300)).sum(1)
    assert float(axes[7]) == 0 and 0.4 < float(inside.max()) <= 1
    # The outlier channel makes no other one long: 2·d·caps² at most.
    assert bool((axes <= 2.001 * torch.minimum(caps.square() * WIDTH, torch.full_like(caps, length**2))).all())


def test_the_stream_of_a_model_stays_in_its_ellipsoid() -> None:
    """In fp16, where each sum is rounded: the first linear of each sublayer reads what the bounds say at most."""
    model = tiny.build("olmo2", 3, factor=1.0, num_hidden_layers=4).half()
    _, certificate = certified(model)
    exact = certified(model, Arithmetic(exact=True))[1]
    reads: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "up_proj")):
            module.register_forward_pre_hook(lambda _, args, name=name: reads.__setitem__(name, args[0].detach()))
    with torch.no_grad():
        model(torch.arange(96).view(8, 12))
    for name, read in reads.items():
        caps = certificate.ranges[name].input.amax
        assert bool((read.abs().amax((0, 1)) <= caps).all()), name
        weight = model.get_submodule(name).weight.double()
        made = certificate.ranges[name].output.amax.double()
        assert bool(((read.double() @ weight.t()).abs().amax((0, 1)) <= made).all()), name
        assert bool((made >= exact.ranges[name].output.amax.double()).all()), name
