"""Bounds of norms, against the worst inputs of each."""

import copy
import math

import pytest
import torch
from support import tiny
from support.contract import certified
from transformers.models.t5.modeling_t5 import T5LayerNorm

from bf16_to_fp16.bounds import factored
from bf16_to_fp16.bounds.arithmetic import UNIT32, Arithmetic, norm_units
from bf16_to_fp16.bounds.linear import NORM_ERROR, NormOutput, lengthened, rms_normalised


@pytest.mark.parametrize("magnitude", [10.0, 2000.0, 60000.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_layer_norms_of_nearly_constant_inputs_stay_under_their_bound(magnitude: float, dtype: torch.dtype) -> None:
    """Where all channels are almost the same, fp32 cancellation makes n longer than √d; the bound allows for it."""
    model = tiny.build("pegasus", 0, factor=1.0)
    width = model.config.d_model
    with torch.no_grad():
        model.model.shared.weight.fill_(magnitude / math.sqrt(width))
        model.model.encoder.embed_positions.weight.zero_()
    _, certificate = certified(model.half())
    path = "model.encoder.layers.0.self_attn_layer_norm"
    norm = copy.deepcopy(model.get_submodule(path)).to(dtype)
    top = certificate.ranges[path].output.amax.double()
    for spread in (0.0, 1e-3, 1e-2, 0.1, 1.0, 30.0):
        x = (magnitude + spread * torch.randn(500, width)).clamp(max=magnitude).to(dtype)
        assert bool((norm(x).detach().double().abs() <= top).all())


def nasty(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows that are hard on a norm: nearly constant ones, with outliers first or last, drifting, alternating."""
    generator = torch.Generator().manual_seed(width)
    rows = []
    for mean in (1.0, 70.0, 2999.0, 30000.0):
        for power in (0, 4, 8, 10, 11, 12, 16, 20, 24):
            noise = torch.randn(12, width, generator=generator) * torch.rand(12, 1, generator=generator)
            noise[4:6] = noise[4:6].sort(dim=1).values
            noise[6:8] = torch.tensor([1.0, -1.0]).repeat(width)[:width]
            noise[8:10] = noise[8:10].abs()
            noise[10, 0], noise[11, -1] = 30.0, 30.0
            rows.append(mean * (1 + 2.0**-power * noise))
    return torch.cat(rows).clamp(-65504, 65504).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_layer_norms_are_no_further_off_than_their_units(dtype: torch.dtype) -> None:
    """Mean, standard deviation and length of the output against fp64, on the kernel of this machine."""
    shares: list[float] = []
    most: dict[int, float] = {}
    for width in (5, 24, 64, 128, 257, 768, 1024, 4096):
        x = nasty(width, dtype)
        exact, magnitude = x.double(), x.double().abs().mean(1)
        unit = UNIT32 * magnitude
        for eps in (1e-5, 1e-12):
            # With fp32 gains, fp16 inputs get fp32 statistics, from a kernel of their own.
            _, mean, rstd = torch.native_layer_norm(x, [width], torch.ones(width), torch.zeros(width), eps)
            assert mean.dtype == rstd.dtype == torch.float32
            n = (x.float() - mean) * rstd
            deviation = exact.std(1, correction=0)
            slack = NORM_ERROR * deviation
            off = (mean.double()[:, 0] - exact.mean(1)).abs() - slack
            found = (rstd.double()[:, 0] ** -2 - eps).clamp(min=0).sqrt()
            short = torch.where(found > 0, deviation - found, 0.0) - slack
            most[width] = max(most.get(width, 0.0), float((off / unit).max()), float((short / unit).max()))
            assert most[width] <= norm_units(width)
            length = n.double().norm(dim=1) / width**0.5
            allowed = torch.tensor([lengthened(m, eps, width) for m in magnitude.tolist()]) * (1 + NORM_ERROR)
            shares.append(float((length / allowed).max()))
    assert max(shares) <= 1
    # The control: four units, which were taken once, are too few.
    assert dtype == torch.float16 or max(most.values()) > 4


def test_rms_norms_stay_in_their_ball() -> None:
    for width in (5, 64, 1024, 4096):
        norm = T5LayerNorm(width, eps=0.0).requires_grad_(False)
        radius = rms_normalised(torch.ones(width, dtype=torch.float64), Arithmetic()).radius
        x = nasty(width, torch.float32)
        lengths = norm(x[x.abs().amax(1) > 0]).double().norm(dim=1)
        assert 0.9999 * width**0.5 < float(lengths.max()) <= radius


@pytest.mark.parametrize("size", [10.0, 100.0, 300.0])
@pytest.mark.parametrize("wide", [0, factored.WIDE])
def test_weights_far_too_large_for_a_layer_norm_get_a_verdict(
    size: float, wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factored, "WIDE", wide)  # both ways of finding an eigenvalue, without a large matrix
    model = tiny.build("pegasus", encoder_layers=16, decoder_layers=16)
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() == 2:
                tensor.copy_((torch.randn(tensor.shape) * size).half())
    _, found = certified(model, Arithmetic(64))
    assert not found.holds and not any(math.isnan(site.largest) for site in found.sites)


def test_a_norms_output_that_is_multiplied_is_rounded_once_more() -> None:
    """f·(x + e) in fp16: f·|x| and f·|e| are each rounded by a unit, and by a subnormal's half."""
    a, factor = Arithmetic(), 3.0
    gain, absolute = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([0.5, 1e-3], dtype=torch.float64)
    made = NormOutput(gain, None, 4.0, 0.25, absolute)
    scaled = made.scaled(factor, a)
    reached = (made.exact * (1 + made.relative) + absolute) * factor
    assert (scaled.bound >= reached * (1 + a.unit) + a.tiny).all()
    assert (scaled.bound <= (reached * (1 + a.unit) + a.tiny) * 1.001).all()
    error = NormOutput(gain, None, 0.0, 0.25, absolute).scaled(factor, a)  # all that is there is the error
    assert (error.bound >= absolute * factor * (1 + a.unit) + a.tiny).all()


def test_the_axes_of_a_norms_output_hold_its_relative_error() -> None:
    gain = torch.tensor([1.0, 2.0], dtype=torch.float64)
    made = NormOutput(gain, None, 4.0, 0.25, torch.zeros(2, dtype=torch.float64))
    assert (made.axes >= (gain * 4.0 * 1.25).square()).all()
