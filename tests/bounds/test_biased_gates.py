"""Bounds of gated neurons whose gate and linear have biases."""

from __future__ import annotations

import math

import pytest
import torch

from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.bounds.feed_forward import GatedNeurons
from bf16_to_fp16.bounds.linear import bound_linear, rms_normalised
from bf16_to_fp16.bounds.spectral import Spectra

WIDTH, NEURONS = 12, 9


@pytest.mark.parametrize("bias", [0.125, 1.0, 40.0])
def test_gated_neurons_with_biases_reach_their_bounds(bias: float) -> None:
    """Gates as large as their linears, and every bias the same share of its row: one input reaches each bound."""
    exact = Arithmetic(exact=True)
    weight = torch.randn(NEURONS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    added = bias * weight.norm(dim=1)
    linear = bound_linear(rms_normalised(torch.ones(WIDTH, dtype=torch.float64), exact), weight, added, exact)
    made = GatedNeurons(linear, linear, exact, 1.0, Spectra(lambda name: weight))
    most = (math.sqrt(WIDTH) * weight.norm(dim=1) + added).square()
    assert bool((most <= made.bound).all()) and bool((made.bound <= 1.001 * most).all())


def test_a_bias_is_a_column_of_the_weights_dtype_where_that_holds_it() -> None:
    """Where the dtype of the weight does not hold what does not depend on the input, the matrix is fp64."""
    exact = Arithmetic(exact=True)
    weight = torch.randn(NEURONS, WIDTH, generator=torch.Generator().manual_seed(2)).half()
    added = torch.full((NEURONS,), 1 / 3)
    source = rms_normalised(torch.ones(WIDTH, dtype=torch.float64), exact)
    linear = bound_linear(source, weight, added, exact)
    made = GatedNeurons(linear, linear, exact, 1.0, Spectra(lambda name: weight))
    assert made.gate.matrix.dtype == torch.float64
    held = bound_linear(source, weight, added.half(), exact)
    assert GatedNeurons(held, held, exact, 1.0, Spectra(lambda name: weight)).gate.matrix.dtype == torch.float16
