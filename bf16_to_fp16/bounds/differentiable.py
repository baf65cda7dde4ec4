"""Bounds of the sites that rescaling cannot lower, as differentiable functions of the weights of a model in training.
They are computed in fp32 on the weights' device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..families.layout import Layout, ResolvedStack, TensorReader, walk
from ..families.signals import Kind
from ..families.wiring import (
    MOST_MEAN,
    Attention,
    Experts,
    FeedForward,
    Head,
    HeadLinear,
    Projector,
    StackEnds,
    Sublayer,
    feed_forwards_of,
    outputs_of,
)
from .arithmetic import Arithmetic, full_precision
from .linear import (
    NormOutput,
    either,
    enclosing_axes,
    layer_normalised,
    rms_normalised,
    side_by_side,
    stream_itself,
    summed_axes,
)
from .live_sublayers import LiveWeights, attention_output, feed_forward_output, masked, rows_of, scores, wide
from .power_iteration import lengths

ROWS_AT_A_TIME = 1 << 14  # rows of a head that are measured at a time

Owner = tuple[str, Callable[[Tensor], Tensor]]
"""A tensor on which a site's bounds depend: its name in the layout, and a view with one row for each bound."""


class DifferentiableBounds:
    """Computes bounds of the sites that only training can lower, under the names that the audit gives them. weights: a
    function that returns a tensor's present value. stream: whether to bound the residual stream too."""

    def __init__(self, layout: Layout, weights: TensorReader, *, stream: bool = False) -> None:
        self.layout, self.read, self.arithmetic, self.stream = layout, weights, Arithmetic(), stream
        fixed = [signal for signal in layout.signals.values() if signal.kind is Kind.FIXED or signal.kind.has_price]
        self.fixed = {point.module for signal in fixed for point in signal.seen if point.side == "output"}
        self.means: dict[str, float] = {}

    @full_precision()
    def measure(self, *, again: bool = False, only: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return the bounds of each site in fp32 without a graph, one for each row, head or channel. only: the sites to
        bound. again: whether to reuse the last bounds of LayerNorms' input means, for weights that hardly changed."""
        wanted = None if only is None else dict.fromkeys(only, slice(None))
        with torch.no_grad():
            live = self.layout, self.read, self.arithmetic, self.means, not again
            return _Walk(*live, self.fixed, self.stream, wanted).run()

    def owners(self) -> dict[str, list[Owner]]:
        """Return for each site the tensors that training may change to lower its bound. The gains of norms before
        sublayers are left out."""
        layout, owners = self.layout, dict[str, list[Owner]]()

        def linear(path: str, view: Callable[[Tensor], Tensor]) -> list[Owner]:
            return [(name, view) for name in (f"{path}.weight", f"{path}.bias") if name in layout.tensors]

        def scores(sublayer: Attention) -> list[Owner]:
            if sublayer.query_norm and not sublayer.norms_whole:
                return linear(sublayer.query_norm, all_of) + linear(sublayer.key_norm, all_of)
            queries, keys = (
                partial(by_head, heads=layout.heads(sublayer), fused=sublayer.fused, number=i) for i in (0, 1)
            )
            # Keys that several heads of queries share have no row for each of them.
            shared = layout.kv_heads(sublayer) != layout.heads(sublayer)
            query, key = sublayer.query_norm or sublayer.query, sublayer.key_norm or sublayer.key
            return linear(query, queries) + ([] if shared else linear(key, keys))

        for stack in layout.stacks():
            starts = (layout.table(stack.ends), stack.ends.positions)
            stream: list[Owner] = [(name, Tensor.t) for name in starts if name in layout.tensors]
            if stack.ends.first_norm:
                stream = linear(stack.ends.first_norm, rows)
            for sublayer in stack.sublayers:
                if isinstance(sublayer, Attention):
                    own = scores(sublayer)
                    biased = own + [(name, Tensor.t) for name in (sublayer.bias, sublayer.block_bias) if name]
                    owners |= {f"{sublayer.at}:scores": own, sublayer.joining: biased, f"{sublayer.at}:masked": biased}
                owners |= {path: linear(path, rows) for path in first_linears(sublayer) if path in self.fixed}
                owners |= {path: linear(path, rows) for path in outputs_of(sublayer)}
                outputs = [owner for path in outputs_of(sublayer) for owner in owners[path]]
                stream = stream + (linear(sublayer.post_norm, rows) if sublayer.post_norm else outputs)
                owners[sublayer.add] = stream
            if stack.ends.norm in self.fixed:
                owners[f"{stack.ends.norm}:{layout.family.norm_site}"] = linear(stack.ends.norm, rows)
        if layout.head is not None:
            for of in layout.head.linears:
                owners[of.at] = [(name, rows) for name in (of.weight, of.bias) if name]
            if layout.stock.is_language_model and layout.family.logits_bias:
                owners["model:add"] = owners[layout.head.at]
        return owners

    @full_precision()
    def at(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the bounds of chosen elements with an autograd graph. wanted: the elements' indices by site."""
        # LayerNorms' input means are those that the last ``measure`` found.
        live = self.layout, self.read, self.arithmetic, self.means, False
        return _Walk(*live, self.fixed, self.stream, wanted).run()


@dataclass(eq=False)
class _Walk(LiveWeights):
    """Computes the bounds in one pass along the residual stream. fixed: the linears and norms whose outputs no exponent
    of a plan scales. wanted: the indices of the elements to bound, by site; None for all."""

    fixed: Collection[str]
    with_stream: bool
    wanted: Mapping[str, Tensor | slice] | None

    def __post_init__(self) -> None:
        self.centred = self.layout.family.centred_norm
        self.bounds: dict[str, Tensor] = {}
        self.stream: Tensor | None = None
        self.axes = torch.empty(0)  # squared axes of an ellipsoid that holds the stream, as the certificate's
        self.memory: NormOutput | None = None

    def run(self) -> dict[str, Tensor]:
        for reader in walk(self.layout):
            stack, sublayer = reader.stack, reader.sublayer
            if reader.is_first:
                sums = [x for s in stack.sublayers for x in (s.add, *outputs_of(s))]
                needed = (self.with_stream and self.wants(*sums)) or (self.centred and self.finds_means)
                needed = needed or self.layout.reads_stream_itself
                self.stream = self.embedding(stack.ends) if needed else None
                if self.layout.reads_stream_itself:
                    self.axes = self.first_axes(stack.ends)
            source = self.read_by(reader.norm)
            if isinstance(sublayer, Attention):
                self.scores(sublayer, source)
            elif sublayer is not None:
                for path in first_linears(sublayer):
                    if path in self.fixed and self.wants(path):
                        self.linear_site(path, source)
            else:
                self.end(stack, source)
            if sublayer is not None and self.stream is not None:
                self.add(sublayer, *self.outputs(sublayer, source))
        return self.bounds

    def end(self, stack: ResolvedStack, source: NormOutput) -> None:
        """Record a stack's final norm if ``fixed`` contains it. After the last stack, also record the model's head.
        source: the final norm's output."""
        norm = stack.ends.norm
        if stack.is_encoder:
            self.memory = source
        if norm in self.fixed:
            self.note(f"{norm}:{self.layout.family.norm_site}", source.bound)
        if stack.is_last and self.layout.head is not None:
            self.head(self.layout.head, source)

    def wants(self, *sites: str) -> bool:
        return self.wanted is None or any(site in self.wanted for site in sites)

    def note(self, site: str, bounds: Tensor) -> None:
        if self.wanted is None:
            self.bounds[site] = bounds
        elif site in self.wanted:
            self.bounds[site] = bounds[self.wanted[site]]

    def embedding(self, ends: StackEnds) -> Tensor:
        table = self.weight(self.layout.table(ends))
        assert table is not None
        amax = table.abs().amax(0) * self.layout.embedding_scale(ends)
        positions = self.weight(ends.positions) if ends.positions else None
        amax = amax if positions is None else amax + positions.abs().amax(0)
        for w in (w for w in self.layout.projectors if not w.behind):
            amax = torch.maximum(amax, self.projected(w))
        return self.normalised(ends.first_norm, amax).exact if ends.first_norm else amax

    def projected(self, w: Projector) -> Tensor:
        """Return the bounds of each output channel of a projector, which brings another model's outputs into the
        stream. The formulas are the certificate's."""
        gain, shift = self.weight(f"{w.norm}.weight"), self.weight(f"{w.norm}.bias")
        gain = torch.ones(self.layout.input_width(w), device=self.axes.device) if gain is None else gain
        if w.layer_norm_eps is None:
            source = rms_normalised(gain, self.a, once=self.layout.family.norm_rounds_once)
        else:
            source = layer_normalised(gain, shift, MOST_MEAN, w.layer_norm_eps, self.a)
        source = side_by_side(source, w.joined, by_channel=w.by_channel)
        if w.merging:
            merged = self.linear(w.merging, source).partial
            if w.feed_forward is None:
                return merged
            source = stream_itself(enclosing_axes(merged, merged.norm()), merged)
        if w.feed_forward is not None:
            return feed_forward_output(self, w.feed_forward, source)
        weight = self.weight(w.weight)
        assert weight is not None
        return rows_of(weight.mT, None, source).partial

    def first_axes(self, ends: StackEnds) -> Tensor:
        """Return the squared axes of an ellipsoid that contains the stream at its start."""
        table = self.weight(self.layout.table(ends))
        assert table is not None and self.stream is not None
        return enclosing_axes(self.stream, lengths(table).amax() * self.layout.embedding_scale(ends))

    def outputs(self, sublayer: Sublayer, source: NormOutput) -> tuple[Mapping[str, Tensor], Tensor]:
        """Return the bounds of a sublayer's output projections, by module path, and of its output. Return {} and 0 if a
        post-norm follows that can be bounded without them."""
        if sublayer.post_norm and not self.with_stream and not self.centred:
            return {}, torch.zeros(())
        if isinstance(sublayer, Attention):
            total, partial_sums = attention_output(self, sublayer, self.read_by_keys(sublayer, source))
            return {sublayer.output: torch.maximum(total, partial_sums)}, total
        outputs = {each.output: feed_forward_output(self, each, source) for each in feed_forwards_of(sublayer)}
        if not isinstance(sublayer, Experts):
            return outputs, outputs[sublayer.output]
        # A token's experts have weights whose sum is bounded; each product and sum is rounded.
        number, _, together = self.layout.experts_together(sublayer)
        total = torch.stack([outputs[each.output] for each in sublayer.experts]).amax(0) * together
        total = total * (1 + self.a.unit) ** (number + 2) if sublayer.chosen else total
        return outputs, total if sublayer.shared is None else (total + outputs[sublayer.shared.output]) * (
            1 + self.a.unit
        )

    def add(self, sublayer: Sublayer, outputs: Mapping[str, Tensor], output: Tensor) -> None:
        assert self.stream is not None
        for path, bounds in outputs.items() if self.with_stream else ():
            self.note(path, bounds)
        source = self.norm(sublayer.post_norm) if sublayer.post_norm else None
        factor = self.layout.multiplier("branch")
        output = (output if source is None else source.bound) * factor
        if self.layout.reads_stream_itself:
            own = enclosing_axes(output, output.norm()) if source is None else source.axes * factor**2
            self.axes = summed_axes(self.axes, own) * (1 + self.a.unit) ** 2
        self.stream = (self.stream + output) * (1 + self.a.unit)
        for w in (w for w in self.layout.projectors if w.behind == sublayer.add):
            self.stream = (self.stream + self.projected(w)) * (1 + self.a.unit)
        if self.with_stream:
            self.note(sublayer.add, self.stream)
        if isinstance(sublayer, FeedForward) and (scalar := self.weight(sublayer.scalar)) is not None:
            self.stream = self.stream * scalar.abs() * (1 + self.a.unit)
            self.axes = self.axes * (scalar * (1 + self.a.unit)) ** 2

    def read_by(self, norm: str) -> NormOutput:
        if norm:
            return self.norm(norm)
        assert self.stream is not None
        return stream_itself(self.axes, self.stream)

    def norm(self, path: str) -> NormOutput:
        return self.normalised(path, self.stream)

    def linear_site(self, path: str, source: NormOutput) -> None:
        """Record the bounds of a linear whose output no exponent of a plan scales."""
        at = None if self.wanted is None else self.wanted[path]
        self.bounds[path] = self.linear(path, source, at).partial * (1 + self.linear_error(source.gain.numel()))

    def head(self, head: Head, final: NormOutput) -> None:
        """Record the sites of a head's linears. In a language model with a separate bias of the logits, also record the
        sum with it. final: the final norm's output."""
        layout, (first, *others) = self.layout, head.linears
        offset = None
        if layout.stock.is_language_model and layout.family.logits_bias:
            offset = self.weight(layout.family.logits_bias)
        added = None if offset is None else offset.abs().view(-1)
        error = 1 + self.linear_error(final.gain.numel()) + (self.a.unit if layout.head_scale != 1.0 else 0.0)
        final = final.scaled(layout.head_scale, self.a)
        self.head_rows(first, first.at, final, error, None)
        if added is not None:
            self.head_rows(first, "model:add", final, error, added)
        for linear in others:
            # A tanh is at most 1.
            if not self.wants(linear.at):
                continue
            weight, bias = self.weight(linear.weight), self.weight(linear.bias)
            assert weight is not None
            total = weight.abs().sum(1) if bias is None else weight.abs().sum(1) + bias.abs()
            self.note(linear.at, total * (1 + self.linear_error(weight.shape[1])))

    def head_rows(self, linear: HeadLinear, site: str, final: NormOutput, error: float, added: Tensor | None) -> None:
        """Record the bounds of a head's linear. site: the name under which they are recorded. final: the linear's
        input. error: a factor on the bounds, which allows for rounding. added: magnitudes of a separate bias, which
        stock code adds to the linear's output; None if there is none."""
        if not self.wants(site):
            return
        weight, bias = self.read(linear.weight), self.weight(linear.bias)

        def bounds(at: Any) -> Tensor:
            logits = rows_of(wide(weight[at]), None if bias is None else bias[at], final).partial * error
            return logits if added is None else logits + added[at]

        if self.wanted is not None and isinstance(at := self.wanted[site], Tensor):
            self.bounds[site] = bounds(at)
            return
        starts = range(0, len(weight), ROWS_AT_A_TIME)
        self.bounds[site] = torch.cat([bounds(slice(start, start + ROWS_AT_A_TIME)) for start in starts])

    def scores(self, sublayer: Attention, source: NormOutput) -> None:
        """Record three sites of an attention, with a bound for each head. The sites are query·key products, scores with
        position bias, and masked scores."""
        # The third bound is how far a mask must lower scores so that masked positions get no weight. Where the mask is
        # −inf there is no third site.
        sites = [f"{sublayer.at}:scores", sublayer.joining, *(() if sublayer.radius else (f"{sublayer.at}:masked",))]
        if self.wants(*sites):
            product, scaled, span = scores(self, sublayer, source, self.read_by_keys(sublayer, source))
            for site, bound in zip(sites, (product, *masked(self, sublayer, scaled, span)), strict=False):
                self.note(site, bound)

    def read_by_keys(self, sublayer: Attention, source: NormOutput) -> NormOutput:
        """Return the input of keys and values: the encoder's output in cross-attention, else ``source``, the sublayer's
        own input. In LongT5's global attention it also covers the normalised sums of token blocks."""
        if sublayer.memory:
            assert self.memory is not None
            return self.memory
        return either(source, self.normalised(sublayer.block_norm)) if sublayer.block else source


def first_linears(sublayer: Sublayer) -> list[str]:
    # A gate and neurons in one matrix are one linear.
    paths = list(
        dict.fromkeys(path for each in feed_forwards_of(sublayer) for path in (each.gate, each.linear) if path)
    )
    return [*paths, sublayer.classifier] if isinstance(sublayer, Experts) else paths


def rows(x: Tensor) -> Tensor:
    return x.view(len(x), -1)


def all_of(x: Tensor) -> Tensor:
    return x.view(1, -1)


def by_head(x: Tensor, heads: int, fused: Sequence[int], number: int) -> Tensor:
    """Return a linear's weight or bias as [heads, …]. If several linears share ``x``, ``fused`` has the number of rows
    of each, and ``number`` is the index of the linear to return. Else ``fused`` is empty."""
    return (x.split(fused)[number] if fused else x).view(heads, -1)
