"""Choose a plan's exponents: hard limits come first, then the least predicted error.

For a given exponent of the stream, every channel is a separate integer problem. So the planner tries exponents of the
stream and takes each channel's best from tables of rounding losses. It scales norms' gains only if a loss remains.

Observed ranges must fit with a margin, unless ``proof_is_enough``. A certificate's bounds must fit if that costs at
most ``PROOF_WORTH`` per site. If limits cannot all hold, the excess is minimised and reported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..errors import UserError
from ..families.layout import Layout, ResolvedSignal, TensorReader
from ..families.signals import Kind, before, carried_by
from ..numerics import FP16_MAX, GELU_CUBE_BACKWARD_LIMIT, PROOF_LIMIT
from ..progress import Advance
from ..ranges import ModuleRange
from ..targets import MARGIN_BITS, SQUARING
from .channels import RESIDUAL_RANGE, ROUNDING, excess_bits, folded, known_points, largest_sums, same, whole_log2
from .costs import NEARNESS, PROOF_WORTH, SOLVED, Costs, Total
from .exponents import exponents_of
from .plan import Drift, Fallback, OfChannels, Plan, Violation
from .rounding_loss import Tables
from .weight_losses import CHANNEL_RANGE

TRAIN_MARGIN_BITS = 2.0
"""Further bits that the target ``train`` keeps, because weights move and gradients flow back."""

PROOF_FIRST = 1.0  # ``PROOF_WORTH`` where a proof was asked for: as large an error as the output itself

INDIFFERENCE = ROUNDING / 4
"""If norms square in fp16, stream exponents whose costs differ by less are equally good; the nearest to 0 is taken."""


@dataclass(frozen=True)
class Planned:
    """A plan, and the limits that it breaks."""

    plan: Plan
    violations: tuple[Violation, ...]
    cost: float  # the predicted relative squared error
    fallbacks: tuple[Fallback, ...] = ()  # signals without a proof, planned by observed ranges alone
    for_proof: Mapping[str, int] = field(default_factory=dict)  # as in ``Report``
    corrected: float = 0.0  # the mean squared relative drift that gain corrections remove


def make_plan(
    layout: Layout,
    weights: TensorReader,  # before rescaling
    ranges: Mapping[str, ModuleRange],  # on the source; from bounds if nothing is run
    *,
    target: str = "half",
    margin_bits: float = MARGIN_BITS,  # between a range and its limit
    bounds: Mapping[str, ModuleRange] | None = None,  # ranges for any input
    held: Mapping[str, int] | None = None,  # given exponents of streams
    proof_worth: float = PROOF_WORTH,
    proof_is_enough: bool = False,  # a stream that fits by its bounds need not keep the margin
    drift_free: bool = False,  # a norm's input gets the stream's exponent alone, which eps can follow
    known: Tables | None = None,  # of these weights, from earlier plans; new ones are added
    advance: Advance | None = None,
) -> Planned:
    """Return the plan for ``layout`` that keeps every limit of ``target`` and then has the least predicted error.

    target: ``half`` keeps every signal under 65504. ``norm-safe`` and ``fp16-accumulate`` also keep ‖h‖₂² of the
    residual stream h under 65504, as fp16 sums it. ``train`` keeps 2 more bits, and gates of ``gelu_new`` under 147.8.
    bounds: these ranges must fit too, if that costs at most ``proof_worth`` for each site."""
    # Each of the many parameters is the result of an earlier step.
    return PlanSearch(
        layout,
        weights,
        ranges,
        known=Tables(most=0) if known is None else known,
        advance=advance,
        bounds=bounds or {},
        target=target,
        margin_bits=margin_bits + (TRAIN_MARGIN_BITS if target == "train" else 0.0),
        drift_free=drift_free,
        proof_worth=proof_worth,
        proof_is_enough=proof_is_enough,
    ).run(held or {})


class PlanSearch(Costs):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.decided: dict[str, int] = {}
        self.fallbacks: dict[str, Fallback] = {}
        self.for_proof: dict[str, int] = {}

    def run(self, held: Mapping[str, int]) -> Planned:
        """Choose the exponents of streams, of channels and, if needed, of norms' gains. held: streams' fixed
        exponents."""
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
        exponents: dict[str, OfChannels] = {n: e for n, e in self.decided.items() if n != streams[0]}
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
        """Return whether a plan that scales nothing is good enough. It must keep all limits and proofs. Its cost may
        exceed the best plan's cost by no more than one fp16 rounding for each norm."""
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
            spare -= best.unmoved + float(self.proof_costs(signal)[:, CHANNEL_RANGE].sum()) - best.free
            if spare < 0:
                return False
        return True

    def decide_stream(self, candidates: list[int]) -> dict[int, Total]:
        """Choose the exponents of the current stream and of its signals, and return each candidate's cost. candidates:
        the stream exponents to try; of those that cost little more than the cheapest, the nearest to 0 is chosen."""
        self.tried = candidates
        totals = {r: self.total_cost(r) for r in self.tried}
        finite = {r: total for r, total in totals.items() if math.isfinite(total.cost)}
        if not finite:
            raise UserError(
                "the weights are so large that no exponent brings the signals into fp16's range; use another"
                " revision of the checkpoint, or repair it"
            )
        best = min(finite.values(), key=lambda total: total.cost)
        spare = NEARNESS * len(self.layout.norms) if self.moves_least else INDIFFERENCE
        unproven = best.unproven if self.moves_least else math.inf
        r = min((e for e, t in finite.items() if t.cost <= best.cost + spare and t.unproven <= unproven), key=abs)
        self.decided[self.stream] = r
        if not totals[r].holds:
            held = [e for e in range(-RESIDUAL_RANGE, r) if self.residual_excess(e) == 0]
            self.fallbacks[self.stream] = Fallback(self.stream, not held, max(held, default=None))
        room = max((e for e in range(r, 1) if self.observed_excess(e) == 0), default=r)
        if room > r and self.residual_excess(room) > 0:
            self.for_proof[self.stream] = room
        self.tried = [r]
        for signal in self.of_stream():
            self.settle(signal, r)
        return totals

    def exponent_for(self, signal: ResolvedSignal) -> int:
        return self.decided[self.stream_of(signal)]

    def candidates(self) -> list[int]:
        tops = []
        for point, observed in known_points(self.ranges, self.layout.signals[self.stream]):
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
        """Return whether exponents of 0 for a norm's gains would break a limit or lose noticeable precision."""
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

    def violations(self, plan: Plan) -> list[Violation]:
        cubes = self.target == "train" and any(w.activation == "gelu_new" for w in self.layout.feed_forwards)
        gate_limit = min(self.limit, GELU_CUBE_BACKWARD_LIMIT) if cubes else self.limit
        worst: dict[str, float] = {}
        for signal in self.layout.signals.values():
            if signal.name in self.decided:
                self.stream = signal.name
                if self.observed_excess(self.decided[signal.name]) == 0:
                    continue
            e = torch.as_tensor(plan.exponent(signal.name), dtype=torch.float64)
            for point, observed in known_points(self.ranges, signal):
                branch = self.branches.get((point.module, point.side)) if signal.kind is Kind.RESIDUAL else None
                own = 0 if branch is None else plan.stream_exponent(branch[0].name)
                limit = gate_limit if point.module in self.layout.gates else self.limit
                excess = float(excess_bits(observed.amax.double() * 2.0 ** (point.sign * e + own), limit).amax())
                if signal.kind is Kind.RESIDUAL and point.side == "input":
                    length = self.stream_norm(self.ranges, point.module) * 2.0**e
                    excess = max(excess, float(excess_bits(length, self.norm_limit(self.margin_bits))))
                place = f"{point.module} ({point.side})"
                if excess > 0:
                    worst[place] = max(worst.get(place, 0.0), excess)
        return [Violation(*place) for place in sorted(worst.items(), key=lambda item: -item[1])]


def with_smaller_gradients(
    plan: Plan,
    layout: Layout,
    weights: TensorReader,
    ranges: Mapping[str, ModuleRange],
    bounds: Mapping[str, ModuleRange] | None = None,  # ranges for any input
) -> Plan:
    """Return ``plan`` with larger exponents for linears whose output only a norm reads, so that gradients are smaller.

    The plan multiplies the residual stream and these outputs by 2^r, and so their gradients by 2^-r. If r < 0, the
    exponent of each such output is raised from r to at most 0. Outputs and weights stay within their limits, and the
    norm's output changes by at most one fp16 rounding. weights: not rescaled. ranges: observed on the source."""
    if layout.fixed_eps is not None:
        return plan
    limit = FP16_MAX * 2.0 ** -(plan.margin_bits or 0.0)
    exponents, drift = dict(plan.exponents), 0.0
    for path, stream in layout.streams_read.items():
        signal, r = layout.signals.get(before(path)), plan.stream_exponent(stream)
        if signal is None or r >= 0:
            continue
        rooms = []
        for name, tensor in layout.tensors.items():
            if any(carried.signal == signal.name for carried in tensor.carries):
                moved = exponents_of(tensor, plan).full(tensor.shape) - r  # by all but the stream
                largest = float((weights(name).abs() * 2.0 ** moved.float()).amax())
                rooms += [whole_log2(limit / largest)] if largest > 0 else []
        exponent = min(0, *largest_sums(signal, ((ranges, limit), (bounds or {}, PROOF_LIMIT))), *rooms) - r
        norm = ranges[path].norm if path in ranges else None
        # The norm's eps follows the stream's exponent only.
        while exponent > 0 and norm is not None and norm.drift(layout.eps, exponent) ** 2 > ROUNDING:
            exponent -= 1
        if exponent > 0:
            exponents[signal.name] = exponent
            drift += 0.0 if norm is None else norm.drift(layout.eps, exponent) ** 2
    if exponents == plan.exponents:
        return plan
    other = 0.0 if plan.drift is None else plan.drift.relative_error
    error = math.sqrt(other**2 + drift / len(layout.norms))
    return plan.model_copy(update={"exponents": exponents, "drift": Drift(relative_error=error)})
