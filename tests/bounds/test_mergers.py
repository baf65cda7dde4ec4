"""What images bring into the stream is bounded whatever a tower gives, and some of its outputs come near."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from support import tiny
from support.contract import bound_at, certified, layout_of
from torch import Tensor

from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.families.wiring import Projector
from bf16_to_fp16.measuring.batch import run_batch
from bf16_to_fp16.measuring.probe import images

KINDS = ["qwen2_5_vl", "qwen3_vl", "mistral3"]


def loud(kind: str) -> Any:
    """Return a model in fp16 whose ways into the stream have large weights, as training may leave them."""
    model = tiny.build(kind, 3, factor=1.0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in ("merger", "multi_modal_projector")):
                weight.normal_(0, 0.5) if weight.dim() == 2 else weight.uniform_(0.5, 2)
    return model.half()


def given(module: Any, w: Projector, outputs: Tensor) -> Tensor:
    """Return what a way into the stream makes of so many of the tower's outputs as it reads at once."""
    sizes = {"image_sizes": [(8, 8)]} if w.merging else {}
    made: Tensor = module(outputs, **sizes)
    return made


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_no_output_of_a_tower_passes_the_bounds_and_some_come_near(kind: str) -> None:
    model = loud(kind)
    layout, certificate = certified(model)
    for w in layout.projectors:
        assert w.feed_forward is not None
        limit = bound_at(certificate, w.feed_forward.output)
        assert limit < 65504
        for served in (torch.float32, torch.float16):
            module, found = deepcopy(model.get_submodule(w.at)).to(served), 0.0
            for number, outputs in enumerate(candidates(model, layout, w)):
                made = float(given(module, w, outputs.to(served)).abs().max())
                assert made <= limit, (w.at, served, number)
                found = max(found, made)
            # Between Mistral 3's first two linears only the lengths of rows are known.
            assert found > (0.1 if w.merging else 0.25) * limit


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "mistral3"])
@torch.no_grad()
def test_outputs_that_all_point_where_a_row_has_them_reach_the_first_linears_bound(kind: str) -> None:
    model = loud(kind).float()
    layout, certificate = certified(model)
    (w,) = layout.projectors
    assert w.feed_forward is not None and w.joined == 4
    path = w.merging or w.feed_forward.linear
    weight, gain = (model.get_submodule(each).weight for each in (path, w.norm))
    found = []
    model.get_submodule(path).register_forward_hook(lambda module, inputs, made: found.append(made.abs()))
    for row in weight:
        parts = row.view(-1, 4).t() if w.by_channel else row.view(4, -1)
        given(model.get_submodule(w.at), w, 1e3 * parts * gain)
    limits = certificate.ranges[path].output.amax
    assert bool((torch.cat(found) <= limits).all())
    assert float((torch.cat(found) / limits).max()) > 0.9


def candidates(model: Any, layout: Layout, w: Projector) -> list[Tensor]:
    """Return outputs of a tower, of every size: drawn, constant but for a little, and climbing a gradient."""
    gain = layout.tensors[f"{w.norm}.weight"].shape[0]
    reads = 4 if gain == 16 else 1
    generator = torch.Generator().manual_seed(0)
    outputs = [torch.randn(reads, gain, generator=generator) * size for size in (1e-4, 1.0, 1e3)]
    outputs.append(512 + torch.randn(reads, gain, generator=generator))
    module = deepcopy(model.get_submodule(w.at)).float()
    with torch.enable_grad():
        for channel in range(12):
            x = torch.randn(reads, gain, generator=generator).requires_grad_()
            for _ in range(60):
                (slope,) = torch.autograd.grad(given(module, w, x)[..., channel].sum(), x)
                x = (x + 0.3 * slope / slope.norm().clamp(min=1e-9)).detach().requires_grad_()
            outputs += [x.detach(), -x.detach()]
    return outputs


@torch.no_grad()
def test_what_joins_behind_a_layer_is_in_the_streams_bound() -> None:
    model, quiet = loud("qwen3_vl"), loud("qwen3_vl")
    for parameter in quiet.model.visual.deepstack_merger_list.parameters():
        parameter.zero_()
    layout, certificate = certified(model)
    _, without = certified(quiet)
    first, joined = layout.projectors
    assert not first.behind and joined.behind.endswith("layers.0:add#2") and joined.feed_forward is not None
    # Of the layer it comes behind nothing changes, of the next one all.
    assert certificate.at(joined.behind) == without.at(joined.behind)
    most = certificate.ranges[joined.feed_forward.output].output.amax.double()
    reads = layout.stacks()[0].sublayers[2].norm
    one, other = (each.ranges[reads].input.amax.double() for each in (certificate, without))
    assert bool((one >= (other + most) * (1 - 1e-3)).all()) and bool((one <= (other + most) * (1 + 1e-2)).all())


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_an_image_moves_what_a_text_model_gives(kind: str) -> None:
    """So that equality with images is no equality of texts."""
    model = tiny.build(kind, 1, factor=1.0)
    (batch,) = images(model.config)
    before = run_batch(model, batch)[0]
    for w in layout_of(model).projectors:
        changed = deepcopy(model)
        assert w.feed_forward is not None
        changed.get_submodule(w.feed_forward.output).weight.mul_(3)
        assert not torch.equal(run_batch(changed, batch)[0], before), w.at


@pytest.mark.parametrize("served", [torch.float32, torch.float16])
@torch.no_grad()
def test_no_output_of_a_tower_passes_the_bound_and_the_worst_reaches_it(served: torch.dtype) -> None:
    model = tiny.build("gemma3-images", 3, factor=2.0).half()
    layout, certificate = certified(model)
    w = layout.family.projector
    assert w is not None
    module = deepcopy(model.get_submodule(w.at)).to(served)
    limit = bound_at(certificate, f"{w.at}:scores")
    weight = model.get_submodule(w.at).mm_input_projection_weight.float()
    gain = 1 + model.get_submodule(w.norm).weight.float()
    rows = (weight * gain[:, None]).T
    # For each channel the worst direction, as large as the tower could give it; and what is drawn.
    worst = torch.cat([rows / rows.norm(dim=1, keepdim=True) * size for size in (1.0, 1e3, 6e4)])
    for direction in (*worst, *torch.randn(64, len(gain), generator=torch.Generator().manual_seed(0))):
        outputs = direction.to(served).expand(1, module.patches_per_image**2, -1)
        assert module(outputs).abs().max() <= limit
    reached = max(float(module(d.to(served).expand(1, module.patches_per_image**2, -1)).abs().max()) for d in worst)
    assert reached > 0.98 * limit


def test_the_stream_begins_with_the_larger_of_tokens_and_images() -> None:
    model = tiny.build("gemma3-images", 3, factor=2.0).half()
    projection = model.model.multi_modal_projector.mm_input_projection_weight
    found = []
    for factor in (1.0, 1e-3, 8.0):
        with torch.no_grad():
            projection.mul_(factor)
        layout, certificate = certified(model)
        assert layout.family.projector is not None
        first = next(site for site in certificate.sites if site.kind == "residual" and site.name.endswith("0:add"))
        found.append((bound_at(certificate, layout.family.projector.add), first.bound))
    (large, after_large), (tokens, after_tokens), (small, after_small) = found
    assert small == tokens < large
    assert after_small == after_tokens < after_large


def test_a_norm_reads_vectors_as_long_as_images_bring() -> None:
    model = tiny.build("gemma3-images", 3, factor=2.0).half()
    model.model.multi_modal_projector.mm_input_projection_weight.data.mul_(64)
    layout, certificate = certified(model, target="norm-safe")
    w, first = layout.family.projector, layout.stacks()[0].sublayers[0].norm
    assert w is not None
    outputs = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        brought = deepcopy(model.get_submodule(w.at)).float()(outputs)
    longest = float(brought.norm(dim=-1).max())
    norm = certificate.ranges[first].norm
    assert norm is not None and norm.norm_max >= longest
    assert bound_at(certificate, f"{first} (sum of squares)") >= longest**2
