"""What images bring into the stream: bounded whatever the tower gives, and some tower's outputs come near it."""

from copy import deepcopy

import pytest
import torch
from support import tiny

from bf16_to_fp16.bounds.certificate import bound
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.rescaling.weights import ModelTensors, source_weights


@pytest.mark.parametrize("served", [torch.float32, torch.float16])
@torch.no_grad()
def test_no_output_of_a_tower_passes_the_bound_and_the_worst_reaches_it(served: torch.dtype) -> None:
    model = tiny.build("gemma3-images", 3, factor=2.0).half()
    layout = resolve(source := ModelTensors(model))
    certificate = bound(layout, source_weights(source, layout))
    w = layout.family.projector
    assert w is not None
    module = deepcopy(model.get_submodule(w.at)).to(served)
    limit = certificate.at(f"{w.at}:scores")
    assert limit is not None
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
        layout = resolve(source := ModelTensors(model))
        certificate = bound(layout, source_weights(source, layout))
        assert layout.family.projector is not None
        first = next(site for site in certificate.sites if site.kind == "residual" and site.name.endswith("0:add"))
        found.append((certificate.at(layout.family.projector.add), first.bound))
    (large, after_large), (tokens, after_tokens), (small, after_small) = found
    assert large is not None and tokens is not None and small == tokens < large
    assert after_small == after_tokens < after_large


def test_a_norm_reads_vectors_as_long_as_images_bring() -> None:
    model = tiny.build("gemma3-images", 3, factor=2.0).half()
    with torch.no_grad():
        model.model.multi_modal_projector.mm_input_projection_weight.mul_(64)
    layout = resolve(source := ModelTensors(model))
    certificate = bound(layout, source_weights(source, layout), target="norm-safe")
    w, first = layout.family.projector, layout.stacks()[0].sublayers[0].norm
    assert w is not None
    outputs = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        brought = deepcopy(model.get_submodule(w.at)).float()(outputs)
    longest, squares = float(brought.norm(dim=-1).max()), certificate.at(f"{first} (sum of squares)")
    norm = certificate.ranges[first].norm
    assert norm is not None and norm.norm_max >= longest
    assert squares is not None and squares >= longest**2
