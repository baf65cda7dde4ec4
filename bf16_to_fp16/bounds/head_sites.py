"""A head's sites: the logits, made by one linear or by several with a tanh between them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..families.wiring import Head, HeadLinear
from .arithmetic import largest
from .attention import soft_capped
from .factored import chunks
from .kinds import SiteKind
from .linear import bound_box, bound_linear, squared_matrix_vector
from .module_findings import ModuleFindings, Normed


def head_sites(findings: ModuleFindings, head: Head, source: Normed) -> None:
    """source: the last norm's output."""
    (final, square), layout, a, note = source, findings.layout, findings.arithmetic, findings.note
    scale, keep = layout.head_scale, findings.kept("head") if head.dropout else 1.0
    if scale != 1.0:
        final, square = final.scaled(scale, a), square * scale**2
        note("model:mul", SiteKind.NORM, final.bound)
    if keep != 1.0:
        final = final.scaled(1 / keep, a)
        findings.dropout(head.dropout, keep, SiteKind.NORM, final.bound)
    first, *others = head.linears
    bound, expected = linear_on_norm(findings, first, (final, square))
    for linear, following in zip(head.linears, others, strict=False):
        # |tanh x| is at most 1 and at most |x|.
        bound, expected = a.rounded(bound.clamp(max=1)), expected.clamp(max=1)
        note(linear.tanh, SiteKind.ACTIVATION, bound)
        if keep != 1.0:
            bound = a.rounded(bound / keep)
            note(f"{head.dropout}:mul#2", SiteKind.ACTIVATION, bound)
        bound, expected = linear_behind_tanh(findings, following, bound, expected)
    # The model itself selects positions of the head's input, and splits its output.
    findings.inner["model:head"] = max(largest(final.bound), largest(bound))
    if layout.stock.is_language_model and layout.family.logits_bias:
        offset = findings.tensor(layout.family.logits_bias)
        offset = torch.zeros_like(bound) if offset is None else offset.double().abs().view(-1)
        bound = a.rounded(bound + offset)
        note("model:add", SiteKind.LOGITS, bound)
    if layout.stock.is_language_model and (divisor := layout.multiplier("logits")) != 1.0:
        note("model:div", SiteKind.LOGITS, a.rounded(bound / divisor))
    cap = layout.cap(head)
    if cap is not None:
        capped = soft_capped(bound, cap, a)
        note("model:div", SiteKind.LOGITS, capped.quotient)
        note("model:tanh", SiteKind.LOGITS, capped.tanh)
        note("model:mul", SiteKind.LOGITS, capped.result)


def linear_on_norm(findings: ModuleFindings, linear: HeadLinear, source: Normed) -> tuple[Tensor, Tensor]:
    """Return a linear's bounds and expected mean squares, computed some rows at a time."""
    table, bias = findings.checked(linear.weight, findings.read(linear.weight)), findings.tensor(linear.bias)
    final, square = source
    bounds, partials, expected, start = [], [], [], 0
    for rows in chunks(table):
        made = bound_linear(final, rows, None if bias is None else bias[start : start + len(rows)], findings.arithmetic)
        start += len(rows)
        bounds.append(made.bound)
        partials.append(made.partial)
        expected.append((made.norms / made.radius).square() + made.centre.square())
    bound, partial, squares = torch.cat(bounds), torch.cat(partials), torch.cat(expected)
    kind = SiteKind.NEURON if linear.tanh else SiteKind.LOGITS
    findings.record(linear.at, kind, (bound, partial), squares, (final.bound, square))
    findings.note_weight(linear.at, findings.inner[f"{linear.weight.rpartition('.')[0]}:weight"])
    findings.inner[f"{linear.at}:input"] = largest(final.bound)
    return bound, squares


def linear_behind_tanh(
    findings: ModuleFindings, linear: HeadLinear, caps: Tensor, square: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the same of a linear behind a tanh; caps, square: bounds and mean squares of its input."""
    weight, bias = findings.weight(linear.at)
    bound = bound_box(caps, weight, bias, findings.arithmetic)
    expected = squared_matrix_vector(weight, square)
    findings.record(linear.at, SiteKind.LOGITS, (bound, bound), expected, (caps, square))
    findings.inner[f"{linear.at}:input"] = largest(caps)
    return bound, expected
