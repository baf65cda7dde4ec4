"""Choosing the exponents: hard limits first, then the least predicted error.

A signal too large overflows; a weight or signal too small loses bits to fp16's fixed spacing below 2⁻¹⁴. So limits must
hold, and the cost to minimise is a relative squared error: of weights, of signals, of an eps that cannot be scaled.
(Maximising the smallest margin would be degenerate: one weight of 1e-9 would decide.) For a given exponent of the
stream, every channel is an integer problem of its own. So enumerate the stream's, look the channels up, and move gains
only where a loss is left.

Observed ranges must fit with a margin, always. A certificate's bounds must fit where that costs no more than
``PROOF_WORTH``, signal by signal. Where limits cannot all hold, the excess is minimised and reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from ..bounds.arithmetic import growth
from ..errors import UserError
from ..families.layout import Layout, ResolvedSignal, ResolvedTensor, TensorReader
from ..families.signals import RESIDUAL, Axis, Kind, ObservationPoint, Sign, before, carried_by
from ..families.spread import shared, spread_out
from ..numerics import FP16_MAX, GELU_CUBE_BACKWARD_LIMIT, PROOF_LIMIT, PROOF_MARGIN_BITS
from ..progress import Advance
from ..ranges import ChannelRange, ModuleRange
from ..targets import MARGIN_BITS, SQUARING
from .channels import RESIDUAL_RANGE, ROUNDING, as_shares, excess_bits, folded, known_points, same, whole_log2
from .plan import Drift, Plan
from .rounding_loss import (
    LossTable,
    Tables,
    channel_energy,
    loss_table,
    of_channels,
    offset_loss_table,
    signal_noise,
)

TRAIN_MARGIN_BITS = 2.0
"""Further bits that the target ``train`` keeps, because weights move and gradients flow back."""

CHANNEL_RANGE = 24  # channel exponents are searched from −24 to 24

EXCESS = 1e6  # cost of one bit over a hard limit: more than any precision, so that limits come first

UNWRITABLE = 1e12
"""Cost of each bit by which a weight passes 65504: above any signal's, since such a plan cannot be written."""

RESTRAINT = ROUNDING * 2.0**-10
"""Cost of each step of an exponent away from 0, so that nothing moves without a reason."""

RESTRAINT_OF_CHANNELS = ROUNDING
"""The same for channels under a decided stream: one moves if 0.2% of its weights become exact. Quantisers share scales
among channels (docs/runtimes.md)."""

RESTRAINT_OF_STATES = 2.0**-10
"""The same for last states, which users read: they move only for a limit or a head's visible loss."""

PROOF_WORTH = ROUNDING / 4
"""Predicted error that a proof of one site may cost; with four sites for each norm, as much as one rounding there."""

PROOF_FIRST = 1.0  # the same where a proof was asked for: as large an error as the output itself

LOSSY_SHARE_OF_A_ROUNDING = 1e-3
"""A tenth of a percent of inexact weights costs as much as one rounding in every sublayer."""

INDIFFERENCE = ROUNDING / 4
"""Where norms square in fp16, stream exponents whose costs differ by less count as equal; the nearest to 0 is taken."""

NEARNESS = ROUNDING / 4
"""Predicted error for each norm that the stream exponent nearest 0 may cost beyond the best; half of it is what each
signal's unmoved channels may cost. fp16 rounds four times and more between two norms: this adds some percent."""

OF_STREAM = (Kind.VALUE, Kind.NEURON)  # signals whose channels are solved for each exponent of the stream
SOLVED = (*OF_STREAM, Kind.QUERY_KEY)  # signals that have an exponent for each channel wherever that costs less


@dataclass(frozen=True)
class Violation:
    signal: str
    excess_bits: float


@dataclass(frozen=True)
class Fallback:
    """A signal that is not held for every input, with the predicted errors. ``impossible``: no exponent holds it.
    ``exponent``: the stream's that would."""

    signal: str
    cost_certified: float
    cost_observed: float
    impossible: bool
    exponent: int | None = None


@dataclass(frozen=True)
class Planned:
    """A plan, the limits that it cannot hold, and its predicted relative squared error. ``fallbacks``: the signals
    planned from their observed ranges alone. ``for_proof``: the streams that a proof moves further, with the exponent
    that observed ranges alone ask for. ``corrected``: the mean squared relative drift that gain corrections take
    out."""

    plan: Plan
    violations: tuple[Violation, ...]
    cost: float
    fallbacks: tuple[Fallback, ...] = ()
    for_proof: Mapping[str, int] = field(default_factory=dict)
    corrected: float = 0.0


def make_plan(
    layout: Layout,
    weights: TensorReader,
    ranges: Mapping[str, ModuleRange],
    *,
    target: str = "half",
    margin_bits: float = MARGIN_BITS,
    bounds: Mapping[str, ModuleRange] | None = None,
    held: Mapping[str, int] | None = None,
    proof_worth: float = PROOF_WORTH,
    drift_free: bool = False,
    known: Tables | None = None,
    advance: Advance | None = None,
) -> Planned:
    """Return the plan for ``layout`` that keeps every limit of ``target`` and then has the least predicted error.

    weights: before any exponent. ranges: of each module's input and output on the source, from observation or, where
    nothing is run, from bounds. target: ``half`` (every signal under 65504), ``norm-safe`` and ``fp16-accumulate``
    (also ‖h‖₂² of the residual stream, as fp16 sums it; they differ in their bounds) or ``train`` (2 more bits, and
    gate pre-activations under 147.8). margin_bits: kept between a range and its limit. bounds: ranges for any input; a
    signal is planned by them too where that costs no more than ``proof_worth`` for each site. held: decided exponents
    of residual streams. drift_free: move nothing beside a stream, where an eps would stay behind. known: tables of
    these weights from earlier plans; gets new ones. advance: called with the number of tensors' axes whose losses are
    computed, and of all. So many parameters, because a plan depends on the result of every earlier step.
    """
    search = _PlanSearch(layout, weights, ranges, target, margin_bits, bounds, proof_worth, drift_free, known)
    search.advance = advance
    return search.run(held or {})


@dataclass(frozen=True)
class Solution:
    """Costs with bounds, without, and at exponent 0; each channel's index among −24…24; a proof that is given up."""

    cost: float
    free: float
    unmoved: float
    index: torch.Tensor
    fallback: Fallback | None = None


@dataclass(frozen=True)
class Total:
    """A stream exponent's costs, whether it holds the stream for every input, and the number of proofs given up."""

    cost: float
    holds: bool
    unproven: int


class _Costs:
    """Costs of exponents, given the decided ones: limits that they break, and precision that they lose."""

    def __init__(
        self,
        layout: Layout,
        weights: TensorReader,
        ranges: Mapping[str, ModuleRange],
        target: str,
        margin_bits: float,
        bounds: Mapping[str, ModuleRange] | None = None,
        proof_worth: float = PROOF_WORTH,
        drift_free: bool = False,
        known: Tables | None = None,
    ) -> None:
        # As many parameters as ``make_plan`` has.
        self.known = Tables(most=0) if known is None else known
        self.layout, self.weights, self.ranges, self.bounds = layout, weights, ranges, bounds
        self.proof_worth, self.drift_free = proof_worth, drift_free
        self.target, self.margin_bits = target, margin_bits + (TRAIN_MARGIN_BITS if target == "train" else 0.0)
        self.limit = FP16_MAX * 2.0**-self.margin_bits
        cubes = any(w.activation == "gelu_new" for w in layout.feed_forwards)
        self.moves_least, self.spare = target not in SQUARING, NEARNESS / 2
        self.gate_limit = GELU_CUBE_BACKWARD_LIMIT if target == "train" and cubes else math.inf
        self.elements = sum(math.prod(t.shape) for t in layout.tensors.values())
        self.lossy_price = ROUNDING / LOSSY_SHARE_OF_A_ROUNDING * max(1, len(layout.norms)) / self.elements
        self.tables: dict[tuple[str, int, Axis], LossTable] = {}
        self.energies: dict[tuple[str, int, Axis], torch.Tensor] = {}
        self.gains: dict[str, torch.Tensor] = {}
        self.magnitudes: dict[str, list[tuple[float, Sign, bool]]] = {}
        self.solved: dict[str, dict[int, Solution]] = {}
        self.tried: list[int] = []
        self.stream = RESIDUAL
        self.decided: dict[str, int] = {}
        self.advance: Advance | None = None
        self.looked_at: set[tuple[str, int, Axis]] = set()
        self.chosen: dict[str, torch.Tensor] = {}
        self.fallbacks: dict[str, Fallback] = {}
        self.for_proof: dict[str, int] = {}
        self.branches = self.branches_of_streams()
        self.branched = {signal.name: (signal, norm) for signal, norm in self.branches.values()}
        self.last_norms = {stack.ends.norm for stack in layout.stacks()}
        self.touched: dict[str, list[tuple[ResolvedTensor, int, Axis]]] = {name: [] for name in layout.signals}
        for tensor in layout.tensors.values():
            for place, axis in enumerate(tensor.axes):
                for carried in self.planned(carried_by(axis)):
                    self.touched[carried.signal].append((tensor, place, carried))

    def planned(self, carried: Iterable[Axis]) -> list[Axis]:
        kinds = ((c, self.layout.signals[c.signal].kind) for c in carried)
        return [c for c, kind in kinds if not kind.has_price and kind is not Kind.BEFORE_NORM]

    def branches_of_streams(self) -> dict[tuple[str, str], tuple[ResolvedSignal, str]]:
        """Return by place the signals that a linear gives to a norm alone, where the norm's eps can be scaled."""
        signals = {norm: self.layout.signals.get(before(norm)) for norm in self.layout.streams_read}
        observed = (norm for norm in signals if norm in self.ranges and self.ranges[norm].norm is not None)
        eps_stays = self.layout.fixed_eps is not None or self.layout.held_eps is not None
        if eps_stays or self.drift_free or not self.moves_least:
            return {}
        found = ((norm, signal) for norm in observed if (signal := signals[norm]) is not None)
        return {(point.module, point.side): (signal, norm) for norm, signal in found for point in signal.beside}

    # -- what is known ----------------------------------------------------------------------------------------------

    def seen(self, signal: ResolvedSignal) -> Iterator[tuple[ObservationPoint, ChannelRange]]:
        return known_points(self.ranges, signal)

    def possible(self, signal: ResolvedSignal) -> Iterator[tuple[ObservationPoint, ChannelRange]]:
        return known_points(self.bounds or {}, signal)

    def table(self, tensor: ResolvedTensor, axis: int, carried: Axis) -> LossTable:
        key = (tensor.name, axis, carried)
        if key not in self.tables:
            shift = self.shift(tensor, axis)
            given = (axis, carried.spread, None if shift is None else shift.numpy().tobytes())

            def compute() -> LossTable:
                weight = self.weights(tensor.name)
                rounds = tensor.offset
                table = offset_loss_table(weight, rounds) if rounds else loss_table(weight, axis, shift)
                return of_channels(table, carried.spread)

            self.tables[key] = self.known.of(tensor.name, given, compute)
            self.energies[key] = self.tables[key].energy
            self.looked_at.add(key)
            if self.advance is not None:
                self.advance(len(self.looked_at), sum(map(len, self.touched.values())))
        return self.tables[key]

    def energy(self, tensor: ResolvedTensor, axis: int, carried: Axis) -> torch.Tensor:
        key = (tensor.name, axis, carried)
        if key not in self.energies:
            energy = channel_energy(self.weights(tensor.name), axis, self.shift(tensor, axis))
            self.energies[key] = shared(energy, carried.spread).sum(1)
        return self.energies[key]

    def shift(self, tensor: ResolvedTensor, axis: int) -> torch.Tensor | None:
        others = carried_by(tensor.axes[1 - axis]) if len(tensor.axes) == 2 else ()
        shifts = [spread_out(self.chosen[c.signal] * c.sign, c.spread) for c in others if c.signal in self.chosen]
        return torch.stack(shifts).sum(0, dtype=torch.int32) if shifts else None

    def release(self, signal: ResolvedSignal) -> None:
        for tensor, axis, carried in self.touched[signal.name]:
            self.tables.pop((tensor.name, axis, carried), None)

    def forget(self, tensor: ResolvedTensor, axis: int) -> None:
        for carried in carried_by(tensor.axes[axis]) if axis < len(tensor.axes) else ():
            self.tables.pop((tensor.name, axis, carried), None)
            self.energies.pop((tensor.name, axis, carried), None)
            self.solved.pop(carried.signal, None)

    def offset(self, tensor: ResolvedTensor, axis: int, r: int) -> int:
        others = (c for place, of in enumerate(tensor.axes) if place != axis for c in carried_by(of))
        return sum(c.sign * self.scalar(c.signal, r) for c in others)

    def scalar(self, signal: str, r: int) -> int:
        """Return the exponent of a signal with one number, the stream being at r; 0 for signals with channels."""
        kind = self.layout.signals[signal].kind
        if kind is Kind.BEFORE_NORM:
            return self.before_norm(signal, r)
        return r if kind is Kind.RESIDUAL else 0

    def before_norm(self, name: str, r: int) -> int:
        """Return the exponent, beside the stream's r, of a norm's input: at most 0, as limits need, and only while the
        norm's eps does not show in fp16."""
        if name not in self.branched:
            return 0
        signal, norm = self.branched[name]
        points = replace(signal, seen=signal.beside)
        limits = [(self.limit, self.ranges), (PROOF_LIMIT, self.bounds or {})]
        rooms = (
            whole_log2(limit / float(reached.amax.amax()))
            for limit, ranges in limits
            for _, reached in known_points(ranges, points)
            if float(reached.amax.amax()) > 0
        )
        exponent = min(0, min(rooms, default=0) - r)
        while exponent < 0 and self.branch_drift(norm, exponent) > ROUNDING:
            exponent += 1
        return exponent

    def branch_drift(self, norm: str, exponent: int) -> float:
        """Return the mean squared relative change of a norm's output if its input moves beside the stream."""
        seen = self.ranges[norm].norm
        return 0.0 if seen is None or exponent == 0 else seen.drift(self.layout.eps, exponent) ** 2

    def at_point(self, point: ObservationPoint, r: int) -> int:
        branch = self.branches.get((point.module, point.side))
        return point.sign * r + (0 if branch is None else self.before_norm(branch[0].name, r))

    def stream_of(self, signal: ResolvedSignal) -> str:
        carried = {c.signal for tensor, *_ in self.touched[signal.name] for c in tensor.carries}
        return next((stream for stream in self.layout.streams if stream in carried), self.layout.streams[0])

    def of_stream(self) -> list[ResolvedSignal]:
        movable = [s for s in self.layout.signals.values() if s.kind in SOLVED]
        return [s for s in movable if self.stream_of(s) == self.stream and (s.kind in OF_STREAM or self.carries(s))]

    def carries(self, signal: ResolvedSignal) -> bool:
        return any(c.signal == self.stream for t, *_ in self.touched[signal.name] for c in t.carries)

    def importance(self, signal: ResolvedSignal) -> torch.Tensor:
        """Return each channel's share in its signal, float64 [channels]: mean square times its readers' energy. For
        queries and keys it is the product of their mean squares. A channel's own exponent changes neither."""
        ones = torch.ones(signal.size, dtype=torch.float64)
        squares = [observed.mean_square.double() for _, observed in self.seen(signal)]
        if not squares:
            return ones / signal.size
        readers = [(t, a, c) for t, a, c in self.touched[signal.name] if a == 1 and c.sign < 0]
        if signal.kind is Kind.QUERY_KEY:
            return as_shares(torch.stack(squares).prod(0))
        if not readers:
            return as_shares(squares[-1])
        return as_shares(sum((as_shares(squares[-1] * self.energy(*of)) for of in readers), 0 * ones))

    # -- what an exponent costs -------------------------------------------------------------------------------------

    def channel_costs(self, signal: ResolvedSignal, tried: list[int]) -> Iterator[torch.Tensor]:
        """Yield for each residual exponent the cost of exponents −24…24 by channel: float64 [channels, 49]."""
        exponents = torch.arange(-CHANNEL_RANGE, CHANNEL_RANGE + 1)
        restraint = RESTRAINT_OF_STATES if signal.name in self.last_norms else RESTRAINT
        own = restraint / signal.size * exponents.abs().double().expand(signal.size, -1)
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
        for point, observed in self.seen(signal):
            at = point.sign * exponents
            own = own + share * signal_noise(observed.mean_square, at)
            own = own + EXCESS * excess_bits(observed.amax.double()[:, None] * 2.0**at, self.limit)
        for number in range(len(tried)):
            yield sum((cost[:, at[number] : at[number] + len(exponents)] for cost, at in weights), own)

    def proof_costs(self, signal: ResolvedSignal) -> torch.Tensor:
        """Return the costs that bounds add to ``channel_costs``: float64 [channels, 49]."""
        exponents = torch.arange(-CHANNEL_RANGE, CHANNEL_RANGE + 1)
        cost = torch.zeros(signal.size, exponents.numel(), dtype=torch.float64)
        for point, possible in self.possible(signal):
            amax = possible.amax.double()[:, None] * 2.0 ** (point.sign * exponents)
            cost = cost + EXCESS * excess_bits(amax, PROOF_LIMIT)
        return cost

    def best(self, signal: ResolvedSignal, r: int) -> Solution:
        known = self.solved.setdefault(signal.name, {})
        if r not in known:
            tried = sorted({*self.tried, r} - known.keys())
            proof = None if self.bounds is None else self.proof_costs(signal)
            for at, costs in zip(tried, self.channel_costs(signal, tried), strict=True):
                known[at] = self.solution(signal, costs, proof)
            self.release(signal)
        return known[r]

    def solution(self, signal: ResolvedSignal, costs: torch.Tensor, proof: torch.Tensor | None) -> Solution:
        free, unmoved = float(costs.amin(1).sum()), float(costs[:, CHANNEL_RANGE].sum())
        if proof is None:
            return Solution(free, free, unmoved, self.restrained(costs))
        held = costs + proof
        proven = float(held.amin(1).sum())
        price = self.proof_worth * len(signal.seen)
        if proven <= free + price:
            return Solution(proven, free, float(held[:, CHANNEL_RANGE].sum()), self.restrained(held))
        impossible = proven - free > EXCESS * 2.0**-10
        given_up = Fallback(signal.name, proven, free, impossible)
        return Solution(free + price, free, unmoved, self.restrained(costs), given_up)

    def restrained(self, costs: torch.Tensor) -> torch.Tensor:
        """Return each channel's index: nearer to 0 where that costs little, and at 0 while the sum is within
        ``spare``."""
        steps = torch.arange(-CHANNEL_RANGE, CHANNEL_RANGE + 1).abs().double()
        index = (costs + RESTRAINT_OF_CHANNELS / len(costs) * steps).argmin(1)
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
        """Return the costs that depend on r alone: the stream's limits, noise, weights that only it scales, drift."""
        signal = self.layout.signals[self.stream]
        cost = RESTRAINT * abs(r)
        for point, observed in self.seen(signal):
            e = self.at_point(point, r)
            cost += EXCESS * float(excess_bits(observed.amax.double().amax() * 2.0**e, self.limit))
            if point.side == "input":
                norm = self.layout.signals.get(point.module)
                share = self.importance(norm) if norm is not None else as_shares(observed.mean_square.double())
                cost += float((share[:, None] * signal_noise(observed.mean_square, torch.tensor([e]))).sum())
                length = self.stream_norm(self.ranges, point.module) * 2.0**e
                cost += EXCESS * float(excess_bits(length, self.norm_limit(self.margin_bits)))
        for tensor, axis, carried in self.touched[self.stream]:
            if all(c.signal == self.stream for c in self.planned(tensor.carries)):
                table = self.table(tensor, axis, carried).total
                at = torch.tensor([sum(c.sign * self.scalar(c.signal, r) for c in tensor.carries)])
                cost += float(self.weight_cost(table, at, torch.ones(1, 1)).sum())
        return cost + UNWRITABLE * self.unwritable_bits(r) + self.drift(r)

    def unwritable_bits(self, r: int, *, own: bool = False) -> float:
        """Return the bits past 65504 that the stream gives to weights. own: also to those with channel exponents."""
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
        total = 0.0
        bounds = self.bounds or {}
        for point, possible in self.possible(self.layout.signals[self.stream]):
            e = self.at_point(point, r)
            total += float(excess_bits(possible.amax.double().amax() * 2.0**e, PROOF_LIMIT))
            if point.side == "input":
                length = self.stream_norm(bounds, point.module) * 2.0**e
                total += float(excess_bits(length, self.norm_limit(PROOF_MARGIN_BITS)))
        return total

    def observed_excess(self, r: int) -> float:
        total = 0.0
        for point, observed in self.seen(self.layout.signals[self.stream]):
            e = self.at_point(point, r)
            total += float(excess_bits(observed.amax.double().amax() * 2.0**e, self.limit))
            length = self.stream_norm(self.ranges, point.module) * 2.0**e if point.side == "input" else torch.zeros(())
            total += float(excess_bits(length, self.norm_limit(self.margin_bits)))
        return total

    def total_cost(self, r: int) -> Total:
        solved = {s.name: self.best(s, r) for s in self.of_stream()}
        stream = self.residual_cost(r)
        cost = stream + sum(s.cost for s in solved.values())
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

    def drift(self, r: int, corrected: bool = True) -> float:
        """Return the sum over the stream's norms of the mean squared relative change by a fixed eps; 0 where the config
        has the scaled eps. A token of variance v changes by √((v + eps) / (v + fixed·4^-r)) − 1. A gain correction
        takes out the mean, at the cost of one more rounding."""
        norms = {norm: name for name, (_, norm) in self.branched.items() if norm in self.norms()}
        total = self.drift_beside(r)
        total += sum(self.branch_drift(norm, self.before_norm(name, r)) for norm, name in norms.items())
        if not self.drifts(r):
            return total
        for path in self.norms():
            (kept, shares), correction = self.kept(path, r), self.gain_correction(path, r) if corrected else 1.0
            total += float((shares * (correction * kept - 1).square()).sum()) + ROUNDING * (correction != 1.0)
        return total

    def drift_beside(self, r: int) -> float:
        """Return the mean squared drift of projectors' norms that share this model's eps."""
        shared = [self.ranges[w.norm].norm for w in self.layout.projectors if w.shares_eps and w.norm in self.ranges]
        kept = [norm.kept(self.layout.eps, -r) for norm in shared if norm is not None and self.stream == RESIDUAL]
        return sum(float((shares * (change - 1).square()).sum()) for change, shares in kept)

    def drifts(self, r: int) -> bool:
        return self.layout.fixed_eps is not None and self.layout.fixed_eps * 4.0**-r != self.layout.eps

    def rounded_gains(self, signal: str, exponents: torch.Tensor) -> float:
        """Return the squared relative rounding error of gains that are stored minus an offset and that this signal
        moves."""
        total, every = 0.0, torch.arange(-CHANNEL_RANGE, CHANNEL_RANGE + 1)
        for tensor, axis, carried in self.touched[signal] if bool((exponents != 0).any()) else ():
            if tensor.offset:
                table = self.table(tensor, axis, carried)
                errors, at = table.at(every)[1].double(), carried.sign * exponents.long() + CHANNEL_RANGE
                total += float(errors.gather(1, at.expand(len(errors))[:, None]).sum() / table.energy.sum())
        return total

    def norms(self) -> list[str]:
        return [path for path, stream in self.layout.streams_read.items() if stream == self.stream]

    def kept(self, path: str, r: int) -> tuple[torch.Tensor, torch.Tensor]:
        norm = self.ranges[path].norm if path in self.ranges else None
        if norm is None:
            return torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        assert self.layout.fixed_eps is not None
        return norm.kept(self.layout.eps, r, self.layout.fixed_eps)

    def gain_correction(self, path: str, r: int) -> float:
        """Return the gain factor with the least mean squared change in fp16; 1 for a change under one rounding."""
        kept, shares = self.kept(path, r)
        factor = float((shares * kept).sum() / (shares * kept.square()).sum())
        if abs(factor - 1) <= math.sqrt(ROUNDING):
            return 1.0
        largest = self.largest_gain(path, r)
        return min(factor, max(1.0, FP16_MAX / largest)) if largest > 0 else factor

    def largest_gain(self, path: str, r: int) -> float:
        tensor = self.layout.tensors[f"{path}.weight"]
        if path not in self.gains:
            self.gains[path] = self.weights(tensor.name).abs().double()
        moved = torch.zeros(tensor.shape, dtype=torch.float64)
        for carried in carried_by(tensor.axes[0]):
            if carried.signal == self.stream:
                moved += carried.sign * r
            elif carried.signal in self.chosen:
                moved += carried.sign * spread_out(self.chosen[carried.signal], carried.spread)
        return float((self.gains[path] * 2.0**moved).max())

    def gain_corrections(self, r: int) -> dict[str, float]:
        if not self.drifts(r):
            return {}
        factors = {f"{path}.weight": self.gain_correction(path, r) for path in self.norms()}
        return {name: factor for name, factor in factors.items() if factor != 1.0}


class _PlanSearch(_Costs):
    def run(self, held: Mapping[str, int]) -> Planned:
        """Decide each stream with its channels, move gains where needed, and collect the limits that cannot be held."""
        streams, drift, without = self.layout.streams, 0.0, 0.0
        if self.moves_least and not held and self.holds_unmoved():
            held, self.spare = dict.fromkeys(streams, 0), math.inf
            self.solved.clear()  # these were solved with a smaller ``spare``
        cost = 0.0
        for self.stream in streams:
            totals = self.decide_stream([held[self.stream]] if self.stream in held else self.candidates())
            r = self.decided[self.stream]
            drift += self.drift(r) + self.rounded_gains(self.stream, torch.tensor(r))
            without += self.drift(r, corrected=False) - self.drift(r)
            cost += totals[r].cost
        self.tried = []
        for signal in (s for s in self.layout.signals.values() if s.kind is Kind.QUERY_KEY):
            self.settle(signal, self.exponent_for(signal))
            drift += self.rounded_gains(signal.name, self.chosen[signal.name])
        norms = [s for s in self.layout.signals.values() if s.kind is Kind.NORM]
        for signal in [s for s in norms if self.gain_is_needed(s, self.exponent_for(s))]:
            before = self.chosen.get(signal.name)
            self.settle(signal, self.exponent_for(signal))
            if not same(before, self.chosen.get(signal.name)):
                self.resettle_writers(signal)
        corrections: dict[str, float] = {}
        for self.stream in streams:
            corrections |= self.gain_corrections(self.decided[self.stream])
        r = self.decided[streams[0]]
        exponents: dict[str, int | list[int]] = {n: e for n, e in self.decided.items() if n != streams[0]}
        exponents |= {
            name: exponent
            for name, (_, norm) in self.branched.items()
            if (exponent := self.before_norm(name, self.decided[self.layout.streams_read[norm]]))
        }
        exponents |= {name: folded(values) for name, values in self.chosen.items() if bool((values != 0).any())}
        own_eps, eps = self.layout.held_eps, self.layout.eps * 4.0**r
        unscaled = any(map(self.drifts, self.decided.values()))
        plan = Plan(
            family=self.layout.family.name,
            residual_exponent=r,
            exponents=exponents,
            untied_head=any(
                t.source and t.name == self.layout.family.head and t.source != t.name
                for t in self.layout.tensors.values()
            ),
            eps=None if self.layout.family.eps_key is None else eps if own_eps is None else own_eps,
            eps_held=own_eps is not None,
            gain_correction=corrections,
            drift=Drift(relative_error=math.sqrt(drift / len(self.layout.norms))) if drift or unscaled else None,
            margin_bits=self.margin_bits,
        )
        return Planned(
            plan,
            tuple(self.violations(plan)),
            cost,
            tuple(self.fallbacks.values()),
            self.for_proof,
            without / len(self.layout.norms),
        )

    def holds_unmoved(self) -> bool:
        """Return whether unmoved weights keep all limits and proofs, and cost at most one rounding for each norm."""
        spare = ROUNDING * len(self.layout.norms)
        for stream in self.layout.streams:
            self.stream = stream
            if self.residual_excess(0) > 0 or any(self.before_norm(name, 0) for name in self.branched):
                return False
            spare -= self.residual_cost(0) - min(self.residual_cost(r) for r in self.candidates())
        for signal in self.layout.signals.values():
            if signal.kind not in (*SOLVED, Kind.NORM):
                continue
            best = self.best(signal, 0)
            unproven = 0.0 if self.bounds is None else float(self.proof_costs(signal)[:, CHANNEL_RANGE].sum())
            spare -= best.unmoved + unproven - best.free
            if spare < 0:
                return False
        return True

    def decide_stream(self, candidates: list[int]) -> dict[int, Total]:
        """Choose the stream's exponent and its channels'; return the cost of each candidate. The choice is the exponent
        nearest 0 that gives up no more proofs than the cheapest and costs little more."""
        self.tried = candidates
        totals = {r: self.total_cost(r) for r in self.tried}
        finite = {r: total for r, total in totals.items() if math.isfinite(total.cost)}
        if not finite:
            raise UserError(
                "no exponent brings the signals into fp16's range, so large are the weights; use another revision of"
                " the checkpoint, or repair it"
            )
        best = min(finite.values(), key=lambda total: total.cost)
        spare = NEARNESS * len(self.layout.norms) if self.moves_least else INDIFFERENCE
        unproven = best.unproven if self.moves_least else math.inf
        r = min((e for e, t in finite.items() if t.cost <= best.cost + spare and t.unproven <= unproven), key=abs)
        self.decided[self.stream] = r
        if not totals[r].holds:
            self.fallbacks[self.stream] = self.residual_fallback(r)
        room = max((e for e in range(r, 1) if self.observed_excess(e) == 0), default=r)
        if room > r and self.residual_excess(room) > 0:
            self.for_proof[self.stream] = room
        self.tried = [r]
        for signal in self.of_stream():
            self.settle(signal, r)
        return totals

    def exponent_for(self, signal: ResolvedSignal) -> int:
        return self.decided[self.stream_of(signal)]

    def residual_fallback(self, r: int) -> Fallback:
        held = [e for e in range(-RESIDUAL_RANGE, r) if self.residual_excess(e) == 0]
        if not held:
            return Fallback(self.stream, math.inf, self.residual_cost(r), True)
        return Fallback(self.stream, self.residual_cost(max(held)), self.residual_cost(r), False, max(held))

    def candidates(self) -> list[int]:
        tops = []
        for point, observed in self.seen(self.layout.signals[self.stream]):
            if point.sign > 0 and float(observed.amax.amax()) > 0:
                tops.append(whole_log2(self.limit / float(observed.amax.amax())))
                if point.side == "input" and self.target in SQUARING:
                    room = self.norm_limit(self.margin_bits) / self.stream_norm(self.ranges, point.module)
                    tops.append(whole_log2(float(room)))
        top = max(-RESIDUAL_RANGE, min(RESIDUAL_RANGE, min(tops, default=0)))
        proven = max((e for e in range(-RESIDUAL_RANGE, top + 1) if self.residual_excess(e) == 0), default=top)
        down = range(-RESIDUAL_RANGE, 1)
        least = {min((e for e in down if self.unwritable_bits(e, own=own) == 0), default=0) for own in (False, True)}
        near = {*range(top - 6, top + 2), *range(proven - 1, proven + 1), *least, 0}
        if self.moves_least:
            near |= {*range(min(proven, 0), 1)}
        return sorted(e for e in near if abs(e) <= RESIDUAL_RANGE)

    def settle(self, signal: ResolvedSignal, r: int) -> None:
        solution = self.best(signal, r)
        best = solution.index.to(torch.int32) - CHANNEL_RANGE
        self.fallbacks.pop(signal.name, None)
        if solution.fallback is not None:
            self.fallbacks[signal.name] = solution.fallback
        changed = not same(self.chosen.get(signal.name), best)
        self.chosen[signal.name] = best
        if changed:
            for tensor, axis, _ in self.touched[signal.name]:
                self.forget(tensor, 1 - axis)

    def gain_is_needed(self, signal: ResolvedSignal, r: int) -> bool:
        """Return whether gain exponents of 0 break a limit or lose visibly."""
        if self.moves_least:
            return bool((self.best(signal, r).index != CHANNEL_RANGE).any())
        return self.best(signal, r).unmoved > self.lossy_price / 2

    def resettle_writers(self, norm: ResolvedSignal) -> None:
        for tensor, *_ in list(self.touched[norm.name]):
            for written in carried_by(tensor.axes[0]) if len(tensor.axes) == 2 else ():
                if written.signal in self.chosen:
                    self.forget(tensor, 0)
                    signal = self.layout.signals[written.signal]
                    self.settle(signal, self.exponent_for(signal))

    # -- what cannot be held ----------------------------------------------------------------------------------------

    def violations(self, plan: Plan) -> list[Violation]:
        worst: dict[str, float] = {}
        for signal in self.layout.signals.values():
            e = torch.as_tensor(plan.exponent(signal.name), dtype=torch.float64)
            for point, observed in self.seen(signal):
                branch = self.branches.get((point.module, point.side)) if signal.kind is Kind.RESIDUAL else None
                own = 0 if branch is None else plan.stream_exponent(branch[0].name)
                limit = min(self.limit, self.gate_limit) if point.module in self.layout.gates else self.limit
                excess = float(excess_bits(observed.amax.double() * 2.0 ** (point.sign * e + own), limit).amax())
                if signal.kind is Kind.RESIDUAL and point.side == "input":
                    length = self.stream_norm(self.ranges, point.module) * 2.0**e
                    excess = max(excess, float(excess_bits(length, self.norm_limit(self.margin_bits))))
                place = f"{point.module} ({point.side})"
                if excess > 0:
                    worst[place] = max(worst.get(place, 0.0), excess)
        return [Violation(*place) for place in sorted(worst.items(), key=lambda item: -item[1])]
