"""The cost of exponents: limits that they break, and precision that weights, signals and norms lose.

Limits must hold. The cost to minimise is a relative squared error: of weights, of signals, and from an eps that cannot
be scaled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from ..bounds.arithmetic import growth
from ..families.layout import ResolvedSignal, ResolvedTensor
from ..families.signals import RESIDUAL, Kind, Sign, carried_by
from ..numerics import FP16_MAX, PROOF_LIMIT, PROOF_MARGIN_BITS
from ..ranges import ModuleRange
from ..targets import SQUARING
from .channels import ROUNDING, as_shares, excess_bits, known_points
from .plan import Fallback
from .rounding_loss import LossTable, signal_noise
from .weight_losses import CHANNEL_RANGE, EXPONENTS, WeightLosses

EXCESS = 1e6  # cost of one bit over a hard limit: more than any precision, so that limits come first

UNWRITABLE = 1e12
"""Cost of each bit by which a weight passes 65504: more than a signal's, since such a plan cannot be written."""

RESTRAINT = ROUNDING * 2.0**-10
"""Cost of each step of an exponent away from 0, so that nothing moves without a reason."""

RESTRAINT_OF_CHANNELS = ROUNDING
"""The same for a channel's exponent, chosen after the stream's. It leaves 0 if that makes 0.2% of the channel's weights
exact. Quantisers share scales among channels (docs/runtimes.md)."""

RESTRAINT_OF_STATES = 2.0**-10
"""The same for last states, which users read: they move only for a limit or a head's visible loss."""

PROOF_WORTH = ROUNDING / 4
"""Predicted error that a proof of one site may cost; with four sites for each norm, as much as one rounding there."""

LOSSY_SHARE_OF_A_ROUNDING = 1e-3
"""A tenth of a percent of inexact weights costs as much as one rounding in every sublayer."""

NEARNESS = ROUNDING / 4
"""Predicted error for each norm by which a stream exponent nearer 0 may exceed the best one's. Half of it may be spent
on each signal to keep channels at 0. fp16 rounds at least four times between two norms, so this adds some percent."""

OF_STREAM = (Kind.VALUE, Kind.NEURON)  # signals whose channels are solved for each exponent of the stream

SOLVED = (*OF_STREAM, Kind.QUERY_KEY)  # signals that have an exponent for each channel wherever that costs less


@dataclass(frozen=True)
class Solution:
    """The exponents chosen for one signal's channels, and their costs. With a proof, no input leaves fp16's range."""

    cost: float  # the least cost with a proof or, if less, ``free`` plus ``proof_worth`` for each site of the signal
    free: float  # the least cost if no proof is needed
    unmoved: float  # the cost if all exponents are 0
    index: torch.Tensor  # each channel's exponent plus 24
    fallback: Fallback | None = None  # set if the exponents give no proof: it costs too much or is impossible


@dataclass(frozen=True)
class Total:
    """The total cost of an exponent of the residual stream. ``holds``: whether the stream then fits for every input.
    ``unproven``: how many sites have no proof."""

    cost: float
    holds: bool
    unproven: int


@dataclass(eq=False)
class Costs(WeightLosses):
    proof_worth: float = field(default=PROOF_WORTH, kw_only=True)
    proof_is_enough: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.spare = NEARNESS / 2
        elements = sum(math.prod(t.shape) for t in self.layout.tensors.values())
        self.lossy_price = ROUNDING / LOSSY_SHARE_OF_A_ROUNDING * max(1, len(self.layout.norms)) / elements
        self.magnitudes: dict[str, list[tuple[float, Sign, bool]]] = {}
        self.solved: dict[str, dict[int, Solution]] = {}
        self.tried: list[int] = []
        self.last_norms = {stack.ends.norm for stack in self.layout.stacks()}

    def forget(self, tensor: ResolvedTensor, axis: int) -> None:
        for carried in carried_by(tensor.axes[axis]) if axis < len(tensor.axes) else ():
            self.tables.pop((tensor.name, axis, carried), None)
            self.energies.pop((tensor.name, axis, carried), None)
            self.solved.pop(carried.signal, None)

    def offset(self, tensor: ResolvedTensor, axis: int, r: int) -> int:
        others = (c for place, of in enumerate(tensor.axes) if place != axis for c in carried_by(of))
        return sum(c.sign * self.scalar(c.signal, r) for c in others)

    def scalar(self, signal: str, r: int) -> int:
        """Return ``r`` for a stream, ``before_norm`` for a signal that only a norm reads, and 0 for all others."""
        kind = self.layout.signals[signal].kind
        if kind is Kind.BEFORE_NORM:
            return self.before_norm(signal, r)
        return r if kind is Kind.RESIDUAL else 0

    def stream_of(self, signal: ResolvedSignal) -> str:
        carried = {c.signal for tensor, *_ in self.touched[signal.name] for c in tensor.carries}
        return next((stream for stream in self.layout.streams if stream in carried), self.layout.streams[0])

    def of_stream(self) -> list[ResolvedSignal]:
        movable = [s for s in self.layout.signals.values() if s.kind in SOLVED]
        return [s for s in movable if self.stream_of(s) == self.stream and (s.kind in OF_STREAM or self.carries(s))]

    def carries(self, signal: ResolvedSignal) -> bool:
        return any(c.signal == self.stream for t, *_ in self.touched[signal.name] for c in t.carries)

    def importance(self, signal: ResolvedSignal) -> torch.Tensor:
        """Return each channel's share in the outputs of the linears that read a signal, float64 [channels], with the
        sum 1. It is the channel's mean square times the squared norm of its weights in these linears. For queries and
        keys it is the product of their mean squares."""
        ones = torch.ones(signal.size, dtype=torch.float64)
        squares = [observed.mean_square.double() for _, observed in known_points(self.ranges, signal)]
        if not squares:
            return ones / signal.size
        readers = [(t, a, c) for t, a, c in self.touched[signal.name] if a == 1 and c.sign < 0]
        if signal.kind is Kind.QUERY_KEY:
            return as_shares(torch.stack(squares).prod(0))
        if not readers:
            return as_shares(squares[-1])
        return as_shares(sum((as_shares(squares[-1] * self.energy(*of)) for of in readers), 0 * ones))

    def channel_costs(self, signal: ResolvedSignal, tried: list[int]) -> Iterator[torch.Tensor]:
        """Yield the costs of channel exponents −24…24, float64 [channels, 49], at each stream exponent in ``tried``."""
        restraint = RESTRAINT_OF_STATES if signal.name in self.last_norms else RESTRAINT
        own = restraint / signal.size * EXPONENTS.abs().double().expand(signal.size, -1)
        tables = [(self.table(*of), *of) for of in self.touched[signal.name]]
        share = self.importance(signal)[:, None]
        weights = []
        for table, tensor, axis, carried in tables:
            offsets = [self.offset(tensor, axis, r) for r in tried]
            least = min(offsets) - CHANNEL_RANGE
            every = torch.arange(least, max(offsets) + CHANNEL_RANGE + 1)
            cost = self.weight_cost(table, every, share)
            cost = cost + UNWRITABLE * excess_bits(table.amax[:, None] * 2.0 ** every.double(), FP16_MAX)
            # In the order of the signal's exponents; a weight that moves the other way begins with the largest.
            if carried.sign < 0:
                weights.append((cost.flip(1), [int(every[-1]) - CHANNEL_RANGE - offset for offset in offsets]))
            else:
                weights.append((cost, [offset - CHANNEL_RANGE - least for offset in offsets]))
        for point, observed in known_points(self.ranges, signal):
            at = point.sign * EXPONENTS
            own = own + share * signal_noise(observed.mean_square, at)
            own = own + EXCESS * excess_bits(observed.amax.double()[:, None] * 2.0**at, self.limit)
        for number in range(len(tried)):
            yield sum((cost[:, at[number] : at[number] + len(EXPONENTS)] for cost, at in weights), own)

    def proof_costs(self, signal: ResolvedSignal) -> torch.Tensor:
        """Return the cost of bounds that exceed their limits at channel exponents −24…24: float64 [channels, 49]."""
        cost = torch.zeros(signal.size, len(EXPONENTS), dtype=torch.float64)
        for point, possible in known_points(self.bounds, signal):
            amax = possible.amax.double()[:, None] * 2.0 ** (point.sign * EXPONENTS)
            cost = cost + EXCESS * excess_bits(amax, PROOF_LIMIT)
        return cost

    def best(self, signal: ResolvedSignal, r: int) -> Solution:
        known = self.solved.setdefault(signal.name, {})
        if r not in known:
            tried = sorted({*self.tried, r} - known.keys())
            proof = self.proof_costs(signal)
            for at, costs in zip(tried, self.channel_costs(signal, tried), strict=True):
                known[at] = self.solution(signal, costs, proof)
            self.release(signal)
        return known[r]

    def solution(self, signal: ResolvedSignal, costs: torch.Tensor, proof: torch.Tensor) -> Solution:
        free, unmoved = float(costs.amin(1).sum()), float(costs[:, CHANNEL_RANGE].sum())
        held = costs + proof
        proven = float(held.amin(1).sum())
        price = self.proof_worth * len(signal.seen)
        if proven <= free + price:
            return Solution(proven, free, float(held[:, CHANNEL_RANGE].sum()), self.restrained(held))
        given_up = Fallback(signal.name, impossible=proven - free > EXCESS * 2.0**-10)
        return Solution(free + price, free, unmoved, self.restrained(costs), given_up)

    def restrained(self, costs: torch.Tensor) -> torch.Tensor:
        """Return each channel's cheapest exponent by ``costs``, [channels, 49], as its index in ``EXPONENTS``. If
        ``moves_least``, as many channels as possible get exponent 0 instead, at a cost of at most ``spare`` in all."""
        index = (costs + RESTRAINT_OF_CHANNELS / len(costs) * EXPONENTS.abs().double()).argmin(1)
        if self.moves_least:
            lost = costs[:, CHANNEL_RANGE] - costs.amin(1)
            cheapest = lost.argsort()
            index[cheapest[lost[cheapest].cumsum(0) <= self.spare]] = CHANNEL_RANGE
        return index.to(torch.int8)

    def weight_cost(self, table: LossTable, exponents: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        lossy, error = table.at(exponents)
        energy = table.energy[:, None].clamp(min=1e-300)
        cost = share * (error.double() / energy).clamp(max=1.0)
        cost = cost + self.lossy_price * lossy.double()
        amax = table.amax[:, None] * 2.0 ** exponents.double()
        return cost + EXCESS * excess_bits(amax, self.limit)

    def residual_cost(self, r: int) -> float:
        """Return the costs that depend on the stream's exponent r alone: of the stream itself, of weights that no other
        exponent scales, and of drift."""
        signal = self.layout.signals[self.stream]
        cost = RESTRAINT * abs(r) + EXCESS * self.observed_excess(r)
        for point, observed in known_points(self.ranges, signal):
            if point.side == "input":
                norm = self.layout.signals.get(point.module)
                share = self.importance(norm) if norm is not None else as_shares(observed.mean_square.double())
                at = torch.tensor([self.at_point(point, r)])
                cost += float((share[:, None] * signal_noise(observed.mean_square, at)).sum())
        for tensor, axis, carried in self.touched[self.stream]:
            if all(c.signal == self.stream for c in self.planned(tensor.carries)):
                table = self.table(tensor, axis, carried).total
                at = torch.tensor([sum(c.sign * self.scalar(c.signal, r) for c in tensor.carries)])
                cost += float(self.weight_cost(table, at, torch.ones(1, 1)).sum())
        return cost + UNWRITABLE * self.unwritable_bits(r) + self.drift(r)

    def unwritable_bits(self, r: int, *, own: bool = False) -> float:
        """Return the sum of the bits by which weights exceed 65504 at the stream exponent ``r``. own: whether to
        include weights that read the stream and are also scaled by channel exponents."""
        if self.stream not in self.magnitudes:
            self.magnitudes[self.stream] = [
                (max(abs(float(end)) for end in torch.aminmax(self.weights(tensor.name))), carried.sign, has_own)
                for tensor, _, carried in self.touched[self.stream]
                if not (has_own := any(self.layout.signals[c.signal].kind in SOLVED for c in tensor.carries))
                or carried.sign < 0
            ]
        return sum(
            max(0.0, math.log2(amax * 2.0 ** (sign * r) / FP16_MAX))
            for amax, sign, has_own in self.magnitudes[self.stream]
            if 0 < amax < math.inf and (own or not has_own)
        )

    def residual_excess(self, r: int) -> float:
        return self.stream_excess(self.bounds, PROOF_LIMIT, PROOF_MARGIN_BITS, r)

    def observed_excess(self, r: int) -> float:
        if self.proof_is_enough and self.bounds and self.residual_excess(r) == 0:
            return 0.0
        return self.stream_excess(self.ranges, self.limit, self.margin_bits, r)

    def stream_excess(self, ranges: Mapping[str, ModuleRange], limit: float, margin_bits: float, r: int) -> float:
        """Return by how many bits the stream h, times 2^r, exceeds its limits, summed over sites. limit: the limit of
        |h|. margin_bits: how far ‖h‖₂ must stay below its own limit."""
        total = 0.0
        for point, reached in known_points(ranges, self.layout.signals[self.stream]):
            factor = 2.0 ** self.at_point(point, r)
            total += float(excess_bits(reached.amax.double().amax() * factor, limit))
            if point.side == "input":
                length = self.stream_norm(ranges, point.module) * factor
                total += float(excess_bits(length, self.norm_limit(margin_bits)))
        return total

    def total_cost(self, r: int) -> Total:
        solved = {s.name: self.best(s, r) for s in self.of_stream()}
        cost = self.residual_cost(r) + sum(s.cost for s in solved.values())
        unproven = sum(len(self.layout.signals[name].seen) for name, s in solved.items() if s.fallback is not None)
        if self.residual_excess(r) == 0:
            return Total(cost, True, unproven)
        sites = len(self.layout.signals[self.stream].seen)
        return Total(cost + self.proof_worth * sites, False, unproven + sites)

    def norm_limit(self, margin_bits: float) -> torch.Tensor:
        squared = FP16_MAX / growth(self.layout.signals[RESIDUAL].size)
        return torch.tensor(math.sqrt(squared) * 2.0**-margin_bits if self.target in SQUARING else math.inf)

    def stream_norm(self, ranges: Mapping[str, ModuleRange], module: str) -> torch.Tensor:
        norm = ranges[module].norm
        return torch.tensor(norm.norm_max if norm is not None else 0.0, dtype=torch.float64)
