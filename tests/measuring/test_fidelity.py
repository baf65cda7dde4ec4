"""Ranges and differences are those of the tensors by definition, for every module and on the tokens that count."""

import copy
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support import exhaustive, tiny
from support.observed import model_of, padded, sites_of
from torch import Tensor, nn

from bf16_to_fp16.measuring.batch import Batch, run_batch
from bf16_to_fp16.measuring.fidelity import Fidelity, compared, fidelity, output_on
from bf16_to_fp16.measuring.meter import RangeObserver, observe_ranges
from bf16_to_fp16.measuring.probe import batches
from bf16_to_fp16.measuring.regime_results import RegimeResult
from bf16_to_fp16.numerics import NOISE
from bf16_to_fp16.report import schema
from bf16_to_fp16.report.judgement import conclude, inexact, is_exact, passed_limits, too_inexact
from bf16_to_fp16.report.remedies import INEXACT, NOT_FINITE, OUTPUT, SOMETHING_INSIDE, TOO_FEW_BITS
from bf16_to_fp16.rescaling.plan import Drift, Plan, Violation
from bf16_to_fp16.rescaling.planner import Planned
from bf16_to_fp16.results import dump


def measure(reference: Any, bf16: Any, fp16: Any, inputs: Sequence[Batch]) -> Fidelity:
    def outputs(model: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            return [output_on(batch, run_batch(model, batch)) for batch in compared(inputs)]

    found = [None if model is None else outputs(model) for model in (reference, bf16, fp16)]
    decodes = inputs[0].decoder_input_ids is not None
    return fidelity(found[0] or [], found[1], found[2] or [], probabilities=decodes)


@pytest.mark.parametrize("kind", ["t5", "gated", "pegasus", "t5-encoder"])
def test_a_model_is_no_different_from_itself(kind: str) -> None:
    model = model_of(kind)
    same = measure(model, copy.deepcopy(model), copy.deepcopy(model), batches(model.config, None, None))
    assert same.kl_bf16 == same.kl_fp16 == same.max_logit_error_bf16 == same.max_logit_error_fp16 == 0
    assert same.top1_bf16 == same.top1_fp16 == (None if kind == "t5-encoder" else 1.0)
    assert same.measure == ("relative squared error" if kind == "t5-encoder" else "kl")


def test_the_divergence_is_that_of_the_definition() -> None:
    model = model_of("gated")
    other = copy.deepcopy(model).bfloat16()
    batch = padded(model)
    assert batch.decoder_attention_mask is not None
    keep = batch.decoder_attention_mask.bool()
    with torch.no_grad():
        p, q = (run_batch(m, batch).logits[keep].double() for m in (model, other))
    measured = measure(model, None, other, [batch])
    expected = torch.nn.functional.kl_div(q.log_softmax(-1), p.log_softmax(-1), reduction="batchmean", log_target=True)
    assert measured.kl_fp16 == pytest.approx(float(expected), rel=1e-9)
    assert measured.max_logit_error_fp16 == pytest.approx(float((p - q).abs().max()), rel=1e-12)
    assert measured.top1_fp16 == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert measured.positions == int(keep.sum())
    assert measured.kl_bf16 is measured.max_logit_error_bf16 is measured.top1_bf16 is None


def test_the_error_of_an_encoder_is_relative_to_its_states() -> None:
    model = model_of("t5-encoder")
    other = copy.deepcopy(model).bfloat16()
    batch = padded(model)
    with torch.no_grad():
        x, y = (run_batch(m, batch).last_hidden_state[batch.attention_mask.bool()].double() for m in (model, other))
    expected = (x - y).square().sum() / x.square().sum()
    assert measure(model, None, other, [batch]).kl_fp16 == pytest.approx(float(expected), rel=1e-9)


def test_a_model_that_gives_nan_is_infinitely_far_and_null_in_json() -> None:
    model = model_of("gated")
    broken = copy.deepcopy(model)
    broken.lm_head.weight.data[3] = torch.nan
    measured = measure(model, copy.deepcopy(model), broken, [padded(model)])
    assert measured.kl_fp16 == measured.max_logit_error_fp16 == math.inf
    entry = json.loads(json.dumps(dump(measured), allow_nan=False))
    assert entry["kl_fp16"] is None
    assert entry["kl_bf16"] == 0
    promised = {"reference", "kl_bf16", "kl_fp16", "max_logit_error_bf16", "max_logit_error_fp16", "top1_fp16"}
    assert promised <= set(entry)


def apart(kl_bf16: float | None, kl_fp16: float) -> Fidelity:
    errors = {"max_logit_error_bf16": 0.1, "max_logit_error_fp16": 0.1}
    return Fidelity.model_validate(errors | {"kl_bf16": kl_bf16, "kl_fp16": kl_fp16, "positions": 7})


def test_an_output_further_from_the_source_than_bf16_is_a_violation_by_half_the_bits_of_its_divergence() -> None:
    """A divergence goes with the square of an error: 16 times the divergence is 2 bits."""
    few_bits, broken = (TOO_FEW_BITS, INEXACT), (NOT_FINITE, SOMETHING_INSIDE)
    assert too_inexact(apart(2.0**-12, 2.0**-8)) == [inexact(2.0**-8, 2.0**-12, *few_bits)]
    assert too_inexact(apart(2.0**-12, math.inf)) == [inexact(math.inf, 2.0**-12, *broken)]
    assert too_inexact(apart(0.0, 16 * NOISE)) == [inexact(16.0, 1.0, *few_bits)]
    for error, bits in ((16.0, 2.0), (math.inf, 40.0)):
        said = inexact(error, 1.0, *few_bits)
        assert (said.signal, said.kind, said.excess_bits, said.remedy) == (OUTPUT, "inexact", bits, INEXACT)


@pytest.mark.parametrize(
    "measured",
    [apart(2.0**-8, 2.0**-8), apart(2.0**-8, 2.0**-12), apart(0.0, NOISE), apart(None, 1.0), apart(math.inf, 1.0)],
)
def test_an_output_no_further_than_bf16_or_than_the_noise_is_none(measured: Fidelity) -> None:
    assert too_inexact(measured) == []


def test_edits_that_a_proof_needed_may_cost_twice_what_bf16_does() -> None:
    near, far = apart(1.0, 1.9), apart(1.0, 2.1)
    assert too_inexact(near, edits=1.5, proven=True) == []
    for entry in (
        too_inexact(near, edits=1.5),
        too_inexact(near, proven=True),
        too_inexact(far, edits=1.5, proven=True),
    ):
        assert len(entry) == 1


@pytest.mark.parametrize("bf16", [22.0, math.inf])
def test_where_bf16_is_ruined_edits_may_not_ruin_the_output_too(bf16: float) -> None:
    assert too_inexact(apart(bf16, 0.9), edits=0.8) == []
    assert len(too_inexact(apart(bf16, 1.1), edits=0.8)) == 1
    assert too_inexact(apart(bf16, 1.1), edits=0.8, max_kl=1.2) == too_inexact(apart(bf16, 1.1)) == []


def test_too_inexact_an_output_is_unsafe_at_any_margin_and_a_limit_passed_within_its_margin_is_not() -> None:
    clean = {"half": RegimeResult(nonfinite=0, saturated=0, amax=1.0, headroom_bits=15.0, sites=[])}

    def concluded(*violations: Violation, margin_bits: float | None = 1.25) -> tuple[str, list[str]]:
        plan = Plan(family="t5", margin_bits=margin_bits)
        over = passed_limits(Planned(plan, violations, 0.0), clean, plan, proven=True)
        return conclude(clean, over, proven=True), [entry.signal for entry in over]

    assert conclude(clean, [], proven=True) == "safe"
    assert conclude(clean, too_inexact(apart(1.0, 1.01)), proven=True) == "unsafe"
    within, past = Violation("a (output)", 1.25), Violation("o (output)", 1.26)
    # What only lacks the margin is nothing unsafe, and no entry of that list.
    assert concluded(within) == ("safe", [])
    assert concluded(within, past) == ("unsafe", ["o (output)"])
    assert concluded(Violation("o (output)", 0.01), margin_bits=None) == ("unsafe", ["o (output)"])


def test_an_output_must_be_the_source_to_the_bit_unless_something_drifted_was_corrected_rounded_or_made() -> None:
    whole = schema.WeightsEntry(
        elements=8, lossless_fraction=1, normal_fraction=1, flushed_to_zero=0, nonfinite=0, amax=1.0
    )
    plan, source = Plan(family="t5"), schema.Source()
    assert is_exact(plan, whole, source)
    assert not is_exact(plan.model_copy(update={"drift": Drift(relative_error=0.0)}), whole, source)
    assert not is_exact(plan.model_copy(update={"gain_correction": {"a": 1.1}}), whole, source)
    assert not is_exact(plan.model_copy(update={"centred_keys": ["a"]}), whole, source)
    assert not is_exact(plan, whole.model_copy(update={"lossless_fraction": 0.999}), source)
    assert not is_exact(plan, whole, source.model_copy(update={"made": ["lm_head.weight"]}))
    other = apart(1.0, 0.0).model_copy(update={"squared_error_fp32": 1e-3})
    assert too_inexact(other) == [] and len(too_inexact(other, exact=True)) == 1


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
