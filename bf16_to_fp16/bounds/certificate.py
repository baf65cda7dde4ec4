"""The bounds of one model: a walk along its residual stream, which bounds every site.

A norm turns any input into a vector of known length: n with ‖n‖₂ ≤ √d, times the gain. So every sublayer has a bounded
input, and the stream is the embedding plus the most that every sublayer can add. Each rounding of fp16 is an additive
term: a sum of large products that cancel can be off by more than any multiple of the sum. ``Arithmetic`` says what is
covered; ``linear``, ``attention`` and ``feed_forward`` bound the parts of a sublayer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..errors import UserError
from ..families.layout import Layout, ResolvedStack, TensorReader, TensorSource
from ..families.resolve import effective, stored
from ..families.spread import spread_out
from ..families.walk import walk
from ..families.wiring import (
    MOST_MEAN,
    Attention,
    Experts,
    FeedForward,
    Head,
    HeadLinear,
    Projector,
    Rotary,
    StackEnds,
    Sublayer,
)
from ..numerics import FP16_MAX, PROOF_LIMIT
from ..ranges import NormRange, ScoreRange
from ..targets import SQUARING, TARGETS
from .activations import check_bounded
from .arithmetic import COMPUTED, TINY, UNIT, UNIT32, Arithmetic, full_precision, growth, largest
from .attention import (
    ScoreBounds,
    attention_output,
    capped_span,
    gathered,
    masked_span,
    query_growth,
    rotated,
    rotated_score_bounds,
    score_bounds,
    soft_capped,
    turned,
    turned_score_bounds,
)
from .factored import chunks
from .feed_forward import GatedNeurons, Neurons, PlainNeurons, feed_forward_output
from .findings import Certificate, Findings
from .kinds import SiteKind, traits
from .linear import (
    LinearBound,
    NormOutput,
    Projection,
    block_sums,
    bound_box,
    bound_linear,
    either,
    enclosing_axes,
    layer_normalised,
    rms_normalised,
    side_by_side,
    squared_matrix_vector,
    stream_itself,
    summed_axes,
    table_of,
)
from .spectral import Spectra

WEIGHTS = ("weight", "bias")  # of a linear
REFINED_ROWS = 4  # rows of one feed-forward output that get an eigenvalue of their own

OPERATIONS = {"swish": "silu", "gelu_pytorch_tanh": "gelu"}
"""The operation that computes an activation, where it has another name."""

FP16_OVERFLOW = 65520.0  # values from here on are inf in fp16


class _Walk(Findings):
    """One pass over a layout, sublayer by sublayer; only one sublayer's weights are in memory."""

    def __init__(
        self,
        layout: Layout,
        weights: TensorReader,
        arithmetic: Arithmetic,
        limits: Mapping[str, float],
        refine: int,
        squares: bool,
        spectra: Spectra,
    ) -> None:
        super().__init__(layout, weights, arithmetic, limits)
        self.refine, self.squares, self.spectra = refine, squares, spectra
        self.rounded = arithmetic.rounded
        self.tables: dict[str, tuple[Tensor, Tensor, float]] = {}
        self.stream = torch.zeros(0)
        self.stream_square = torch.zeros(0)
        self.stream_norm = 0.0
        self.stream_axes = torch.zeros(0)
        """Squared axes of an ellipsoid that holds the stream, for sublayers that read it without a norm."""
        self.until_one_fails = False
        self.memory: tuple[NormOutput, Tensor] | None = None
        """The encoder's last norm's output, which a decoder reads, and the mean square of each component."""

    def run(self, advance: Callable[[int, int], None] | None = None) -> Certificate:
        done, total = 0, sum(len(stack.sublayers) for stack in self.layout.stacks())
        for reader in walk(self.layout):
            if reader.is_first:
                self.begin(reader.stack.ends)
            if reader.sublayer is None:
                self.end(reader.stack)
                continue
            if isinstance(reader.sublayer, Attention):
                self.attention(reader.sublayer)
            elif isinstance(reader.sublayer, Experts):
                self.experts(reader.sublayer)
            else:
                self.feed_forward(reader.sublayer)
            done += 1
            if advance is not None:
                advance(done, total)
            if self.until_one_fails and not all(site.holds for site in self.sites.values()):
                break
        return self.certificate()

    def table(self, name: str) -> tuple[Tensor, Tensor, float]:
        if name not in self.tables:
            table = self.tensor(name)
            assert table is not None
            of_it = replace(self.spectra, about=frozenset((name,)))
            self.tables[name] = of_it.once("table", partial(table_of, table))
        return self.tables[name]

    # -- a stack ----------------------------------------------------------------------------------------------------

    def begin(self, ends: StackEnds) -> None:
        """Start the residual stream from the embedding's largest entries, or from the first norm's output."""
        a = self.arithmetic
        amax, square, length = self.table(self.layout.table(ends))
        self.note(f"{ends.embedding}:embedding", SiteKind.EMBEDDING, amax)
        width, scale = amax.numel(), self.layout.embedding_scale(ends)
        if scale != 1.0:
            square = square * scale**2
            if ends.rounds_scale:
                scale *= 1 + a.unit
                self.inner[f"{ends.scaling.removesuffix(':mul')}:to"] = scale
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
            made, square = self.normalised(ends.first_norm, amax, square, min(float(amax.norm()), length))
            amax, length = made.bound, made.length
        keep = self.kept("stream")
        if keep != 1.0:
            amax, length = self.rounded(amax / keep), a.rounded_length(length / keep, width)
            path = ends.dropouts[0] if ends.dropouts else ends.at
            self.note(f"{path}:mul", SiteKind.RESIDUAL, amax)
            self.dropout(path, keep)
        self.stream, self.stream_square, self.stream_norm = amax, square, length
        self.stream_axes = enclosing_axes(amax, length)

    def projected(self, w: Projector) -> tuple[Tensor, Tensor]:
        """Return bounds and mean squares of a projector's output. A projector takes a vision tower's states into the
        text model's stream; they are only known to fit fp16, which is enough for its norm in fp32."""
        gain = self.tensor(f"{w.norm}.weight")
        assert gain is not None
        width = gain.numel()
        entering = torch.full((width,), FP16_MAX, dtype=torch.float64)
        if w.pool:
            self.inner[w.pool] = FP16_MAX
        unknown, longest = torch.ones_like(entering), FP16_MAX * math.sqrt(width)
        source, square = self.normalised(w.norm, entering, unknown, longest, eps=w.layer_norm_eps)
        source = side_by_side(source, w.joined, by_channel=w.by_channel)
        square = square.repeat_interleave(w.joined) if w.by_channel else square.repeat(w.joined)
        if w.merging:
            merged, square = self.linear(w.merging, SiteKind.OUTPUT, source, square)
            source = stream_itself(enclosing_axes(merged.bound, float(merged.bound.norm())), merged.bound)
        if w.feed_forward is not None:
            given, square = self.neurons(w.feed_forward, source, square)
            return given.bound, square
        weight = self.tensor(w.weight)
        assert weight is not None
        made = bound_linear(source, weight.t(), None, self.arithmetic)
        expected = (made.norms / made.radius).square()
        self.note(f"{w.at}:scores", SiteKind.EMBEDDING, made.bound, made.partial)
        self.inputs[w.at], self.outputs[w.at] = (source.bound, square), (made.bound, expected)
        return made.bound, expected

    def end(self, stack: ResolvedStack) -> None:
        ends = stack.ends
        final, square = self.norm(ends.norm)
        keep = self.kept("stream") if ends.dropouts else 1.0
        if keep != 1.0:
            final = final.scaled(1 / keep, self.arithmetic)
            self.note(f"{ends.dropouts[-1]}:mul", SiteKind.NORM, final.bound)
            self.dropout(ends.dropouts[-1], keep)
        if stack.is_encoder:
            self.memory = (final, square)
        if stack.is_last and self.layout.head is not None:
            self.head(self.layout.head, final, square)

    def add(self, sublayer: Sublayer, made: Projection, square: Tensor, axes: Tensor | None) -> None:
        """Add a sublayer's output to the stream. square: its mean squares. axes: squared, of an ellipsoid."""
        keep, branch = min(self.kept("stream"), self.kept("branch")), made.bound
        width = branch.numel()
        length = min(made.length, float(branch.norm())) / keep * (1 + self.arithmetic.unit)
        total = (self.stream_norm + length) * (1 + self.arithmetic.unit)
        self.stream_norm = total * COMPUTED + 2 * self.arithmetic.tiny * math.sqrt(width)
        if keep != 1.0:
            branch = self.rounded(branch / keep)
            path = output_dropout(sublayer) or sublayer.add.partition(":")[0]
            self.note(f"{path}:mul", SiteKind.OUTPUT, branch)
            self.dropout(path, keep)
        self.stream = self.rounded(self.stream + branch)
        self.stream_square = self.stream_square + square
        if self.layout.reads_stream_itself:
            a = self.arithmetic
            own = enclosing_axes(branch, length) if axes is None else axes / keep**2 * (1 + a.unit) ** 2
            total_axes = summed_axes(self.stream_axes, own) * (1 + a.unit) ** 2
            self.stream_axes = summed_axes(total_axes, torch.full_like(branch, width * (2 * a.tiny) ** 2))
        self.note(sublayer.add, SiteKind.RESIDUAL, self.stream)

    def norm(self, path: str) -> tuple[NormOutput, Tensor]:
        """Return a norm's output and its components' mean squares; the stream and its own without a norm."""
        if not path:
            return stream_itself(self.stream_axes, self.stream), self.stream_square
        length = min(float(self.stream.norm()), self.stream_norm)
        return self.normalised(path, self.stream, self.stream_square, length)

    def normalised(
        self, path: str, entering: Tensor, variances: Tensor, length: float, *, eps: float | None = None
    ) -> tuple[NormOutput, Tensor]:
        """Return a norm's output and its components' mean squares. entering, variances, length: bounds, mean squares
        and largest ‖·‖₂ of its input. eps: of a LayerNorm among RMSNorms."""
        gain, shift = self.tensor(f"{path}.weight"), self.tensor(f"{path}.bias")
        assert gain is not None
        width, a = gain.numel(), self.arithmetic
        gain = gain.double()
        shift, planned = None if shift is None else shift.double(), a.planned or {}
        centred = self.layout.family.centred_norm or eps is not None
        if centred:
            # A stream that does not fit fails at its own site; here it would only make the bounds grow past fp32.
            # An embedding's norm reads no stream, so no exponent scales its input.
            factor = 2.0 ** planned.get(self.layout.streams_read.get(path, ""), 0)
            mean = min(float(entering.mean()) * factor, FP16_MAX if eps is None else MOST_MEAN)
            eps = eps or self.layout.eps_of(path)
            made = layer_normalised(gain, shift, mean, eps, a)
            self.note(f"{path}:layer_norm", SiteKind.NORM, made.bound)
            self.note(f"{path}:layer_norm.1", SiteKind.STATISTIC, self.rounded(torch.tensor(mean / factor)))
            self.note(f"{path}:layer_norm.2", SiteKind.STATISTIC, eps**-0.5 * (1 + 2 * UNIT))
        else:
            made = rms_normalised(gain, a, once=self.layout.family.norm_rounds_once)
            if not self.layout.family.norm_rounds_once:
                self.note(f"{path}:to#2", SiteKind.NORMALISED, made.radius * (1 + UNIT))
            self.note(f"{path}:{self.layout.family.norm_site}", SiteKind.NORM, made.bound)
        square = gain.square() if shift is None else gain.square() + shift.square()
        self.inputs[path] = (entering, variances)
        self.outputs[path] = (made.bound, square)
        variance = float(variances.mean()) if width else 0.0
        self.norms[path] = NormRange(length, torch.tensor([[variance, 1.0]], dtype=torch.float64))
        if self.squares:
            # A centred norm sums the components as well.
            most = max(length**2, math.sqrt(width) * length if centred else 0.0)
            self.note(f"{path} (sum of squares)", SiteKind.SQUARES, most * growth(width) + width * TINY)
        self.inner[f"{path}:input"] = largest(entering)
        return made, square

    def linear(self, path: str, kind: SiteKind, source: NormOutput, square: Tensor) -> tuple[LinearBound, Tensor]:
        """Bound a linear on a norm's output; return it and the expected mean square of each output."""
        weight, bias = self.weight(path)
        made = bound_linear(source, weight, bias, self.arithmetic, f"{path}.weight")
        expected = (made.norms / made.radius).square() + made.centre.square()
        if source.most is not None:
            expected = squared_matrix_vector(weight, square) + made.centre.square()
        self.inner[f"{path}:input"] = largest(source.bound)
        self.record(path, kind, (made.bound, made.partial), expected, (source.bound, square))
        return made, expected

    def linears(
        self, fused: Sequence[int], *reads: tuple[str, SiteKind, tuple[NormOutput, Tensor]]
    ) -> Iterator[tuple[LinearBound, Tensor]]:
        """Yield ``linear`` of each read. fused: the rows of each in one common matrix, () where each has its own."""
        if not fused:
            for path, kind, source in reads:
                yield self.linear(path, kind, *source)
            return
        path, kind, source = reads[0]
        made, expected = self.linear(path, kind, *source)
        yield from zip(made.split(fused), expected.split(fused), strict=True)

    def project(self, path: str, weight: Tensor, made: Projection, entering: Tensor, square: Tensor) -> Tensor:
        """Record an output projection; return its mean squares. entering, square: bounds, mean squares of its input."""
        expected = squared_matrix_vector(weight, square)
        self.record(path, SiteKind.OUTPUT, (made.bound, made.partial), expected, (entering, square))
        return expected

    def join(self, sublayer: Sublayer, made: Projection, expected: Tensor) -> None:
        """Add a projection's output, through the norm behind it, to the stream. expected: its mean squares."""
        axes = None
        if sublayer.post_norm:
            length = min(made.length, float(made.bound.norm()))
            out, expected = self.normalised(sublayer.post_norm, made.bound, expected, length)
            made, axes = Projection(out.bound, out.bound, out.length), None if out.shift is not None else out.axes
        self.add(sublayer, made, expected, axes)
        for w in (w for w in self.layout.projectors if w.behind == sublayer.add):
            brought, square = self.projected(w)
            self.stream, self.stream_square = self.rounded(self.stream + brought), self.stream_square + square
            whole = self.stream_norm + float(brought.norm())
            self.stream_norm = self.arithmetic.rounded_length(whole, brought.numel())
            self.note(w.add, SiteKind.RESIDUAL, self.stream)

    # -- sublayers --------------------------------------------------------------------------------------------------

    def attention(self, sublayer: Attention) -> None:
        heads, kv_heads = self.layout.heads(sublayer), self.layout.kv_heads(sublayer)
        source, square = self.norm(sublayer.norm)
        other = (source, square) if not sublayer.memory else self.memory
        assert other is not None
        if sublayer.block:
            other = self.summed(sublayer, source, square)
        reads = (
            (sublayer.query, SiteKind.QUERY, (source, square)),
            (sublayer.key, SiteKind.KEY, other),
            (sublayer.value, SiteKind.VALUE, other),
        )
        linears = self.linears(sublayer.fused, *reads)
        (query, query_square), (key, key_square) = next(linears), next(linears)
        if sublayer.rotary is not None and sublayer.query_norm:
            normed = (sublayer.query_norm, query, query_square, heads), (sublayer.key_norm, key, key_square, kv_heads)
            self.turned_score(sublayer, sublayer.rotary, heads, *(self.head_norm(sublayer, *each) for each in normed))
        elif sublayer.rotary is not None:
            self.rotated_score(sublayer, sublayer.rotary, (query, heads), (key, kv_heads))
        else:
            self.score(sublayer, heads, query, key)
        del query, key
        values, mean_square = next(linears)
        keep = self.kept("attention")
        if keep != 1.0:
            site = f"{sublayer.weights_dropout}:mul" if sublayer.weights_dropout else f"{sublayer.at}:mul#2"
            self.note(site, SiteKind.WEIGHTS, self.rounded(torch.tensor(1 / keep, dtype=torch.float64)))
            self.dropout(sublayer.weights_dropout or sublayer.at, keep)
        row = replace(self.arithmetic, max_length=self.layout.sees(sublayer, self.arithmetic.max_length))
        context = gathered(values, keep, row)
        self.note(f"{sublayer.at}:context", SiteKind.CONTEXT, context.bound)
        weight, bias = self.weight(sublayer.output)
        made = attention_output(context, weight, bias, heads, row)
        read = (kv_heads, heads // kv_heads, len(context.bound) // kv_heads)
        entering, mean_square = (spread_out(x, read) for x in (context.bound, mean_square / 4))
        self.join(sublayer, made, self.project(sublayer.output, weight, made, entering, mean_square))

    def head_norm(
        self, sublayer: Attention, path: str, made: LinearBound, square: Tensor, heads: int
    ) -> tuple[NormOutput, int]:
        """Bound the norm of queries or keys; return its output and number of heads. square: of its input."""
        together = heads if sublayer.norms_whole else 1
        bound, square = (x.view(heads // together, -1) for x in (made.bound, square))
        return self.normalised(path, bound.amax(0), square.mean(0), float(bound.norm(dim=1).max()))[0], together

    def turned_score(
        self,
        sublayer: Attention,
        rotary: Rotary,
        heads: int,
        query: tuple[NormOutput, int],
        key: tuple[NormOutput, int],
    ) -> None:
        """Bound the rotation of normalised queries and keys, and their scores."""
        a, scale = self.arithmetic, self.layout.score_scale(sublayer)
        one, other = (turned(source, a, together, rotary) for source, together in (query, key))
        self.turn({sublayer.query_norm: one.bound.flatten(), sublayer.key_norm: other.bound.flatten()})
        factors = self.rotation(sublayer, rotary, one.bound, other.bound)
        self.scored(sublayer, turned_score_bounds(one, other, heads, a, scale), scale, factors)

    def rotated_score(
        self, sublayer: Attention, rotary: Rotary, query: tuple[LinearBound, int], key: tuple[LinearBound, int]
    ) -> None:
        """Bound the rotation of queries and keys without norms, and their scores."""
        a, scale = self.arithmetic, self.layout.score_scale(sublayer)
        one, other = rotated(*query, rotary, a, query_growth(rotary, a.max_length)), rotated(*key, rotary, a)
        if rotary.growth is not None:
            self.note(f"{sublayer.at}:mul#5", SiteKind.ROTATION, largest(one.bound))
        turned_rows = {sublayer.query: one.bound, sublayer.key: other.bound}
        if sublayer.fused:
            turned_rows = {
                sublayer.query: torch.cat([one.bound, other.bound, torch.zeros(sublayer.fused[2], dtype=torch.float64)])
            }
        self.turn(turned_rows)
        factors = self.rotation(sublayer, rotary, one.bound, other.bound)
        self.scored(sublayer, rotated_score_bounds(one, other, a, scale), scale, factors)

    def turn(self, turned_rows: Mapping[str, Tensor]) -> None:
        """Raise modules' recorded outputs to their rotated values, which the same exponents move."""
        for path, most in turned_rows.items():
            bound, square = self.outputs[path]
            self.outputs[path] = (torch.maximum(bound, most), square)

    def rotation(self, sublayer: Attention, rotary: Rotary, query: Tensor, key: Tensor) -> float:
        most = max(largest(query), largest(key))
        self.note(f"{rotary.at}:to", SiteKind.ROTATION, rotary.factor)
        for operation in ("mul", "mul#2", "mul#3", "mul#4", "add", "add#2"):
            self.note(f"{sublayer.at}:{operation}", SiteKind.ROTATION, most)
        return most

    def summed(self, sublayer: Attention, source: NormOutput, square: Tensor) -> tuple[NormOutput, Tensor]:
        """Bound sums over blocks of positions and their norm; return keys' and values' input, and its mean squares."""
        size, length = self.layout.summed(sublayer), self.arithmetic.max_length
        # With padding on the right, the last sum is of a block and part of another.
        sums, longest = block_sums(source, min(2 * size - 1, length), length, self.arithmetic)
        self.note(f"{sublayer.at}:sum", SiteKind.BLOCK_SUM, sums)
        made, made_square = self.normalised(sublayer.block_norm, sums, square * size, longest)
        return either(source, made), torch.maximum(square, made_square)

    def score(self, sublayer: Attention, heads: int, query: LinearBound, key: LinearBound) -> None:
        scale = self.layout.score_scale(sublayer)
        made = score_bounds(query, key, heads, self.arithmetic, scale)
        self.scored(sublayer, made, scale, max(largest(query.bound), largest(key.bound)))

    def scored(self, sublayer: Attention, made: ScoreBounds, scale: float, factors: float) -> None:
        """Record the steps of every head's scores. factors: bound of queries and keys."""
        heads = len(made.product)
        self.note(f"{sublayer.at}:scores", SiteKind.SCORES, made.product, made.partial)
        scaled = self.rounded(made.product * scale) if sublayer.scaled else made.product
        self.note(sublayer.scaling[0], SiteKind.SCORES, scaled)
        # SDPA's plain path multiplies queries and keys by the root of the scale instead.
        self.inner |= dict.fromkeys(sublayer.scaling, factors * max(1.0, scale))
        top, steps, span, cap = scaled, scaled, made.span, self.layout.cap(sublayer)
        if cap is not None:
            capped = soft_capped(scaled, cap, self.arithmetic)
            self.note(f"{sublayer.at}:div", SiteKind.SCORES, capped.quotient)
            steps = torch.maximum(scaled, capped.quotient)  # of a cap under 1 that is the larger one
            self.note(f"{sublayer.at}:tanh", SiteKind.SCORES, capped.tanh)
            self.note(sublayer.capping, SiteKind.SCORES, capped.result)
            scaled, span = capped.result, capped_span(span, capped)
        bias = self.tensor(sublayer.bias) if sublayer.bias else None
        offset = torch.zeros(heads, dtype=torch.float64)
        for name in filter(None, (sublayer.bias, sublayer.block_bias)):
            table = self.tensor(name)
            assert table is not None
            largest_bias = table.double().abs().amax(0)
            offset = torch.maximum(offset, largest_bias)
            self.note(f"{name.removesuffix('.weight')}:embedding", SiteKind.POSITION_BIAS, largest_bias)
        biased = self.rounded(scaled + offset)
        self.note(sublayer.joining, SiteKind.SCORES, biased)
        product = torch.maximum(made.product, made.partial)
        excess = excess_bits(torch.maximum(product, steps))
        if cap is None:  # no factor on queries moves capped scores
            excess = torch.maximum(excess, excess_bits(scaled, offset))
        if not sublayer.radius:  # local attention's mask is −inf
            table = None if bias is None else bias.double()
            whole, still = (masked_span(x * span, x * scaled, table, self.arithmetic) for x in (1.0, 0.0))
            self.note(f"{sublayer.at}:masked", SiteKind.MASKED_SCORES, whole)
            if cap is None:
                excess = torch.maximum(excess, excess_bits(whole - still, still))
        self.note(f"{sublayer.at}:softmax", SiteKind.WEIGHTS, 1.0)
        self.scores[sublayer.at] = ScoreRange(largest(product), largest(torch.maximum(biased, top)), excess)

    def feed_forward(self, sublayer: FeedForward) -> None:
        self.join(sublayer, *self.neurons(sublayer, *self.norm(sublayer.norm)))

    def experts(self, sublayer: Experts) -> None:
        """Bound a router and its experts, and add the output of one token's experts to the stream."""
        source, square = self.norm(sublayer.norm)
        if self.arithmetic.train and sublayer.noise:
            # Where the norm's output is in fp32 already, stock code multiplies what the experts read as well.
            source = source.scaled(1 + self.layout.noise(sublayer), self.arithmetic)
            self.note(f"{sublayer.router}:mul", SiteKind.NORM, source.bound)
        self.linear(sublayer.classifier, SiteKind.ROUTING, source, square)
        number, weight, together = self.layout.experts_together(sublayer)
        self.routed(sublayer)
        made, expected = zip(*(self.neurons(each, source, square) for each in sublayer.experts), strict=True)
        bound, length = torch.stack([each.bound for each in made]).amax(0), max(each.length for each in made)
        product, mean_square = bound, torch.stack(expected).amax(0) * together**2
        if sublayer.chosen:
            # Weights and their sum are off by the roundings of softmax, sum, quotient and product, in fp32, and by one
            # to fp16. Each product is rounded, and so is each addition, in any order; partial sums are at most the sum
            # of magnitudes. Without rounding this is the convex hull's bound.
            a = self.arithmetic
            once = (1 + a.unit) * (1 + (len(made) + 8) * UNIT32)
            product = self.rounded(bound * weight * once)
            grown = once * (1 + a.unit) ** (number + 1)
            bound = bound * together * grown + 2 * number * a.tiny
            length = (length * together * grown + 2 * number * a.tiny * math.sqrt(bound.numel())) * COMPUTED
        # A token of Switch has the output of one expert, or of none, times a probability: rounding is monotone, so that
        # a product with at most 1 is at most the number itself, and a sum with zeros is exact.
        self.note(f"{sublayer.at}:mul", SiteKind.OUTPUT, product)
        self.note(f"{sublayer.at}:index_add", SiteKind.OUTPUT, bound)
        if sublayer.shared is not None:
            always, own = self.neurons(sublayer.shared, source, square)
            bound, mean_square = self.rounded(bound + always.bound), mean_square + own
            length = self.arithmetic.rounded_length(length + always.length, bound.numel())
            self.note(sublayer.sum, SiteKind.OUTPUT, bound)
        self.join(sublayer, Projection(bound, bound, length), mean_square)

    def routed(self, sublayer: Experts) -> None:
        """Record the steps from a router's logits to its weights, all of them in fp32 but a cast."""
        _, weight, together = self.layout.experts_together(sublayer)
        number = len(sublayer.experts)
        for step in ("softmax", "max", "sigmoid", "gather", "div"):
            self.note(f"{sublayer.router}:{step}", SiteKind.WEIGHTS, 1.0)
        self.inner[f"{sublayer.router}:topk"] = 1.0
        summed = float(number) * (1 + number * UNIT32) if sublayer.chosen else 0.0
        if sublayer.scaling:
            self.inner[f"{sublayer.router}:mul"] = max(weight, together)
        if sublayer.correction:
            most = 1.0 + largest(self.read(sublayer.correction).double().abs())
            self.inner |= {f"{sublayer.router}:{step}": 2 * most for step in ("add", "topk", "masked_fill")}
            summed = max(summed, 2 * most)  # of a group's two best, and of the weights of those that are chosen
        if summed:
            self.inner[f"{sublayer.router}:sum"] = summed

    def neurons(self, sublayer: FeedForward, source: NormOutput, square: Tensor) -> tuple[Projection, Tensor]:
        """Bound a feed-forward on a norm's output; return its output projection and the mean squares."""
        linears = filter(None, (sublayer.gate, sublayer.linear, sublayer.output))
        names = frozenset(f"{linear}.{part}" for linear in linears for part in WEIGHTS)
        of = (self.arithmetic, self.kept("neurons"), replace(self.spectra, about=names))
        if sublayer.gate:
            reads = (
                (sublayer.gate, SiteKind.GATE, (source, square)),
                (sublayer.linear, SiteKind.NEURON, (source, square)),
            )
            (gate, gate_square), (other, other_square) = self.linears(sublayer.fused, *reads)
            self.activation(sublayer, gate)
            gated = GatedNeurons(gate, other, *of)
            self.note(f"{sublayer.at}:mul", SiteKind.PRODUCT, gated.undropped)
            neurons: Neurons = gated
            mean_square = (gate_square * other_square + 2 * gated.products.square()) / 2
        else:
            plain, plain_square = self.linear(sublayer.linear, SiteKind.NEURON, source, square)
            self.activation(sublayer, plain)
            neurons = PlainNeurons(plain, sublayer.activation, *of)
            mean_square = plain_square / 2
        if self.kept("neurons") != 1.0:
            path = sublayer.dropouts[0] if sublayer.dropouts else sublayer.at
            self.note(f"{path}:mul", SiteKind.PRODUCT, neurons.bound)
            self.dropout(path, self.kept("neurons"))
        weight, bias = self.weight(sublayer.output)
        made = feed_forward_output(neurons, weight, bias, self.refine, self.arithmetic)
        self.inner[f"{sublayer.output}:input"] = largest(neurons.bound)
        return made, self.project(sublayer.output, weight, made, neurons.bound, mean_square)

    def activation(self, sublayer: FeedForward, before: LinearBound) -> None:
        """Record the sites inside the activation; each is at most |x|, or bounded by tanh."""
        after = self.rounded(before.bound)
        if sublayer.activation == "gelu_new":
            self.note(f"{sublayer.act}:mul", SiteKind.ACTIVATION, self.rounded(before.bound / 2))
            self.unlimited |= gelu_new_steps(sublayer.act, largest(before.bound), self.arithmetic)
            self.note(f"{sublayer.act}:tanh", SiteKind.ACTIVATION, 1.0)
            self.note(f"{sublayer.act}:add#2", SiteKind.ACTIVATION, 2.0)
            self.note(f"{sublayer.act}:mul#4", SiteKind.ACTIVATION, self.rounded(after))
        else:
            name = OPERATIONS.get(sublayer.activation, sublayer.activation)
            self.note(f"{sublayer.act}:{name}", SiteKind.ACTIVATION, after)

    # -- the head ---------------------------------------------------------------------------------------------------

    def head(self, head: Head, final: NormOutput, square: Tensor) -> None:
        """Bound the logits, made by one linear or by several."""
        layout = self.layout
        scale, keep = layout.head_scale, self.kept("head") if head.dropout else 1.0
        if scale != 1.0:
            final, square = final.scaled(scale, self.arithmetic), square * scale**2
            self.note("model:mul", SiteKind.NORM, final.bound)
        if keep != 1.0:
            final = final.scaled(1 / keep, self.arithmetic)
            self.note(f"{head.dropout}:mul", SiteKind.NORM, final.bound)
            self.dropout(head.dropout, keep)
        first, *others = head.linears
        bound, expected = self.head_linear(first, final, square)
        entering = largest(final.bound)
        for linear, following in zip(head.linears, others, strict=False):
            # |tanh x| is at most 1 and at most |x|.
            bound, expected = self.rounded(bound.clamp(max=1)), expected.clamp(max=1)
            self.note(linear.tanh, SiteKind.ACTIVATION, bound)
            if keep != 1.0:
                bound = self.rounded(bound / keep)
                self.note(f"{head.dropout}:mul#2", SiteKind.ACTIVATION, bound)
            bound, expected = self.linear_behind(following, bound, expected)
        # The model itself selects positions of the head's input, and splits its output.
        self.inner["model:head"] = max(entering, largest(bound))
        if layout.stock.is_language_model and layout.family.logits_bias:
            offset = self.tensor(layout.family.logits_bias)
            offset = torch.zeros_like(bound) if offset is None else offset.double().abs().view(-1)
            bound = self.rounded(bound + offset)
            self.note("model:add", SiteKind.LOGITS, bound)
        cap = layout.cap(head)
        if cap is not None:
            capped = soft_capped(bound, cap, self.arithmetic)
            self.note("model:div", SiteKind.LOGITS, capped.quotient)
            self.note("model:tanh", SiteKind.LOGITS, capped.tanh)
            self.note("model:mul", SiteKind.LOGITS, capped.result)

    def head_linear(self, linear: HeadLinear, final: NormOutput, square: Tensor) -> tuple[Tensor, Tensor]:
        """Return a head linear's bounds and expected mean squares, computed some rows at a time."""
        table, bias = self.checked(linear.weight, self.read(linear.weight)), self.tensor(linear.bias)
        bounds, partials, expected, start = [], [], [], 0
        for rows in chunks(table):
            made = bound_linear(final, rows, None if bias is None else bias[start : start + len(rows)], self.arithmetic)
            start += len(rows)
            bounds.append(made.bound)
            partials.append(made.partial)
            expected.append((made.norms / made.radius).square() + made.centre.square())
        bound, partial, squares = torch.cat(bounds), torch.cat(partials), torch.cat(expected)
        self.record(
            linear.at,
            SiteKind.LOGITS if not linear.tanh else SiteKind.NEURON,
            (bound, partial),
            squares,
            (final.bound, square),
        )
        self.note_weight(linear.at, self.inner[f"{linear.weight.rpartition('.')[0]}:weight"])
        self.inner[f"{linear.at}:input"] = largest(final.bound)
        return bound, squares

    def linear_behind(self, linear: HeadLinear, caps: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
        """Bound a head's linear behind a tanh; caps, square: bounds and mean squares of its input."""
        weight, bias = self.weight(linear.at)
        bound = bound_box(caps, weight, bias, self.arithmetic)
        expected = squared_matrix_vector(weight, square)
        self.record(linear.at, SiteKind.LOGITS, (bound, bound), expected, (caps, square))
        self.inner[f"{linear.at}:input"] = largest(caps)
        return bound, expected


def excess_bits(values: Tensor, still: Tensor | float = 0.0) -> Tensor:
    """Return how many bits ``values`` must fall for values + ``still`` to fit fp16; inf if ``still`` alone does not."""
    room = (PROOF_LIMIT - torch.as_tensor(still, dtype=torch.float64)).clamp(min=0)
    return (values / room).nan_to_num(nan=1.0, posinf=math.inf).clamp(min=1).log2()


def gelu_new_steps(path: str, x: float, arithmetic: Arithmetic) -> dict[str, float]:
    """Return bounds of gelu_new's operations before its tanh, for an input up to ``x``, by the audit's names. From |x|
    = 40.3 on they are inf in fp16, which tanh maps to ±1, so none has a limit of its own."""

    def computed(value: float) -> float:
        rounded = value * (1 + arithmetic.unit) * COMPUTED + arithmetic.tiny
        return rounded if rounded < FP16_OVERFLOW else math.inf

    cube = computed(x * x * x)
    multiple = computed(0.044715 * cube)
    total = computed(x + multiple)
    product = computed(math.sqrt(2 / math.pi) * total)
    return {f"{path}:pow": cube, f"{path}:mul#2": multiple, f"{path}:add": total, f"{path}:mul#3": product}


def output_dropout(sublayer: Sublayer) -> str:
    """Return the path of the dropout module on a sublayer's output, "" where the class calls a function."""
    if isinstance(sublayer, Attention):
        return sublayer.dropout
    return sublayer.dropouts[-1] if sublayer.dropouts else ""


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
    """Return the certificate of a layout's model with the given weights, read sublayer by sublayer.

    weights: gives a tensor by name with the values to bound for. target: ``norm-safe`` adds the squares of the stream,
    for norms in fp16; ``fp16-accumulate`` makes every sum in fp16 as well; ``train`` holds gate pre-activations under
    147.8, where the derivative of gelu_new's cube overflows. refine: rows of each feed-forward output that may get an
    eigenvalue of their own. spectra: known eigenvalues of weights that are nearly the same. advance: called with
    sublayers done and their number. until_one_fails: end at the first site that does not hold. Raises UserError for an
    activation without a bound.
    """
    arithmetic = arithmetic or Arithmetic()
    check_bounded(layout)
    limits: Mapping[str, float] = {}
    if target not in TARGETS:
        raise UserError(f"target {target!r} is unknown; choose one of {', '.join(TARGETS)}")
    squares = target in SQUARING
    arithmetic = replace(arithmetic, norms16=squares, sums16=target == "fp16-accumulate")
    if target == "train":
        arithmetic = replace(arithmetic, train=True)
        if any(sublayer.activation == "gelu_new" for sublayer in layout.feed_forwards):
            limits = {kind: traits(kind).limit_in_training for kind in SiteKind}
    with torch.no_grad():
        made = _Walk(layout, weights, arithmetic, limits, refine, squares, spectra or Spectra(weights))
        made.until_one_fails = until_one_fails
        return made.run(advance)


def is_certified(layout: Layout, weights: TensorReader, arithmetic: Arithmetic, target: str, spectra: Spectra) -> bool:
    """Return whether the certificate for ``target`` holds; ends at the first site that does not."""
    return bound(layout, weights, arithmetic, target=target, spectra=spectra, until_one_fails=True).holds


def fp16_weights(checkpoint: TensorSource, layout: Layout) -> TensorReader:
    """Return a reader of a checkpoint's weights in fp16, as stock code computes with them: fp32 with an offset."""

    def read(name: str) -> Tensor:
        tensor = layout.tensors[name]
        return effective(tensor, stored(checkpoint, tensor).half())

    return read
