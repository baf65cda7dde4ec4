"""No sentence's vector passes the bounds of what stands behind an encoder, whatever modules and weights stand there."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.bounds.linear import least_of, rms_normalised
from bf16_to_fp16.bounds.side_modules import Behind, Vector, pooled
from bf16_to_fp16.checkpoint.side_modules import MODES, SideModule
from bf16_to_fp16.run.sentence_vectors import SentenceVectors

ACTIVATIONS = ("Identity", "ReLU", "GELU", "SiLU", "Tanh", "Sigmoid")
LENGTH = 12


def drawn(seed: int) -> tuple[list[SideModule], Tensor]:
    """Return random modules, and a bound of each channel of the tokens."""
    generator = torch.Generator().manual_seed(seed)

    def pick(values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=generator))]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    width = 6
    caps = (normal(width).abs() * pick((1e-6, 1.0, 300.0))).half().double()
    modes = [pick(tuple(MODES)) for _ in range(pick((1, 2)))]
    modules = [SideModule("1_Pooling", "Pooling", {"pooling_mode": modes}, {})]
    width *= len(modes)
    for i in range(2, 2 + pick((1, 2, 3))):
        kind = pick(("Dense", "Dense", "LayerNorm", "Normalize", "Dropout"))
        config, tensors = dict[str, Any](), dict[str, Tensor]()
        if kind == "Dense":
            config = {
                "activation_function": f"torch.nn.{pick(ACTIVATIONS)}",
                "use_residual": pick((False, False, True)),
            }
            out = width if config["use_residual"] else pick((1, 3, 8))
            tensors["linear.weight"] = normal(out, width) * pick((1e-8, 1e-3, 1.0, 30.0))
            if pick((True, False)):
                tensors["linear.bias"] = normal(out) * pick((1e-5, 1.0, 1e4))
            width = out
        elif kind == "LayerNorm":
            tensors = {"norm.weight": normal(width) * pick((1e-3, 1.0, 3e4)), "norm.bias": normal(width)}
        modules.append(SideModule(f"{i}_{kind}", kind, config, {name: x.half() for name, x in tensors.items()}))
    return modules, caps


def states_of(modules: list[SideModule], caps: Tensor, seed: int) -> Tensor:
    """Return rows of tokens as large as can be, in the directions in which the first linear reads, or that cancel."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randn(48, LENGTH, len(caps), generator=generator).sign()
    signs[:16] = signs[:16, :1]
    first = next((module.tensors["linear.weight"] for module in modules if "linear.weight" in module.tensors), None)
    if first is not None:
        rows = first.sign()[:, : len(caps)].float()
        signs[16 : 16 + len(rows)] = rows[:, None]
    signs[30:34, ::2] = -signs[30:34, 1::2]
    signs[34] = 0
    return (signs.double() * caps).half()


@pytest.mark.parametrize("strict", [False, True])
def test_no_vector_passes_the_bounds_of_random_modules(strict: bool) -> None:
    proven = broken = 0
    for seed in range(300):
        modules, caps = drawn(seed)
        behind, vector = Behind(caps, Arithmetic(LENGTH, norms16=strict, sums16=strict)), Vector(caps)
        states, mask = states_of(modules, caps, seed), torch.ones(48, LENGTH, dtype=torch.int64)
        mask[1::3, LENGTH // 2 :] = 0
        model, made = SentenceVectors(modules).half(), torch.zeros(0)
        with torch.no_grad():
            for i, module in enumerate(modules):
                vector = behind.run(module, vector)
                model.order = [each.name for each in modules[: i + 1]]
                made = model(states, mask).double()
                if all(site.holds for site in behind.sites.values()):
                    assert made.isfinite().all(), (seed, module.name)
                    assert bool((made.abs() <= vector.caps).all()), (seed, module.name)
                    assert float(made.abs().amax(1).min()) >= vector.least, (seed, module.name)
        proven += all(site.holds for site in behind.sites.values())
        broken += not bool(made.isfinite().all())
    # Both ends are met.
    assert proven > 60 and broken > 20


@pytest.mark.parametrize("norms16", [False, True])
def test_a_short_vector_that_is_normalised_becomes_longer(norms16: bool) -> None:
    """What follows reads channels of up to 1, however small they were before."""
    arithmetic = Arithmetic(8, norms16=norms16)
    behind, least = Behind(torch.full((2,), 0.01, dtype=torch.float64), arithmetic), 0.009
    vector = behind.run(SideModule("3_Normalize", "Normalize", {}, {}), Vector(behind.tokens, least))
    assert bool((vector.caps >= 1).all()) and behind.sites["3_Normalize (zero vector)"].bound == 1 / least
    tensors = {"linear.weight": torch.tensor([[-60000.0, 60000.0]]).half()}
    behind.run(SideModule("4_Dense", "Dense", {}, tensors), vector)
    assert behind.sites["4_Dense.linear"].bound >= 120000


@pytest.mark.parametrize("squared", [False, True])
def test_the_least_that_a_last_norm_gives_is_nearly_reached(squared: bool) -> None:
    """By a token whose mean square is eps, all of it in the channel of the least gain; squared: in fp16, one by one."""
    width, eps = 64, 2.0**-8
    gain = torch.linspace(0.5, 3, width).half()
    arithmetic = Arithmetic(8, norms16=squared)
    least = least_of(rms_normalised(gain.double(), arithmetic), arithmetic)
    read = torch.zeros(width).half()
    read[0] = math.sqrt(eps * width)
    total = read.square().mean() if squared else read.float().square().mean()
    normed = read * (total + eps).rsqrt().to(read.dtype if squared else torch.float32)
    made = gain * normed.half()
    # Where squares are summed in fp16 rounding up each time may make the sum larger than here.
    assert 0.9 * least < 0.5 * math.sqrt(0.5) * math.sqrt(width) / 8 and least <= float(made.abs().max())
    gain[5] = 0
    assert least_of(rms_normalised(gain.double(), arithmetic), arithmetic) == 0


@pytest.mark.parametrize("mode", ["lasttoken", "cls", "mean", "max"])
def test_only_a_tokens_own_channels_are_no_zeros_and_not_behind_a_prompt(mode: str) -> None:
    for prompt in (True, False):
        behind = Behind(torch.ones(4, dtype=torch.float64), Arithmetic(8), 0.5)
        config = {"pooling_mode": mode, "include_prompt": prompt}
        vector = behind.run(SideModule("1_Pooling", "Pooling", config, {}), Vector(behind.tokens, behind.least))
        behind.run(SideModule("2_Normalize", "Normalize", {}, {}), vector)
        assert behind.sites["2_Normalize (zero vector)"].holds == (mode in ("lasttoken", "cls") and prompt)


def test_the_length_of_a_faint_vector_is_rounded_to_fp16s_step() -> None:
    faint = torch.full((3,), 2.0**-24, dtype=torch.float16)
    behind = Behind(faint.double(), Arithmetic(8))
    vector = behind.run(SideModule("3_Normalize", "Normalize", {}, {}), Vector(behind.tokens, 2.0**-24))
    made = torch.nn.functional.normalize(faint, dim=0)
    assert float(made.max()) >= vector.least > 0 and float(made.max()) <= float(vector.caps.max())


def test_what_a_mean_divides_by_in_fp16_stops_growing_where_ones_are_rounded_away() -> None:
    """Tokens that are summed in blocks, and counted one after the other, come to twice their mean of 4,096."""
    arithmetic, caps = Arithmetic(4096, norms16=True, sums16=True), torch.ones(2, dtype=torch.float64)
    made, total = pooled("mean", caps, arithmetic)
    assert float(made.min()) >= 2 and total >= 4096
    count = torch.zeros((), dtype=torch.float16)
    for _ in range(4096):
        count = count + torch.ones((), dtype=torch.float16)
    assert float(count) == 2048
    weighted, _ = pooled("weightedmean", caps, arithmetic)
    assert float(weighted.min()) >= 1 + 4096 * 2.0**-11


@pytest.mark.parametrize("mode", ["mean", "weightedmean"])
def test_the_weights_of_small_tokens_are_summed_too(mode: str) -> None:
    arithmetic = Arithmetic(512, norms16=True)
    made, total = pooled(mode, torch.full((2,), 1e-6, dtype=torch.float64), arithmetic)
    assert total >= (512 * 513 / 2 if mode == "weightedmean" else 512)
    # Sum and divisor are rounded to fp16 each, and their quotient.
    assert float(made.min()) >= 1e-6 * (1 + 2.0**-11) ** 2
