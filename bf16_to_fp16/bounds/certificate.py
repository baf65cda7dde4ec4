"""Bound every site of one model in a walk along its residual stream.

A norm turns any input into n with ‖n‖₂ ≤ √d, times the gain. So every sublayer has a bounded input, and the stream is
at most the embedding plus the most that sublayers add. A sum's rounding error depends on how large the summed terms
are, even if they cancel. So a bound of this error is computed from the terms and added to the sum's bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import UserError
from ..families.layout import Layout, ResolvedStack, TensorReader, TensorSource, walk
from ..families.resolve import effective, stored
from ..families.wiring import Attention, Experts, FeedForward, Head, HeadLinear, Projector, StackEnds, Sublayer
from ..numerics import FP16_MAX, GELU_CUBE_BACKWARD_LIMIT
from ..targets import SQUARING, TARGETS
from .activations import check_bounded
from .arithmetic import COMPUTED, Arithmetic, full_precision, largest
from .attention import soft_capped
from .attention_sites import AttentionSites
from .factored import chunks
from .feed_forward_sites import experts_sites, feed_forward_sites
from .findings import Certificate
from .kinds import SiteKind
from .linear import (
    Projection,
    bound_box,
    bound_linear,
    enclosing_axes,
    side_by_side,
    squared_matrix_vector,
    stream_itself,
    summed_axes,
)
from .module_findings import ModuleFindings, Normed, Projected
from .spectral import Spectra


def head_sites(findings: ModuleFindings, head: Head, source: Normed) -> None:
    """Record the sites of a model's head, whose linears give logits or class scores. source: the last norm's output."""
    (final, square), layout, a, note = source, findings.layout, findings.arithmetic, findings.note
    scale, keep = layout.head_scale, findings.kept("head") if head.dropout else 1.0
    if scale != 1.0:
        final, square = final.scaled(scale, a), square * scale**2
        note("model:mul", SiteKind.NORM, final.bound)
    if keep != 1.0:
        final = final.scaled(1 / keep, a)
        note(f"{head.dropout}:mul", SiteKind.NORM, final.bound)
    first, *others = head.linears
    bound, expected = linear_on_norm(findings, first, (final, square))
    for linear, following in zip(head.linears, others, strict=False):
        # |tanh x| is at most 1 and at most |x|.
        caps, squares = a.rounded(bound.clamp(max=1)), expected.clamp(max=1)
        note(linear.tanh, SiteKind.ACTIVATION, caps)
        if keep != 1.0:
            caps = a.rounded(caps / keep)
            note(f"{head.dropout}:mul#2", SiteKind.ACTIVATION, caps)
        weight, bias = findings.weight(following.at)
        bound, expected = bound_box(caps, weight, bias, a), squared_matrix_vector(weight, squares)
        findings.record(following.at, SiteKind.LOGITS, (bound, bound), expected, (caps, squares))
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
    """Record the first linear of a ``Head``; return its outputs' bounds and mean squares. source: the norm's output."""
    table, bias = findings.checked(linear.weight, findings.read(linear.weight)), findings.tensor(linear.bias)
    final, square = source
    bounds, partials, expected, start = [], [], [], 0
    for rows in chunks(table):
        part = bound_linear(final, rows, None if bias is None else bias[start : start + len(rows)], findings.arithmetic)
        start += len(rows)
        bounds.append(part.bound)
        partials.append(part.partial)
        expected.append((part.norms / part.radius).square() + part.centre.square())
    bound, partial, squares = torch.cat(bounds), torch.cat(partials), torch.cat(expected)
    kind = SiteKind.NEURON if linear.tanh else SiteKind.LOGITS
    findings.record(linear.at, kind, (bound, partial), squares, (final.bound, square))
    return bound, squares


REFINED_ROWS = 4  # rows of one feed-forward output that get an eigenvalue of their own


class _StreamWalk(ModuleFindings):
    """Bounds a model's sites in one pass along the residual stream, with only one sublayer's weights in memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stream = torch.zeros(0)
        self.stream_square = torch.zeros(0)
        self.stream_norm = 0.0
        self.stream_axes = torch.zeros(0)
        """Squared axes of an ellipsoid that holds the stream, for sublayers that read it without a norm."""
        self.memory: Normed | None = None
        """The encoder's last norm's output, which a decoder reads."""

    def run(self, advance: Callable[[int, int], None] | None, until_one_fails: bool) -> Certificate:
        done, total = 0, sum(len(stack.sublayers) for stack in self.layout.stacks())
        for reader in walk(self.layout):
            if reader.is_first:
                self.begin(reader.stack.ends)
            if reader.sublayer is None:
                self.end(reader.stack)
                continue
            self.join(reader.sublayer, *self.output(reader.sublayer, self.read_by(reader.norm)))
            done += 1
            if advance is not None:
                advance(done, total)
            if until_one_fails and not all(site.holds for site in self.sites.values()):
                break
        return self.certificate()

    def output(self, sublayer: Sublayer, source: Normed) -> Projected:
        if isinstance(sublayer, Attention):
            return AttentionSites(self, sublayer).output(source, self.memory)
        if isinstance(sublayer, Experts):
            return experts_sites(self, sublayer, source)
        return feed_forward_sites(self, sublayer, source)

    def begin(self, ends: StackEnds) -> None:
        """Record the embedding's sites and set the stream's first bounds. These come from the embedding's largest
        entries, or from the output of a norm on it."""
        a = self.arithmetic
        amax, square, length = self.table(self.layout.table(ends))
        self.note(f"{ends.embedding}:embedding", SiteKind.EMBEDDING, amax)
        width, scale = amax.numel(), self.layout.embedding_scale(ends)
        if scale != 1.0:
            square = square * scale**2
            if ends.rounds_scale:
                scale *= 1 + a.unit
            amax = self.rounded(amax * scale)
            length = a.rounded_length(length * scale, width)
            self.note(ends.scaling, SiteKind.EMBEDDING, amax)
        self.outputs[ends.embedding] = (amax, square)
        if ends.positions:
            extra, extra_square, extra_length = self.table(ends.positions)
            path = ends.positions.removesuffix(".weight")
            self.note(f"{path}:embedding", SiteKind.EMBEDDING, extra)
            self.outputs[path] = (extra, extra_square)
            amax, square = self.rounded(amax + extra), square + extra_square
            length = a.rounded_length(length + extra_length, width)
            self.note(f"{ends.at}:add", SiteKind.EMBEDDING if ends.first_norm else SiteKind.RESIDUAL, amax)
        for w in (w for w in self.layout.projectors if not w.behind):
            brought, brought_square = self.projected(w)
            amax, square = torch.maximum(amax, brought), torch.maximum(square, brought_square)
            length = max(length, float(brought.norm()))
            self.note(w.add, SiteKind.RESIDUAL, amax)
        if ends.first_norm:
            normed, square = self.normalised(ends.first_norm, amax, square, min(float(amax.norm()), length))
            amax, length = normed.bound, normed.length
        keep = self.kept("stream")
        if keep != 1.0:
            amax, length = self.rounded(amax / keep), a.rounded_length(length / keep, width)
            path = ends.dropouts[0] if ends.dropouts else ends.at
            self.note(f"{path}:mul", SiteKind.RESIDUAL, amax)
        self.stream, self.stream_square, self.stream_norm = amax, square, length
        self.stream_axes = enclosing_axes(amax, length)

    def projected(self, w: Projector) -> tuple[Tensor, Tensor]:
        """Record a projector, which brings another model's outputs into the stream. Return bounds and mean squares of
        the projector's output. The projector's input may be any fp16 vector. If a LayerNorm reads this input, bounds
        hold only for inputs whose mean |x| is at most ``MOST_MEAN``."""
        width = self.layout.input_width(w)
        entering = torch.full((width,), FP16_MAX, dtype=torch.float64)
        unknown, longest = torch.ones_like(entering), FP16_MAX * math.sqrt(width)
        source, square = self.normalised(w.norm, entering, unknown, longest, eps=w.layer_norm_eps)
        source = side_by_side(source, w.joined, by_channel=w.by_channel)
        square = square.repeat_interleave(w.joined) if w.by_channel else square.repeat(w.joined)
        if w.merging:
            merged, square = self.linear(w.merging, SiteKind.OUTPUT, (source, square))
            if w.feed_forward is None:
                return merged.bound, square
            source = stream_itself(enclosing_axes(merged.bound, float(merged.bound.norm())), merged.bound)
        if w.feed_forward is not None:
            brought, square = feed_forward_sites(self, w.feed_forward, (source, square))
            return brought.bound, square
        weight = self.tensor(w.weight)
        assert weight is not None
        linear = bound_linear(source, weight.t(), None, self.arithmetic)
        expected = (linear.norms / linear.radius).square()
        self.note(f"{w.at}:scores", SiteKind.EMBEDDING, linear.bound, linear.partial)
        self.inputs[w.at], self.outputs[w.at] = (source.bound, square), (linear.bound, expected)
        return linear.bound, expected

    def end(self, stack: ResolvedStack) -> None:
        ends = stack.ends
        final, square = self.read_by(ends.norm)
        keep = self.kept("stream") if ends.dropouts else 1.0
        if keep != 1.0:
            final = final.scaled(1 / keep, self.arithmetic)
            self.note(f"{ends.dropouts[-1]}:mul", SiteKind.NORM, final.bound)
        if stack.is_encoder:
            self.memory = (final, square)
        if stack.is_last and self.layout.head is not None:
            head_sites(self, self.layout.head, (final, square))

    def read_by(self, path: str) -> Normed:
        """Record the norm at ``path``; return its output with mean squares. For "" return the stream itself."""
        if not path:
            return stream_itself(self.stream_axes, self.stream), self.stream_square
        length = min(float(self.stream.norm()), self.stream_norm)
        return self.normalised(path, self.stream, self.stream_square, length)

    def join(self, sublayer: Sublayer, branch: Projection, expected: Tensor) -> None:
        """Add a sublayer's output to the stream, through the post-norm if there is one. branch, expected: bounds and
        mean squares of the output projection."""
        axes = None
        if sublayer.post_norm:
            length = min(branch.length, float(branch.bound.norm()))
            out, expected = self.normalised(sublayer.post_norm, branch.bound, expected, length)
            branch, axes = Projection(out.bound, out.bound, out.length), None if out.shift is not None else out.axes
        self.add(sublayer, branch, expected, axes)
        if isinstance(sublayer, FeedForward) and sublayer.scalar:
            self.multiply(sublayer)
        for w in (w for w in self.layout.projectors if w.behind == sublayer.add):
            brought, square = self.projected(w)
            self.raise_stream(brought, square, w.add)
            whole = self.stream_norm + float(brought.norm())
            self.stream_norm = self.arithmetic.rounded_length(whole, brought.numel())

    def add(self, sublayer: Sublayer, projection: Projection, square: Tensor, axes: Tensor | None) -> None:
        """Add a sublayer's output to the stream's bounds. projection, square: bounds and mean squares of the output.
        axes: the squared axes of an ellipsoid that contains the output, if known."""
        keep, branch = min(self.kept("stream"), self.kept("branch")), projection.bound
        width = branch.numel()
        length = min(projection.length, float(branch.norm())) / keep * (1 + self.arithmetic.unit)
        if (factor := self.layout.multiplier("branch")) != 1.0:
            branch, length = self.rounded(branch * factor), self.arithmetic.rounded_length(length * factor, width)
            square = square * factor**2
            axes = None if axes is None else axes * (factor * (1 + self.arithmetic.unit)) ** 2
            self.note(sublayer.add.replace(":add", ":mul"), SiteKind.OUTPUT, branch)
        total = (self.stream_norm + length) * (1 + self.arithmetic.unit)
        self.stream_norm = total * COMPUTED + 2 * self.arithmetic.tiny * math.sqrt(width)
        if keep != 1.0:
            branch = self.rounded(branch / keep)
            # "" where the class calls a function.
            module = sublayer.dropout if isinstance(sublayer, Attention) else "".join(sublayer.dropouts[-1:])
            self.note(f"{module or sublayer.add.partition(':')[0]}:mul", SiteKind.OUTPUT, branch)
        self.raise_stream(branch, square, sublayer.add)
        if self.layout.reads_stream_itself:
            a = self.arithmetic
            own = enclosing_axes(branch, length) if axes is None else axes / keep**2 * (1 + a.unit) ** 2
            total_axes = summed_axes(self.stream_axes, own) * (1 + a.unit) ** 2
            self.stream_axes = summed_axes(total_axes, torch.full_like(branch, width * (2 * a.tiny) ** 2))

    def raise_stream(self, added: Tensor, square: Tensor, site: str) -> None:
        self.stream, self.stream_square = self.rounded(self.stream + added), self.stream_square + square
        self.note(site, SiteKind.RESIDUAL, self.stream)

    def multiply(self, sublayer: FeedForward) -> None:
        """Multiply the stream's bounds by the learned scalar at the end of a layer."""
        scalar, a = self.tensor(sublayer.scalar), self.arithmetic
        assert scalar is not None
        factor, width = largest(scalar.abs().double()), self.stream.numel()
        self.stream, self.stream_square = self.rounded(self.stream * factor), self.stream_square * factor**2
        self.stream_norm = a.rounded_length(self.stream_norm * factor, width)
        own = self.stream_axes * (factor * (1 + a.unit)) ** 2
        self.stream_axes = summed_axes(own, torch.full_like(own, width * a.tiny**2)) if own.numel() else own
        self.note(sublayer.scaled, SiteKind.RESIDUAL, self.stream)


@full_precision()
def bound(
    layout: Layout,
    weights: TensorReader,
    arithmetic: Arithmetic | None = None,
    *,
    target: str = "half",
    refine: int = REFINED_ROWS,
    spectra: Spectra | None = None,
    advance: Callable[[int, int], None] | None = None,
    until_one_fails: bool = False,
) -> Certificate:
    """Return the certificate of the model that ``layout`` describes, with the given weights.

    target: the arithmetic to bound. "norm-safe" adds the squares of the stream, for norms in fp16. "fp16-accumulate"
    also makes every sum in fp16. "train" adds dropout, and limits a gate's output before gelu_new to 147.8. refine: how
    many output channels of each feed-forward may get a tighter bound from a computation for that channel alone.
    spectra: a store of eigenvalue bounds, by default an empty one. A store that was filled for other, nearly equal
    weights must come from ``Spectra.for_others``. advance: called with the number of sublayers done and of all.
    until_one_fails: whether to stop after a sublayer with a site over its limit. Raises UserError for an unknown
    target, or if ``check_bounded`` does."""
    arithmetic = arithmetic or Arithmetic()
    check_bounded(layout)
    limits: dict[str, float] = {}
    if target not in TARGETS:
        raise UserError(f"target {target!r} is unknown; choose one of {', '.join(TARGETS)}")
    arithmetic = replace(arithmetic, norms16=target in SQUARING, sums16=target == "fp16-accumulate")
    if target == "train":
        arithmetic = replace(arithmetic, train=True)
        if any(sublayer.activation == "gelu_new" for sublayer in layout.feed_forwards):
            limits = {SiteKind.GATE: GELU_CUBE_BACKWARD_LIMIT}  # over it the derivative overflows
    with torch.no_grad():
        stream = _StreamWalk(layout, weights, arithmetic, limits, refine, spectra or Spectra(weights))
        return stream.run(advance, until_one_fails)


def is_certified(layout: Layout, weights: TensorReader, arithmetic: Arithmetic, target: str, spectra: Spectra) -> bool:
    """Return whether the certificate for ``target`` holds, ending the walk at the first sublayer that fails."""
    return bound(layout, weights, arithmetic, target=target, spectra=spectra, until_one_fails=True).holds


def fp16_weights(checkpoint: TensorSource, layout: Layout) -> TensorReader:
    """Return a function that reads a tensor by its name, rounded to fp16. A norm's gain to which stock code adds an
    offset is read in fp32, with the offset added."""

    def read(name: str) -> Tensor:
        tensor = layout.tensors[name]
        return effective(tensor, stored(checkpoint, tensor).half())

    return read
