"""Masks are finite in fp16: what they must add has a bound, and below it masked positions have no weight."""

import copy
from typing import Any

import pytest
import torch
from support import masks
from support.contract import certified

from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.bounds.attention import Capped, Turned, capped_span, turned_score_bounds
from bf16_to_fp16.bounds.findings import Certificate
from bf16_to_fp16.families.wiring import Attention
from bf16_to_fp16.measuring.observer import SiteObserver
from bf16_to_fp16.numerics import FP16_MAX

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


@pytest.mark.parametrize("kind", SIZES)
def test_half_of_that_span_is_certified_and_right(kind: str) -> None:
    half = masks.spanning(kind, SIZES[kind] / 2).half()
    assert certified(half, SHORT)[1].holds
    for attention in ("eager", "sdpa"):
        half.set_attn_implementation(attention)
        assert all(torch.allclose(alone, beside, atol=1e-4) for alone, beside in masks.seen_alone_and_masked(half))


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
    one = Turned(torch.ones(1, 2), torch.zeros(1, 2), 1.0, torch.ones(1, 4))
    assert 2 <= float(turned_score_bounds(one, one, 1, Arithmetic(exact=True), 1.0).span) < 2.001
    span, large = torch.tensor([1.0]), torch.tensor([100.0])
    assert float(capped_span(span, Capped(large, large, large, torch.tensor([0.5])))) == 2
    assert float(capped_span(1000 * span, Capped(large, large, large, torch.tensor([0.5])))) == 200
