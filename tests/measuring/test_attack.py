"""The adversary: it beats random inputs, stays inside what the certificate covers, and never passes a bound."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support import exhaustive, tiny
from support.contract import bound_at
from support.inside import bound
from support.masks import spanning

from bf16_to_fp16.bounds.certificate import fp16_weights
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.families.resolve import ModelTensors, resolve, source_weights
from bf16_to_fp16.families.wiring import Attention
from bf16_to_fp16.measuring import attack as attacking
from bf16_to_fp16.measuring.attack import _Adversary, _Elite, attack, watched
from bf16_to_fp16.measuring.observer import SiteObserver
from bf16_to_fp16.measuring.stock import load
from bf16_to_fp16.numerics import FP16_MAX

DEMO = Path(__file__).parents[2] / "bf16_to_fp16" / "demo_data"
HARD = ("model.decoder.layers.1.encoder_attn:scores", "model.decoder.layers.0.encoder_attn.k_proj")
"""Sites of the trained Pegasus that random inputs hardly stir."""


def test_it_beats_random_inputs_on_trained_weights_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attacking, "FLIPS", 1)
    checkpoint = open_checkpoint(DEMO / "pegasus-bytes")
    layout = resolve(checkpoint)
    # As trained it overflows fp16; what is searched here is fp32 arithmetic on the rounded weights.
    model = load(checkpoint.folder, torch.float16, half=True)
    result = attack(model, layout, steps=4, length=6, sites=HARD)
    certificate = bound(layout, fp16_weights(checkpoint, layout))
    gains = {f.name: max(f.tokens, f.embeddings) / f.random for f in result.sites if f.name in HARD}
    assert len(gains) == len(HARD) and max(gains.values()) > 1.1, gains  # more steps reach more
    for found in result.sites:
        assert max(found.random, found.tokens, found.embeddings) <= bound_at(certificate, found.name), found.name


@pytest.mark.parametrize("kind", exhaustive.beyond(exhaustive.of_today(tiny.FIRST, 5), tiny.SEARCHED))
def test_no_search_passes_a_bound_in_fp32_or_fp16(kind: str, few_forwards: None) -> None:
    model = tiny.build(kind, 1, factor=1.0, **tiny.few_layers(kind)).half()
    source = ModelTensors(model)
    layout = resolve(source)
    result = attack(model, layout, steps=4, length=5)
    certificate = bound(layout, source_weights(source, layout))
    assert len(result.sites) > 20 and any(found.ids for found in result.sites)
    for found in result.sites:
        assert found.worst <= bound_at(certificate, found.name), found
    # The mask's own add runs in the first stack and in the attention to it.
    attentions = [w for w in layout.topology if isinstance(w, Attention)]
    again = {w.at: (w.bias and not w.radius) or (w.memory and not w.scaled) for w in attentions}
    adds = {f"{w.at}:add#3" if w.rotary else f"{w.at}:add#2" if again[w.at] else f"{w.at}:add" for w in attentions}
    first = layout.stacks()[0].ends.at
    assert any(f.name.startswith(first) for f in result.sites if f.name in adds)


def test_a_seed_decides_everything_and_nothing_else_is_touched(few_forwards: None) -> None:
    model = tiny.build("pegasus", 2, factor=1.0, **tiny.few_layers("pegasus"))
    before = {name: p.clone() for name, p in model.named_parameters()}
    layout = resolve(ModelTensors(model))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one = attack(model, layout, steps=2, length=5, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    assert attack(model, layout, steps=2, length=5, seed=3) == one
    assert attack(model, layout, steps=2, length=5, seed=4).sites != one.sites
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def adversary_of(model: Any) -> _Adversary:
    return _Adversary(model.requires_grad_(False), resolve(ModelTensors(model)), 0, 6)


def test_mixtures_stay_in_the_hull_of_the_table() -> None:
    model = tiny.build("t5", 0, factor=1.0)
    adversary = adversary_of(model)
    sites = ["encoder.block.0.layer.0:add"] * 5
    found = adversary.in_hull(sites, adversary.embed(adversary.draw(5)), 6, lambda: None)
    table = model.shared.weight
    assert len(found) == 2
    for side in found:
        assert bool((side <= table.amax(0) + 1e-5).all()) and bool((side >= table.amin(0) - 1e-5).all())


def test_the_best_inputs_of_a_goal_may_come_from_any_row() -> None:
    elite = _Elite()
    x = torch.arange(4.0)[:, None]
    elite.offer((x,), {"a": torch.tensor([1.0, 5.0, 3.0, 2.0]), "b": torch.tensor([9.0, math.nan, 0.0, 1.0])})
    elite.offer((x + 10,), {"a": torch.tensor([5.0, 4.0, 0.0, 0.0]), "b": torch.zeros(4)})
    # 5 again is taken for the same input; NaN is past every limit.
    assert elite.starts(["a", "b", "a", "a", "a", "b"])[0].flatten().tolist() == [1, 1, 11, 2, 1, 0]


@pytest.mark.parametrize("kind", exhaustive.beyond([*tiny.CORE, "ministral3"], tiny.SEARCHED))
def test_what_it_climbs_is_what_the_audit_measures(kind: str) -> None:
    model = tiny.build(kind, 3, factor=1.0, **tiny.few_layers(kind))
    model.set_attn_implementation("eager")
    adversary = adversary_of(model)
    layout, ids = adversary.layout, adversary.draw(3)
    observer = SiteObserver(model)
    with torch.no_grad(), watched(model, layout) as values, observer:
        adversary.run(ids, model)
    seen = {s.name: s.amax for s in observer.sites()}
    # Scores are of the last call alone, and norms are named as in fp16.
    for name, value in values.items():
        if name in seen and not (name.endswith(":scores") and "query" in name):
            assert float(value.abs().max()) == pytest.approx(seen[name], rel=1e-5), name
    here = [n for n in values if ":to" not in n]  # fp32 casts nothing
    assert len([n for n in here if n in seen]) > 0.7 * len(here)
    # Embeddings of the same ids give the same values, Pegasus's scale included.
    with torch.no_grad(), watched(model, layout) as again:
        adversary.run(adversary.embed(ids))
    last = [*values][-1]
    assert torch.allclose(values[last], again[last], rtol=1e-4, atol=1e-5)


def test_what_the_search_has_no_way_to_is_gone_after_by_what_it_comes_from(few_forwards: None) -> None:
    """Of scores it follows their products; the mask that has to hide them passes its limit where these do not."""
    model = spanning("t5", 0.75 * FP16_MAX)
    layout, path = resolve(ModelTensors(model)), "decoder.block.0.layer.0.SelfAttention"
    result = attack(model, layout, steps=4, sites=[f"{path}:masked"])
    assert [site.name for site in result.sites if site.ids is not None] == [f"{path}:scores"]
    worst = {site.name: site.worst for site in result.sites}
    assert worst[f"{path}:masked"] > FP16_MAX > worst[f"{path}:scores"] and result.worst_headroom_bits < 0
    everything = attack(model, layout, steps=1, sites=["no such site"])
    assert sum(site.ids is not None for site in everything.sites) > 10
