"""Make the certificate's bounds wrong, one at a time, and show that the checks of the tests notice every one.

    python benchmarks/mutate_bounds.py

Perturbed is the text of one function of the certificate, which is compiled again and put in its place: a rounding, a
bias or a head left out, a row's bound made a tenth smaller. Then the tests run that say why a bound is what it is, and
an adversary tries models. Exits with 1 where a mutant survives that ``COVERED`` does not show to be covered by another
allowance.
"""

from __future__ import annotations

import copy
import functools
import inspect
import io
import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import pytest
import torch
from support import contract, tiny
from support.adversary import adverse_inputs, cancelling, observe, scaled

from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.bounds.attention import (
    attention_output,
    capped_span,
    gathered,
    grown,
    longest_of,
    masked_span,
    pair_order,
    rotated,
    rotated_score_bounds,
    score_bounds,
    soft_capped,
    summed_scores,
    turned,
    turned_score_bounds,
)
from bf16_to_fp16.bounds.certificate import _Walk
from bf16_to_fp16.bounds.feed_forward import GatedNeurons, PlainNeurons, homogeneous, output_bound
from bf16_to_fp16.bounds.linear import (
    LinearBound,
    NormOutput,
    block_sums,
    bound_linear,
    either,
    enclosing_axes,
    layer_normalised,
    least_of,
    lengthened,
    rms_normalised,
    side_by_side,
    stream_itself,
    summed_axes,
)
from bf16_to_fp16.bounds.spectral import Spectra
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.families.resolve import effective

TESTS = Path(__file__).parents[1] / "tests"

CAUGHT = (AssertionError, UserError, RuntimeError, ValueError)
"""A test that fails, or a plan that is refused because it does not fit."""


@contextmanager
def rewritten(function: Any, old: str, new: str) -> Iterator[None]:
    """Put other text in place of ``old``, which stands once in a function, for the length of the block."""
    function = inspect.unwrap(function)
    text = textwrap.dedent(inspect.getsource(function))
    if text.count(old) != 1:
        raise LookupError(f"{function.__qualname__} has {old!r} {text.count(old)} times")
    text = text[text.index("def ") :]  # a property's decorator would hide the function
    space = dict(function.__globals__)
    exec(compile(text.replace(old, new), "<mutant>", "exec", flags=0x1000000), space)  # annotations stay text
    before = function.__code__
    function.__code__ = space[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = before


Seen = dict[str, float]


def cases() -> list[tuple[Any, Arithmetic, Seen]]:
    """Return models, arithmetics and what an adversary makes of every site: fp16 and, in exact arithmetic, fp32."""
    made = []
    for kind in ("t5", "gated", "gelu", "umt5", "pegasus", "mbart", "gemma3", "llama-biased"):
        for seed, factor in ((1, 1.0), (2, 0.02)):
            half = tiny.build(kind, seed, factor=factor).half()
            half = scaled(half, seed, 12) if seed == 2 else half
            layout = contract.layout_of(half)
            wide = copy.deepcopy(half).float()
            inputs = adverse_inputs(wide, layout, 48, seed)
            made.append((half, Arithmetic(), observe(half, layout, inputs)))
            if seed == 1:
                seen = {name: amax * (1 - 1e-4) for name, amax in observe(wide, layout, inputs).items()}
                made.append((wide, Arithmetic(exact=True), seen))
    half = cancelling()
    layout = contract.layout_of(half)
    inputs = adverse_inputs(copy.deepcopy(half).float(), layout, 128, 0)
    made.append((half, Arithmetic(), observe(half, layout, inputs)))
    return made


QUICK = (
    "test_no_output_of_a_tower_passes_the_bound_and_the_worst_reaches_it",
    "test_the_stream_begins_with_the_larger_of_tokens_and_images",
    "test_the_roundings_of_a_norm_need_their_allowance",
    "test_the_roundings_of_a_linears_inputs_need_their_allowance",
    "test_inputs_that_are_subnormal_need_their_allowance",
    "test_results_that_are_subnormal_need_their_allowance",
    "test_the_partial_sums_of_a_linear_need_their_allowance",
    "test_the_partial_sums_of_scores_need_their_allowance",
    "test_the_position_bias_is_in_the_bound_of_the_scores",
    "test_the_rounding_of_a_normalised_vector_needs_its_allowance",
    "test_long_sums_in_fp32_need_their_allowance",
    "test_the_two_roundings_of_a_products_result_need_their_allowance",
    "test_rows_of_attention_weights_need_their_allowance",
    "test_what_fp32_loses_of_a_long_row_of_attention_needs_its_allowance",
    "test_a_norm_that_is_multiplied_once_more_needs_its_allowance",
    "test_one_more_rounding_needs_its_allowance",
    "test_a_layer_norms_subnormals_need_their_allowance",
    "test_roundings_that_all_go_up_stay_under_the_bounds_and_come_close",
    "test_the_streams_roundings_need_their_allowance",
    "test_activations_below_zero_need_their_allowance",
    "test_scores_that_cancel_need_their_roundings",
    "test_a_model_whose_rows_point_one_way_reaches_every_bound",
    "test_one_heads_products_reach_the_bounds_of_two_matrices_at_once",
    "test_neurons_that_share_an_inputs_length_reach_the_feed_forwards_bound",
    "test_a_few_neurons_that_outweigh_the_others_reach_the_bound_of_all_rows",
    "test_no_input_passes_what_the_heaviest_neurons_and_the_others_are_bounded_by",
    "test_dropout_that_keeps_everything_reaches_every_bound",
    "test_a_stream_that_begins_behind_a_norm_begins_at_what_the_norm_can_give",
    "test_without_the_additive_rounding_terms_the_bound_would_be_unsound",
    "test_the_norm_safe_bound_covers_the_length_of_the_stream",
    "test_the_rounding_of_a_long_row_of_attention_weights_is_covered",
    "test_the_length_enters_the_bound",
    "test_activations_stay_where_the_bounds_need_them",
    "test_layer_norms_of_nearly_constant_inputs_stay_under_their_bound",
    "test_layer_norms_are_no_further_off_than_their_units",
    "test_partial_sums_of_any_split_stay_under_their_bound",
    "test_a_rows_own_eigenvalue_is_tighter_and_still_sound",
    "test_turned_queries_and_keys_need_the_allowance_of_their_roundings",
    "test_a_soft_cap_needs_the_allowance_of_each_of_its_roundings",
    "test_rows_of_a_linear_are_linears",
    "test_several_heads_of_queries_share_the_scores_bound_of_their_head_of_keys",
    "test_logits_behind_a_soft_cap_reach_it_and_no_more",
    "test_no_rotation_passes_the_bound_of_its_scores_and_one_comes_close",
    "test_rotations_of_projections_need_the_allowance_of_their_roundings",
    "test_what_a_projection_is_off_by_is_in_the_bound_of_turned_scores",
    "test_gated_neurons_with_biases_reach_their_bounds",
    "test_a_norm_behind_a_sublayer_says_what_it_adds",
    "test_an_embedding_that_scales_itself_rounds_twice",
    "test_a_carried_eigenvalue_is_above_that_of_weights_changed_in_the_worst_direction",
    "test_a_sum_over_a_block_and_what_is_left_of_a_row_reaches_its_bound",
    "test_keys_and_values_of_sums_reach_their_bounds",
    "test_the_position_bias_of_sums_is_in_the_bound_of_the_scores",
    "test_the_roundings_of_a_sum_need_their_allowance",
    "test_the_length_of_sums_is_no_longer_than_their_components_allow",
    "test_the_louder_expert_reaches_the_bound_of_all",
    "test_what_the_router_multiplies_in_training_is_in_the_bounds_for_training",
    "test_no_sum_of_normalised_vectors_leaves_the_ellipsoid_and_one_comes_close",
    "test_rows_of_a_table_lie_in_the_ellipsoid_of_their_box_and_length",
    "test_the_stream_of_a_model_stays_in_its_ellipsoid",
    "test_no_output_of_a_tower_passes_the_bounds_and_some_come_near",
    "test_outputs_that_all_point_where_a_row_has_them_reach_the_first_linears_bound",
    "test_what_joins_behind_a_layer_is_in_the_streams_bound",
    "test_scores_are_bounded_with_the_square_of_a_rotary_factor",
    "test_queries_that_grow_with_their_position_are_bounded_for_the_length_that_is_asked",
    "test_the_least_that_a_last_norm_gives_is_nearly_reached",
    "test_experts_that_agree_reach_the_sum_of_their_weights",
    "test_pairs_of_a_head_of_which_a_half_turns_are_in_either_half",
)
"""Tests of the certificate, which a mutant meets first."""

SLOW = (
    "test_no_masked_position_of_a_certified_model_has_weight[gated]",
    "test_dropout_multiplies_the_bounds_in_train_mode",
    "test_no_model_input_passes_a_bound_and_every_audited_site_has_one[t5]",
    "test_no_model_input_passes_a_bound_and_every_audited_site_has_one[pegasus]",
    "test_no_model_input_passes_a_bound_and_every_audited_site_has_one[gemma3]",
    "test_no_adversarial_input_passes_a_bound_in_fp32_or_fp16[t5]",
    "test_no_adversarial_input_passes_a_bound_in_fp32_or_fp16[gated]",
    "test_no_adversarial_input_passes_a_bound_in_fp32_or_fp16[pegasus]",
    "test_no_adversarial_input_passes_a_bound_in_fp32_or_fp16[gemma3]",
    "test_no_adversarial_input_passes_a_bound_in_fp32_or_fp16[llama-biased]",
)
"""Tests that only mutants meet which neither a quick test nor a model has shown."""

W, A, N = _Walk, Arithmetic, NormOutput
G, P = GatedNeurons, PlainNeurons

MUTANTS: tuple[tuple[str, Any, str, str], ...] = (
    # Too small: the value itself.
    ("a linear's bias left out", bound_linear, "centre + bias.double(), bias", "centre, bias"),
    ("a norm's shift left out", bound_linear, "if source.shift is not None", "if False"),
    ("a linear's row bound a tenth smaller", bound_linear, "norms = source.radius *", "norms = 0.9 * source.radius *"),
    ("a linear's column gain left out", bound_linear, "(weight, source.gain,", "(weight, 0 * source.gain + 1,"),
    ("a radius of √(d−1)", rms_normalised, "radius = math.sqrt(width)", "radius = math.sqrt(width - 1)"),
    ("a norm's bound a tenth smaller", N.bound.fget, "made = (", "made = 0.9 * ("),
    ("a sublayer not added to the stream", W.add, "self.rounded(self.stream + branch)", "self.rounded(self.stream)"),
    ("the stream's length without its sublayer", W.add, "(self.stream_norm + length)", "(self.stream_norm)"),
    ("positions not added to the embedding", W.begin, "self.rounded(amax + extra)", "self.rounded(amax)"),
    ("the embedding's √d left out", W.begin, "self.rounded(amax * scale)", "self.rounded(amax)"),
    ("a stream behind a norm begins a tenth too small", W.begin, "made.bound, made", "0.9 * made.bound, made"),
    ("a stream behind a norm begins a tenth too short", W.begin, ", made.length", ", 0.9 * made.length"),
    ("the shift left out of a norm's length", N.length.fget, "float(self.shift.norm())", "0.0"),
    (
        "a first norm's input scaled with the stream",
        W.normalised,
        'planned.get(self.layout.streams_read.get(path, ""), 0)',
        "min(planned.values(), default=0)",
    ),
    ("a head left out of the scores", score_bounds, "for h in range(heads)", "for h in range(heads - 1)"),
    ("the position bias left out of the scores", W.scored, "self.rounded(scaled + offset)", "self.rounded(scaled)"),
    ("the span between two keys halved", score_bounds, "2 * crossed", "crossed"),
    ("the position bias left out of the span", masked_span, "(high - low)", "0"),
    ("an offset left out of gains", effective, ") + tensor.offset", ")"),
    ("a norm behind a sublayer a tenth smaller", W.join, "Projection(out.bound,", "Projection(0.9 * out.bound,"),
    ("its length without its largest gain", N.length.fget, "self.gain.abs().max()", "self.gain.abs().min()"),
    ("turned scores a tenth smaller", turned_score_bounds, "whole = query", "whole = 0.9 * query"),
    ("half of a turned pair left out", turned, ".view(heads, 2, -1).amax(1)", ".view(heads, 2, -1)[:, 0]"),
    ("the factor of a turned pair left out", turned, ".amax(1) * factor", ".amax(1)"),
    ("a soft cap a tenth smaller", soft_capped, "tanh * cap", "0.9 * tanh * cap"),
    ("the tanh of a soft cap a tenth smaller", soft_capped, "quotient.tanh()", "0.9 * quotient.tanh()"),
    ("a soft cap's quotient a tenth smaller", soft_capped, "values / cap", "0.9 * values / cap"),
    ("the span behind a soft cap halved", capped_span, "2 * capped.result", "capped.result"),
    ("the cap of logits left out", W.head, "soft_capped(bound, cap,", "soft_capped(0.9 * bound, cap,"),
    (
        "a fused gate's bound taken for its neurons'",
        LinearBound.split,
        "x.split(rows) for x",
        "[x.split(rows)[0]] * len(rows) for x",
    ),
    ("several heads' keys taken for the first's", score_bounds, "(h, h // group)", "(h, 0)"),
    ("the span between two turned keys halved", turned_score_bounds, "2 * whole, terms", "whole, terms"),
    ("rotated scores a tenth smaller", rotated_score_bounds, "exact[h] = min(", "exact[h] = 0.9 * min("),
    ("half of a rotated pair left out", rotated, "(one - other) / 2, mixed)", "(one - other) / 2, 0 * mixed)"),
    ("shift and bias left out of rotated scores", rotated, "ordered(made.centre)", "ordered(0 * made.centre)"),
    ("rotated lengths with their shift a tenth smaller", longest_of, "math.sqrt((1 +", "0.9 * math.sqrt((1 +"),
    ("pairs that lie side by side taken for halves", pair_order, "if rotary.interleaved", "if False"),
    ("a head of which half turns taken for one that turns", pair_order, "rotary.runs", "1"),
    ("every head of queries with the first head of keys", rotated_score_bounds, "n = h // group", "n = 0"),
    ("the span between two rotated keys halved", rotated_score_bounds, "2 * exact", "exact"),
    ("several heads' values taken for the first's", attention_output, "(h // group, h)", "(0, h)"),
    ("the context a tenth smaller", gathered, "a.summed(values.bound *", "a.summed(0.9 * values.bound *"),
    (
        "a head left out of the attention's output",
        attention_output,
        "for h in range(heads)",
        "for h in range(1, heads)",
    ),
    ("the bias of the attention's output left out", attention_output, "signed.abs() + error", "error"),
    ("the values' bias left out behind the output", attention_output, "(o @ values.centre[part]).abs())", "0)"),
    ("a gate's product a tenth smaller", G.__init__, "scale = gate.norms *", "scale = 0.9 * gate.norms *"),
    (
        "the biases of a gate and its linear left out",
        G.__init__,
        "if gate.centre.any() or other.centre.any()",
        "if False",
    ),
    ("biases that make nothing longer", homogeneous, "radius = math.hypot(one.radius, length)", "radius = one.radius"),
    ("a product's sign taken for positive", G.__init__, "(1 + self.cosine.abs()) / 2", "(1 + self.cosine) / 2"),
    (
        "half the gated neurons at their maximum",
        G.__init__,
        "spectra.largest(both) / 2",
        "spectra.largest(both) / 4",
    ),
    ("half the heaviest neurons at their maximum", G.unit_rows, "roots[:, None, :]) / 2", "roots[:, None, :]) / 4"),
    ("the heaviest neurons left out", G.unit_rows, "shared + largest_sum(values)", "largest_sum(values)"),
    ("the others left out beside the heaviest neurons", G.unit_rows, "shared + largest_sum(values)", "shared"),
    ("dropout left out of the rows of gated neurons", G.rows, "* self.scale", "* self.scale * self.keep"),
    (
        "half the plain neurons at their maximum",
        P.__init__,
        "spectra.largest(rows) *",
        "spectra.largest(rows) / 2 *",
    ),
    ("a plain neuron's bias left out", P.__init__, "self.offset = linear", "self.offset = 0 * linear"),
    ("negative activations left out", P.__init__, "LOWEST[activation]", "0 * LOWEST[activation]"),
    ("negative activations left out of sums", P.__init__, "self.depth = self.lowest", "self.depth = 0 * self.lowest"),
    ("the feed-forward's bias left out", output_bound, "* COMPUTED + extra", "* COMPUTED"),
    ("the logits' bias left out", W.head, "self.rounded(bound + offset)", "self.rounded(bound)"),
    ("the head's factor left out", W.head, "final.scaled(scale, self.arithmetic)", "final"),
    ("dropout's factor left out", W.kept, "return (1 - rate) / (1 + UNIT) if rate else 1.0", "return 1.0"),
    ("dropout left out of a stack's end", W.end, "final.scaled(1 / keep, self.arithmetic)", "final"),
    ("dropout left out of attention", gathered, "total = total / keep *", "total = total *"),
    ("dropout left out of the stream", W.add, "self.rounded(branch / keep)", "self.rounded(branch)"),
    ("dropout left out of gated neurons", G.__init__, "self.size = scale / keep", "self.size = scale"),
    ("dropout left out of plain neurons", P.__init__, "self.size = linear.norms / keep", "self.size = linear.norms"),
    ("what is left of a row left out of the last sum", W.summed, "2 * size - 1", "size"),
    ("a sum a tenth smaller", block_sums, "source.bound * terms", "0.9 * source.bound * terms"),
    ("the length of a sum a tenth smaller", block_sums, "longest * terms *", "0.9 * longest * terms *"),
    (
        "the norm of sums left out of keys and values",
        either,
        "torch.maximum(one.gain.abs(), other.gain.abs())",
        "one.gain",
    ),
    ("an expert left out", W.experts, "for each in made]).amax(0)", "for each in made])[0]"),
    ("what experts give a tenth smaller", W.experts, "torch.stack([each.b", "0.9 * torch.stack([each.b"),
    ("the length of what experts give a tenth smaller", W.experts, "max(each.length", "0.9 * max(each.length"),
    ("the sum of experts' weights left out", W.experts, "bound * together * grown", "bound * grown"),
    ("the sum of experts' weights left out of a length", W.experts, "(length * together", "(length"),
    ("what experts are multiplied with left out", W.experts, "bound * weight * once", "bound * once"),
    ("a shared expert left out", W.experts, "bound + always.bound", "bound"),
    ("a shared expert left out of a length", W.experts, "length + always.length", "length"),
    ("what images bring left out of the stream", W.begin, "torch.maximum(amax, brought)", "amax"),
    ("tokens left out where images are larger", W.begin, "torch.maximum(amax, brought)", "brought"),
    (
        "what images bring a tenth smaller",
        W.projected,
        "made.bound, made.partial",
        "0.9 * made.bound, 0.9 * made.partial",
    ),
    ("the noise of a router in training left out", W.experts, "(1 + self.layout.noise(sublayer),", "(1,"),
    (
        "the position bias of sums left out of the scores",
        W.scored,
        "(sublayer.bias, sublayer.block_bias)",
        "(sublayer.bias,)",
    ),
    ("a sum's ellipsoid a tenth shorter", summed_axes, "return (long + short) *", "return 0.81 * (long + short) *"),
    ("half of what holds an embedding", enclosing_axes, "2 * ball", "ball"),
    ("a stream without a norm a tenth smaller", stream_itself, "(axes.sqrt() / radius)", "0.9 * axes.sqrt() / radius"),
    ("what joins behind a layer left out", W.join, "self.stream + brought)", "self.stream)"),
    ("several outputs of a norm as long as one", side_by_side, "source.radius * math.sqrt(number)", "source.radius"),
    ("a factor left out of rotated queries", rotated, "rotary.factor * factor", "factor"),
    ("queries that grow taken for such as do not", grown, "1 + growth *", "1 + 0 * growth *"),
    ("the least of a last norm twice too large", least_of, "math.sqrt(2 * summed)", "math.sqrt(summed / 2)"),
    # Too small: what arithmetic adds.
    ("the roundings of a sum left out", block_sums, "a.summed(source.bound * terms * grown)", "source.bound * terms"),
    (
        "all roundings of a linear left out",
        bound_linear,
        "error = error + 2 * arithmetic.unit * (exact + error) + arithmetic.floor",
        "error = 0 * error",
    ),
    ("the roundings of a linear's inputs left out", bound_linear, "computed + incoming +", "computed +"),
    ("their relative part left out", bound_linear, "source.relative * spread + ", ""),
    ("their subnormal part left out", bound_linear, "+ magnitudes(weight, source.absolute) * COMPUTED", ""),
    ("the rounding of a linear's result left out", bound_linear, "2 * arithmetic.unit * (exact + error) +", ""),
    ("the floor of subnormals left out of a linear", bound_linear, "+ arithmetic.floor", ""),
    ("partial sums without their bias and rounding", bound_linear, "spread + added + error)", "0.5 * spread)"),
    ("the splits of a sum left out", A.gamma, "+ self.splits * UNIT", ""),
    ("the length of a sum in fp32 left out", A.gamma, "(3 * terms + 12) * UNIT32 +", ""),
    ("one of a norm's two roundings left out", rms_normalised, "2 * a.unit + a.unit**2", "a.unit"),
    ("the one rounding of a norm left out", rms_normalised, "a.unit * (1 + 2.0**-9)", "0.0"),
    ("the rounding of the embedding's own √d left out", W.begin, "scale *= 1 + a.unit", "scale *= 1"),
    ("the roundings of a rotation left out", turned, "(1 + relative) + tiny", "1.0"),
    ("the roundings of two rotations left out of scores", turned, "1 + math.sqrt(2) * relative", "1.0"),
    ("the rounding of a soft cap's quotient left out", soft_capped, "a.rounded(values / cap)", "values / cap"),
    ("the rounding of its tanh left out", soft_capped, "a.rounded(quotient.tanh())", "quotient.tanh()"),
    ("the rounding of its product left out", soft_capped, "a.rounded(tanh * cap)", "tanh * cap"),
    ("its quotient's rounding left out of what it is off", soft_capped, "a.unit * values +", ""),
    ("one rounding left out of what it is off", soft_capped, "2 * a.unit * result", "a.unit * result"),
    ("subnormals left out of what a soft cap is off", soft_capped, "+ (2 * cap + 1) * a.tiny", ""),
    ("what a soft cap is off left out of its span", capped_span, "span + 2 * capped.off", "span"),
    ("subnormals left out of turned scores", turned_score_bounds, "whole + off, 2", "whole, 2"),
    ("the roundings of a projection's rotation left out", rotated, "(1 + math.sqrt(2) * relative)", "1.0"),
    ("subnormals left out of a projection's rotation", rotated, "+ math.sqrt(2) * tiny", ""),
    (
        "what projections are off by left out of rotated scores",
        rotated_score_bounds,
        "error, exact",
        "0 * error, exact",
    ),
    ("subnormals left out of a norm", rms_normalised, "a.tiny * (gain.abs() * (1 + a.unit) + 1)", "0 * gain"),
    ("fp32's deviations left out of a LayerNorm", lengthened, "norm_units(width)", "0"),
    ("the roundings of what attention gathers left out", A.summed, "return values *", "return values + 0 * values *"),
    (
        "one of a result's two roundings left out",
        A.summed,
        "(1 + self.unit) ** 2",
        "(1 + self.unit)",
    ),
    (
        "the length of rows left out",
        A.attention_sum.fget,
        "(self.max_length + 8) * unit) + self.max_length * TINY",
        "unit)",
    ),
    ("the rounding of attention weights left out", A.attention_sum.fget, "(1 + UNIT) *", "1.0 *"),
    ("what fp32 loses of a row left out", A.attention_sum.fget, "(self.max_length + 8) * unit", "unit"),
    (
        "a factor's rounding left out of a norm",
        N.scaled,
        "(1 + arithmetic.unit) + arithmetic.unit,",
        "(1 + arithmetic.unit),",
    ),
    (
        "subnormals left out of a norm's factor",
        N.scaled,
        "(1 + arithmetic.unit) + arithmetic.tiny",
        "(1 + arithmetic.unit)",
    ),
    ("a norm's subnormals left out of its factor", N.scaled, "self.absolute * factor *", "0 * self.absolute *"),
    ("a norm's bound without subnormals", N.bound.fget, "+ self.absolute) *", ") *"),
    ("one more rounding left out", A.rounded, "values * (1 + self.unit)", "values"),
    ("subnormals left out of one more rounding", A.rounded, "+ self.tiny", ""),
    ("one more rounding left out of a length", A.rounded_length, "length * (1 + self.unit)", "length"),
    ("subnormals left out of a length", A.rounded_length, "+ self.tiny * math.sqrt(width)", ""),
    ("the floor of subnormals left out of a result", A.summed, "+ self.floor", ""),
    ("the rounding of the embedding's √d left out", W.begin, "self.rounded(amax * scale)", "amax * scale"),
    ("the rounding of positions left out", W.begin, "self.rounded(amax + extra)", "(amax + extra)"),
    ("the rounding of the stream left out", W.add, "self.rounded(self.stream + branch)", "(self.stream + branch)"),
    ("the rounding of dropout's factor left out", W.kept, "(1 - rate) / (1 + UNIT)", "(1 - rate)"),
    (
        "subnormals left out of a LayerNorm",
        layer_normalised,
        "torch.full_like(gain, 2 * a.tiny)",
        "torch.zeros_like(gain)",
    ),
    ("the bare norm's rounding left out", W.normalised, "made.radius * (1 + UNIT)", "made.radius"),
    (
        "the sum's rounding left out of scores",
        summed_scores,
        "rounding = a.gamma(terms.shape[1]) * partial",
        "rounding = 0 * partial",
    ),
    ("the sum's rounding left out of the context", gathered, "* total * (1 + gamma))", "* total)"),
    (
        "the context's rounding left out behind the output",
        attention_output,
        "rounding = (1 + gamma) * (1 + a.unit) ** 2 - 1",
        "rounding = 0",
    ),
    ("the context's subnormals left out behind the output", attention_output, "values.bound + a.floor", "values.bound"),
    (
        "the output's sum's rounding left out",
        attention_output,
        "error = error * COMPUTED + a.gamma(weight.shape[1]) * partial",
        "error = error * COMPUTED",
    ),
    ("the feed-forward's sum's rounding left out", output_bound, "summed * (1 + a.gamma(weight.shape[1]))", "summed"),
    (
        "a gate's and a product's rounding left out",
        G.__init__,
        "factor = (1 + 2 * a.unit) * (1 + a.unit) - 1",
        "factor = 0.0",
    ),
    (
        "the errors of a gate's two sides left out",
        G.__init__,
        "(product + off) * (1 + factor) + absolute",
        "product * (1 + factor) + absolute",
    ),
    ("a plain activation's rounding left out", P.__init__, "else 2 * a.unit", "else 0.0"),
    ("subnormals left out of a row of attention weights", A.attention_sum.fget, "+ self.max_length * TINY", ""),
    ("all errors of scores left out", summed_scores, "exact * COMPUTED + error + rounding", "exact * COMPUTED"),
    (
        "the errors of queries and keys left out",
        summed_scores,
        "exact * COMPUTED + error + rounding",
        "exact * COMPUTED + rounding",
    ),
    ("the values' errors left out behind the output", attention_output, "total * values.error + total", "total"),
    (
        "all errors left out behind the output",
        attention_output,
        "error = error * COMPUTED + a.gamma(weight.shape[1]) * partial",
        "error = 0 * partial",
    ),
    ("the neurons' errors left out", output_bound, "(exact + off) * COMPUTED", "exact * COMPUTED"),
    ("the difference left out of a carried eigenvalue", Spectra.carried, "(root + off)", "root"),
    ("a carried eigenvalue without its scale", Spectra.carried, "root = scale *", "root ="),
    # Too large.
    ("a linear's row bound a tenth larger", bound_linear, "norms = source.radius *", "norms = 1.1 * source.radius *"),
    ("a norm behind a sublayer a tenth larger", W.join, "Projection(out.bound,", "Projection(1.1 * out.bound,"),
    ("turned scores a tenth larger", turned_score_bounds, "whole = query", "whole = 1.1 * query"),
    ("scores a tenth larger", score_bounds, "exact[h] = crossed", "exact[h] = 1.1 * crossed"),
    ("the attention's output a tenth larger", attention_output, "exact += total *", "exact += 1.1 * total *"),
    ("the context a tenth larger", gathered, "a.summed(values.bound *", "a.summed(1.1 * values.bound *"),
    ("a gate's product a tenth larger", G.__init__, "product = scale *", "product = 1.1 * scale *"),
    (
        "twice the gated neurons at their maximum",
        G.__init__,
        "spectra.largest(both) / 2",
        "spectra.largest(both) / 1",
    ),
    (
        "the heaviest neurons counted as the others",
        G.unit_rows,
        "torch.minimum(together, shared + largest_sum(values))",
        "together",
    ),
    (
        "twice the plain neurons at their maximum",
        P.__init__,
        "spectra.largest(rows) *",
        "spectra.largest(rows) * 2 *",
    ),
    (
        "plain neurons counted without their mean",
        P.unit_rows,
        "torch.minimum((straight + self.product_error(values) + ball) / 2, ball)",
        "ball",
    ),
    ("a stream that grows a tenth too fast", W.add, "self.stream + branch", "self.stream + 1.1 * branch"),
)


COVERED = {
    "a gate's and a product's rounding left out": "covered: an activation of an fp16 number x rounds to at most x, and"
    " each of the two linears is allowed a unit more than inputs, sum and result round by (no gated family has biases)",
    "a plain activation's rounding left out": "covered: an activation of an fp16 number x rounds to at most x, and near"
    " its least value the linear's own error, two units of |x| and more, is larger than what the rounding adds",
}
"""Mutants that stay above what arithmetic does, because another allowance covers what they leave out, and why."""


class FirstFailure:
    """A pytest plugin that keeps the first test to fail, and why."""

    name = ""
    error: BaseException | None = None

    def pytest_exception_interact(self, node: Any, call: pytest.CallInfo[object]) -> None:
        """Keep what has failed."""
        if self.error is None and call.excinfo is not None:
            self.name, self.error = getattr(node, "originalname", node.name), call.excinfo.value


@functools.cache
def place(test: str) -> str:
    """Return the node id of one of the tests."""
    definition = f"def {test.partition('[')[0]}("
    [path] = [path for path in TESTS.rglob("test_*.py") if definition in path.read_text(encoding="utf-8")]
    return f"{path}::{test}"


def failing(tests: tuple[str, ...]) -> str:
    """Return which of the tests fails first, "" where none does."""
    first, said = FirstFailure(), io.StringIO()
    with redirect_stdout(said):
        status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *map(place, tests)], [first])
    if first.error is not None and not isinstance(first.error, CAUGHT):
        raise first.error
    if first.error is None and status != pytest.ExitCode.OK:
        raise RuntimeError(said.getvalue())
    return first.name


def caught_by(made: list[tuple[Any, Arithmetic, Seen]]) -> str:
    """Return what notices the mutant that is in place, "" where nothing does."""
    quick = failing(QUICK)
    if quick:
        return f"`{quick}`"
    for model, arithmetic, seen in made:
        _, certificate = contract.certified(model, arithmetic)
        wrong = contract.broken(certificate, seen, contract.FREE)
        if wrong:
            return f"`{wrong[0].split(':')[0].split('.')[-1]}` passed its bound"
    slow = failing(SLOW)
    return f"`{slow}`" if slow else ""


def main() -> int:
    """Perturb and print the table."""
    torch.set_num_threads(1)
    survivors = []
    made = cases()
    control = caught_by(made)
    if control:
        print(f"the checks fail without a mutant: {control}")
        return 1
    print("| bound | noticed by |\n|---|---|")
    for what, function, old, new in MUTANTS:
        with rewritten(function, old, new):
            noticed = caught_by(made)
        print(f"| {what} | {noticed or COVERED.get(what, '**nothing**')} |", flush=True)
        survivors += [] if noticed or what in COVERED else [what]
    print("\n".join(["", *(f"survived: {name}" for name in survivors)]))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
