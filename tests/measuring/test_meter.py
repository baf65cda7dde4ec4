"""The meter's ranges are those of the tensors, for every linear, embedding, norm and attention."""

import copy
import re

import pytest
import torch
from support import exhaustive, tiny
from support.observed import model_of, padded, sites_of
from torch import Tensor, nn

from bf16_to_fp16.measuring.batch import run_batch
from bf16_to_fp16.measuring.meter import RangeObserver, observe_ranges
from bf16_to_fp16.measuring.probe import batches


def test_ranges_are_those_of_the_tensors_of_all_batches_and_padding_counts() -> None:
    model = model_of("gated")
    inputs = [*batches(model.config, None, None)[:2], padded(model)]
    kept: dict[str, list[tuple[Tensor, Tensor]]] = {}
    paths = ("encoder.block.1.layer.1.DenseReluDense.wo", "encoder.block.1.layer.1.layer_norm")
    for path in paths:
        model.get_submodule(path).register_forward_hook(
            lambda _, args, out, path=path: kept.setdefault(path, []).append((args[0], out))
        )
    with torch.no_grad():
        for batch in inputs:
            run_batch(model, batch)
    for path in paths:
        model.get_submodule(path)._forward_hooks.clear()
    ranges = observe_ranges(model, inputs)
    for path in paths:
        for seen, tensors in zip((ranges[path].input, ranges[path].output), zip(*kept[path], strict=True), strict=True):
            flat = torch.cat([tensor.flatten(0, 1) for tensor in tensors])
            assert seen.rows == len(flat) == sum(batch.input_ids.numel() for batch in inputs)
            assert torch.equal(seen.amax, flat.abs().amax(0))
            assert torch.allclose(seen.mean_square, flat.square().mean(0), rtol=1e-5)
    norm = ranges[paths[1]].norm
    assert norm is not None
    x = torch.cat([read.flatten(0, 1) for read, _ in kept[paths[1]]]).double()
    variance = x.square().mean(-1)
    assert norm.norm_max == pytest.approx(float(x.norm(dim=-1).max()))
    seen_variances, shares = norm.variances.unbind(1)
    assert float(shares.sum()) == pytest.approx(1)
    assert float(seen_variances.min()) == pytest.approx(float(variance.min()), rel=0.05)
    assert float((shares / seen_variances).sum()) == pytest.approx(float((1 / variance).mean()), rel=0.05)
    assert not any(module._forward_hooks for module in model.modules())


def test_an_observer_of_copies_has_what_one_of_all_runs_has() -> None:
    model = model_of("gated")
    inputs = batches(model.config, None, None)[:4]
    alone, expected = observe_ranges(model, inputs[:1]), observe_ranges(model, [*inputs, inputs[1]])
    observer = RangeObserver()
    for batch in (*inputs, inputs[1]):
        copied = copy.deepcopy(model)
        with torch.no_grad(), observer.watching(copied):
            run_batch(copied, batch)
    ranges = observer.ranges()
    assert ranges.keys() == expected.keys()
    for path, seen in ranges.items():
        for ours, theirs in ((seen.input, expected[path].input), (seen.output, expected[path].output)):
            assert ours.rows == theirs.rows
            assert torch.equal(ours.amax, theirs.amax) and torch.equal(ours.mean_square, theirs.mean_square)
        assert seen.scores == expected[path].scores
    norms = [{path: seen.norm for path, seen in each.items() if seen.norm} for each in (alone, ranges, expected)]
    for path, norm in norms[1].items():
        assert norm.norm_max == norms[2][path].norm_max and torch.equal(norm.variances, norms[2][path].variances)
    assert any(norm.norm_max < norms[1][path].norm_max for path, norm in norms[0].items())
    assert any(seen.scores != ranges[path].scores for path, seen in alone.items())


def test_a_layer_norm_s_variance_is_centred() -> None:
    model = model_of("pegasus")
    with torch.no_grad():
        model.model.shared.weight += 5.0  # a common offset, which nn.LayerNorm takes out
    norm = observe_ranges(model, [padded(model)])["model.encoder.layers.0.self_attn_layer_norm"].norm
    assert norm is not None
    assert float(norm.variances[:, 0].min()) < 5.0 < norm.norm_max


def test_scores_are_those_of_an_undisturbed_forward() -> None:
    model = model_of("gated")
    batch = padded(model)
    path = "encoder.block.0.layer.0.SelfAttention"
    sites = sites_of(model, batch)
    scores = observe_ranges(model, [batch])[path].scores
    assert scores is not None
    assert scores.product == sites[f"{path}:scores"].amax
    assert scores.biased == max(sites[f"{path}:{name}"].amax for name in ("mul", "add"))


@pytest.mark.parametrize("kind", exhaustive.beyond(tiny.CORE, tiny.FIRST))
def test_every_linear_embedding_norm_and_attention_has_a_range(kind: str) -> None:
    model = model_of(kind)
    ranges = observe_ranges(model, batches(model.config, None, None)[:1])
    for path, module in model.named_modules():
        name = type(module).__name__
        if re.search(r"\.(vision_tower|visual|multi_modal_projector)", path):  # which ids alone do not go through
            continue
        if isinstance(module, nn.Linear) or name.endswith("LayerNorm"):
            assert ranges[path].input.rows == ranges[path].output.rows > 0
            assert (ranges[path].norm is not None) is name.endswith("LayerNorm")
        if hasattr(module, "k") or hasattr(module, "k_proj"):
            scores = ranges[path].scores
            assert scores is not None and 0 < scores.product < 100 and 0 < scores.biased < 100
