"""Bounds of what attention computes are sound for every input: rotary positions, masks in fp16, sums over blocks."""

import copy
import math
from typing import Any

import pytest
import torch
from support import masks, tiny
from support.adversary import ENCODER, adverse_inputs, observe
from support.contract import bound_at, broken, certified, layout_of
from torch import Tensor

from bf16_to_fp16.bounds.arithmetic import TINY, UNIT, Arithmetic
from bf16_to_fp16.bounds.attention import (
    Capped,
    RotatedNorm,
    capped_span,
    linear_scores,
    norm_scores,
    pair_order,
    rotated_linear,
    rotated_norm,
    rotation_error,
)
from bf16_to_fp16.bounds.factored import Factored
from bf16_to_fp16.bounds.findings import Certificate
from bf16_to_fp16.bounds.linear import LinearBound, NormOutput, block_sums, bound_linear, rms_normalised
from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.families.wiring import Attention, Rotary
from bf16_to_fp16.measuring.observer import SiteObserver
from bf16_to_fp16.numerics import FP16_MAX

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
        rotated_linear(bound_linear(source, *side, exact), heads, turning(interleaved), exact)
        for side, heads in zip(sides, (HEADS, KV_HEADS), strict=True)
    )
    made = linear_scores(one, other, exact, 1.0)
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


def turned_pair(scale: float) -> tuple[float, float, float]:
    """One pair of channels, in every direction and turned by every angle, in fp16 as stock code computes it: its
    length before and, after, its largest channel and its length."""
    ways = torch.linspace(0, 2 * math.pi, 1201, dtype=torch.float64)[:, None]
    left, right = (scale * math.sqrt(2) * ways.cos()).half(), (scale * math.sqrt(2) * ways.sin()).half()
    angles = torch.linspace(0, 2 * math.pi, 997)[None]
    cos, sin = angles.cos().half(), angles.sin().half()
    x, y = (left * cos + -right * sin).double(), (right * cos + left * sin).double()
    before = torch.hypot(left.double(), right.double())
    return float(before.max()), float(torch.maximum(x.abs(), y.abs()).max()), float(torch.hypot(x, y).max())


@pytest.mark.parametrize("scale", [1.0, 2.0**-20])
def test_rotations_of_projections_need_the_allowance_of_their_roundings(scale: float) -> None:
    length, largest, longest = turned_pair(scale)
    made = rotated_linear(alone(scale, 0.0, length / scale), 1, turning(), Arithmetic())
    assert length < largest <= float(made.bound.min())
    assert length < longest <= float(made.peaks[0, 0] + made.errors[0, 0])
    # Against a key so large that what a subnormal query gains by its roundings counts.
    key = rotated_linear(alone(256.0, 0.0, 1.0), 1, turning(), Arithmetic())
    scores = linear_scores(made, key, Arithmetic(splits=0), 1.0)
    assert 256 * longest <= float(scores.product[0]) and 2 * 256 * longest <= float(scores.span[0])
    if scale == 1:
        assert 256 * longest > 0.99 * float(scores.product[0])
    else:
        assert longest > length * (1 + 2 * UNIT) ** 2 + TINY


@pytest.mark.parametrize("scale", [1.0, 2.0**-20])
def test_turned_queries_and_keys_need_the_allowance_of_their_roundings(scale: float) -> None:
    source = rms_normalised(torch.full((2,), scale, dtype=torch.float64), Arithmetic(), once=True)
    made = rotated_norm(source, Arithmetic(), 1, turning())
    _, largest, longest = turned_pair(scale)
    before = scale * (1 + source.relative) * source.radius + math.sqrt(2) * float(source.absolute[0])
    assert before < largest <= float(made.bound[0, 0])
    assert before < longest <= float(made.gain[0, 0]) * made.radius + float(made.absolute[0, 0])
    # The norm's roundings may go up where those of the rotation do.
    assert float(made.gain[0, 0]) >= scale * (1 + source.relative) * (1 + rotation_error(Arithmetic())[0])
    # Against a key so large that what a subnormal query gains by its roundings counts.
    large = rms_normalised(torch.full((2,), 256.0, dtype=torch.float64), Arithmetic(), once=True)
    key = rotated_norm(large, Arithmetic(), 1, turning())
    scores = norm_scores(made, key, 1, Arithmetic(splits=0), 1.0)
    most = longest * 256 * math.sqrt(2)
    assert most <= float(scores.product[0]) and 2 * most <= float(scores.span[0])
    if scale == 1:
        assert most > 0.99 * float(scores.product[0])
    else:
        assert most > float(made.gain[0, 0] * key.gain[0, 0]) * 2 * (1 + 2 * UNIT) ** 2 + 4 * TINY


def test_what_a_projection_is_off_by_is_in_the_bound_of_turned_scores() -> None:
    """Queries and keys that are off by half of themselves, in both channels of their pair."""
    exact = Arithmetic(exact=True)
    query, key = (
        rotated_linear(alone(3.0, 1.5, 1.0), 1, turning(), exact),
        rotated_linear(alone(5.0, 2.5, 1.0), 1, turning(), exact),
    )
    most = (3 + math.sqrt(2) * 1.5) * (5 + math.sqrt(2) * 2.5)
    made = linear_scores(query, key, exact, 1.0)
    assert most <= float(made.product[0]) < 1.001 * most
    assert most <= float(made.partial[0]) and 2 * most <= float(made.span[0])
    assert 3 + math.sqrt(2) * 1.5 <= float(query.bound[1]) < 1.001 * (3 + math.sqrt(2) * 1.5)


def test_what_queries_grow_by_multiplies_what_their_subnormals_are_off_by() -> None:
    arithmetic, gain = Arithmetic(), torch.ones(WIDTH, dtype=torch.float64)
    silent = bound_linear(rms_normalised(gain, arithmetic), torch.zeros(SIZE, WIDTH), None, arithmetic)
    plain, grown = (rotated_linear(silent, 1, turning(False), arithmetic, factor).errors for factor in (1.0, 8.0))
    assert bool((plain > 0).all()) and bool((grown >= 8 * plain).all())


SIZES = {"t5-encoder": 48000.0, "gated": 48000.0, "umt5": 48000.0, "pegasus": 60000.0}
SHORT = Arithmetic(512)


@pytest.mark.parametrize("kind", SIZES)
def test_where_a_masked_position_would_win_its_own_bound_says_so_and_no_other(kind: str) -> None:
    stock = masks.spanning(kind, SIZES[kind])
    # Pegasus gives SDPA a mask of bools, which is infinite inside.
    for attention in ("eager",) if kind == "pegasus" else ("eager", "sdpa"):
        for dtype, right in ((torch.float32, True), (torch.bfloat16, True), (torch.float16, False)):
            model = copy.deepcopy(stock).to(dtype)
            model.set_attn_implementation(attention)
            for alone, beside in masks.seen_alone_and_masked(model):
                assert torch.allclose(alone, beside, atol=1e-4) is right
    _, certificate = certified(stock.half(), SHORT)
    over = {site.name: site.kind for site in certificate.sites if not site.holds}
    assert set(over.values()) == {"masked scores"} and all(name.endswith(":masked") for name in over)


def just_certified(kind: str, seed: int) -> tuple[Any, Certificate]:
    """Return an fp16 model whose scores span as much as is certified, with noisy queries and keys and a position bias
    of thousands."""
    model = masks.spanning(kind, SIZES[kind] / 2)
    torch.manual_seed(seed)
    attentions = [w for w in certified(model, SHORT)[0].topology if isinstance(w, Attention) and not w.memory]
    state = model.state_dict()
    with torch.no_grad():
        for w in attentions:
            for path in (w.query, w.key):
                state[f"{path}.weight"].add_(0.3 * torch.randn_like(state[f"{path}.weight"]))
            if w.bias:
                state[w.bias].normal_(0, 3000)
        for _ in range(3):
            spans = {site.name: site.largest for site in certified(copy.deepcopy(model).half(), SHORT)[1].sites}
            for w in attentions:
                free = 2 * float(state[w.bias].abs().max()) if w.bias else 0.0
                state[f"{w.query}.weight"].mul_(min(2.0, (0.999 * FP16_MAX - free) / (spans[f"{w.at}:masked"] - free)))
    model = model.half()
    return model, certified(model, SHORT)[1]


@pytest.mark.parametrize("kind", SIZES)
def test_no_masked_position_of_a_certified_model_has_weight(kind: str) -> None:
    for seed in range(2):
        model, certificate = just_certified(kind, seed)
        assert certificate.holds
        bounds = {site.name: site.bound for site in certificate.sites if site.kind == "masked scores"}
        model.set_attn_implementation("eager")
        observer = SiteObserver(model)
        for _ in range(6):
            ids, mask = torch.randint(0, 97, (8, 11)), torch.rand(8, 11) < 0.6
            ids = ids.masked_fill(torch.rand(8, 11) < 0.3, masks.LOUD)
            mask[:, 0] = True  # a row that sees nothing is not covered
            with observer, torch.no_grad():
                model.get_encoder()(input_ids=ids, attention_mask=mask.long())
                if hasattr(model, "lm_head"):
                    model(input_ids=ids, attention_mask=mask.long(), decoder_input_ids=ids.flip(0))
        seen = {site.name: site for site in observer.sites() if site.name in bounds}
        assert seen.keys() == bounds.keys()
        assert all(site.saturated == 0 and site.amax <= bounds[name] for name, site in seen.items())
        assert max(site.amax for site in seen.values()) > 0.6 * FP16_MAX


def test_two_scores_of_one_query_may_lie_on_either_side_of_0_and_each_be_off() -> None:
    one = RotatedNorm(torch.ones(1, 2), torch.zeros(1, 2), 1.0, torch.ones(1, 4))
    assert 2 <= float(norm_scores(one, one, 1, Arithmetic(exact=True), 1.0).span) < 2.001
    span, large = torch.tensor([1.0]), torch.tensor([100.0])
    assert float(capped_span(span, Capped(large, large, large, torch.tensor([0.5])))) == 2
    assert float(capped_span(1000 * span, Capped(large, large, large, torch.tensor([0.5])))) == 200


BLOCK = 5  # positions of a block, of which a row of the adversary's has one and all but one of another: 9


def model_with_one_sum() -> tuple[Any, Layout, Attention]:
    """Return an fp32 model whose encoder has one layer and makes one sum of the adversary's rows."""
    assert ENCODER == 2 * BLOCK - 1
    model = tiny.build("longt5", 1, factor=1.0, global_block_size=BLOCK, num_layers=1)
    layout, _ = certified(model)
    return model, layout, next(w for w in layout.topology if isinstance(w, Attention))


def reached(model: Any, site: str, inputs: dict[str, torch.Tensor]) -> float:
    """Return which share of its bound a site reaches, none of which is passed."""
    layout, certificate = certified(model, Arithmetic(exact=True))
    seen = observe(model, layout, inputs)
    assert not broken(certificate, {name: amax * (1 - 1e-5) for name, amax in seen.items()}, ("residual", "embedding"))
    return seen[site] / next(s.bound for s in certificate.sites if s.name == site)


def test_a_sum_over_a_block_and_what_is_left_of_a_row_reaches_its_bound() -> None:
    model, layout, w = model_with_one_sum()
    inputs = adverse_inputs(model, layout, 4, 0)
    gain = model.get_submodule(w.norm).weight
    inputs[w.norm] = torch.zeros_like(inputs[w.norm])
    inputs[w.norm][..., int(gain.abs().argmax())] = 300.0
    assert reached(model, f"{w.at}:sum", inputs) > 0.999


def test_keys_and_values_of_sums_reach_their_bounds() -> None:
    model, layout, w = model_with_one_sum()
    model.get_submodule(w.block_norm).weight.data.mul_(4)
    for path in (w.key, w.value):
        rows = model.get_submodule(path).weight * model.get_submodule(w.block_norm).weight
        inputs = adverse_inputs(model, layout, 4, 0)
        inputs[w.block_norm] = 300 * rows[rows.norm(dim=1).argmax()].detach().expand_as(inputs[w.block_norm]).clone()
        assert reached(model, path, inputs) > 0.9


def test_the_position_bias_of_sums_is_in_the_bound_of_the_scores() -> None:
    model, layout, w = model_with_one_sum()
    with torch.no_grad():
        table = model.get_submodule(w.block_bias.removesuffix(".weight")).weight
        table.fill_(3000.0)
    layout, certificate = certified(model)
    seen = observe(model, layout, adverse_inputs(model, layout, 4, 0))
    site = f"{w.at}:add"
    most = max(amax for name, amax in seen.items() if name.partition("#")[0] == site)
    assert 2900 < most <= bound_at(certificate, site) < 3200


def test_the_roundings_of_a_sum_need_their_allowance() -> None:
    # The sum lies between two fp16 numbers and rounds up.
    value, terms = 1 + 5 * 2.0**-10, 9
    source = NormOutput(torch.full((4,), value, dtype=torch.float64), None, 1.0, 0.0, torch.zeros(4).double())
    rounded = float(torch.tensor(terms * value).half())
    assert rounded > terms * value
    bound, length = block_sums(source, terms, terms, Arithmetic(splits=0))
    assert bool((bound >= rounded).all())
    # One component alone may be as long as n.
    assert rounded <= length < terms * value * 1.01
    wide, _ = block_sums(source, terms, 32768, Arithmetic())
    assert bool((wide > bound).all())


def test_the_length_of_sums_is_no_longer_than_their_components_allow() -> None:
    model, layout, w = model_with_one_sum()
    half = copy.deepcopy(model).half()
    layout, certificate = certified(half)
    norm = certificate.ranges[w.block_norm].norm
    assert norm is not None and norm.norm_max >= max(
        float((BLOCK * 2 - 1) * math.sqrt(layout.tensors[f"{w.norm}.weight"].shape[0]) * x.abs())
        for x in half.get_submodule(w.norm).weight.detach().float()
    )


@pytest.mark.parametrize("kind", ["longt5", "longt5-local"])
@pytest.mark.parametrize("length", [3, 8, 13, 40])
def test_a_row_of_scores_has_as_many_keys_as_the_bounds_count(kind: str, length: int) -> None:
    model = tiny.build(kind, factor=1.0, num_layers=1, num_decoder_layers=1)
    layout = layout_of(model)
    w = next(w for w in layout.topology if isinstance(w, Attention))
    ids = torch.ones(1, length, dtype=torch.int64)
    with torch.no_grad():
        found = model.encoder(input_ids=ids, output_attentions=True).attentions[0]
    assert layout.most_keys(w, length) == found.shape[-1] == 9 + (length // 4 if kind == "longt5" else 0)


@pytest.mark.parametrize("kind", ["llama", "phi3", "qwen3"])
def test_recorded_outputs_cover_their_rotated_values(kind: str) -> None:
    layout, certificate = certified(tiny.build(kind))
    for w in (w for w in layout.topology if isinstance(w, Attention)):
        paths = {w.query_norm or w.query, w.key_norm or w.key}
        recorded = max(float(certificate.ranges[path].output.amax.max()) for path in paths)
        rotated_site = next(site for site in certificate.sites if site.name == f"{w.at}:mul")
        assert recorded >= float(torch.tensor(rotated_site.bound))  # ranges are fp32
