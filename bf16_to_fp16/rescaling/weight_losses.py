"""The precision that weights lose when powers of two scale them along one axis, given the exponents along the second
axis. Also the drift: a change of norms' outputs that occurs where eps cannot be scaled. Drift occurs too where gains
are stored minus an offset, because rescaling rounds these gains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field

import torch

from ..families.layout import Layout, ResolvedSignal, ResolvedTensor, TensorReader
from ..families.signals import RESIDUAL, Axis, Kind, ObservationPoint, before, carried_by
from ..families.spread import by_channel, spread_out
from ..numerics import FP16_MAX, PROOF_LIMIT
from ..progress import Advance
from ..ranges import ModuleRange
from ..targets import MARGIN_BITS, SQUARING
from .channels import ROUNDING, largest_sums
from .rounding_loss import LossTable, Tables, channel_energy, loss_table, of_channels, offset_loss_table

CHANNEL_RANGE = 24  # channel exponents are searched from −24 to 24
EXPONENTS = torch.arange(-CHANNEL_RANGE, CHANNEL_RANGE + 1)


@dataclass(eq=False)
class WeightLosses:
    """The errors that scaling causes in weights, and in norms whose eps is not scaled. ``make_plan`` describes the
    fields."""

    layout: Layout
    weights: TensorReader
    ranges: Mapping[str, ModuleRange]
    _: KW_ONLY
    known: Tables = field(default_factory=lambda: Tables(most=0))
    advance: Advance | None = None
    bounds: Mapping[str, ModuleRange] = field(default_factory=dict)
    target: str = "half"
    margin_bits: float = MARGIN_BITS
    drift_free: bool = False

    def __post_init__(self) -> None:
        self.chosen: dict[str, torch.Tensor] = {}
        self.tables: dict[tuple[str, int, Axis], LossTable] = {}
        self.energies: dict[tuple[str, int, Axis], torch.Tensor] = {}
        self.looked_at: set[tuple[str, int, Axis]] = set()
        self.touched: dict[str, list[tuple[ResolvedTensor, int, Axis]]] = {name: [] for name in self.layout.signals}
        for tensor in self.layout.tensors.values():
            for place, axis in enumerate(tensor.axes):
                for carried in self.planned(carried_by(axis)):
                    self.touched[carried.signal].append((tensor, place, carried))
        self.stream = RESIDUAL  # the residual stream that the methods consider
        self.limit = FP16_MAX * 2.0**-self.margin_bits
        self.moves_least = self.target not in SQUARING
        self.gains: dict[str, torch.Tensor] = {}
        self.branches: dict[tuple[str, str], tuple[ResolvedSignal, str]] = {}
        """By module and side: the signal that only a norm reads, and the norm; {} if such signals get no exponents."""
        eps_moves = self.layout.fixed_eps is None and self.layout.held_eps is None and not self.drift_free
        for norm in self.layout.streams_read if eps_moves and self.moves_least else ():
            signal = self.layout.signals.get(before(norm))
            if signal is not None and norm in self.ranges and self.ranges[norm].norm is not None:
                self.branches |= {(point.module, point.side): (signal, norm) for point in signal.added_at}
        self.branched = {signal.name: (signal, norm) for signal, norm in self.branches.values()}

    def planned(self, carried: Iterable[Axis]) -> list[Axis]:
        kinds = ((c, self.layout.signals[c.signal].kind) for c in carried)
        return [c for c, kind in kinds if not kind.has_price and kind is not Kind.BEFORE_NORM]

    def table(self, tensor: ResolvedTensor, axis: int, carried: Axis) -> LossTable:
        key = (tensor.name, axis, carried)
        if key not in self.tables:
            shift = self.shift(tensor, axis)
            given = (axis, carried.spread, None if shift is None else shift.numpy().tobytes())

            def compute() -> LossTable:
                weight, offset = self.weights(tensor.name), tensor.offset
                table = offset_loss_table(weight, offset) if offset else loss_table(weight, axis, shift)
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
            self.energies[key] = by_channel(energy, carried.spread).sum(1)
        return self.energies[key]

    def shift(self, tensor: ResolvedTensor, axis: int) -> torch.Tensor | None:
        others = carried_by(tensor.axes[1 - axis]) if len(tensor.axes) == 2 else ()
        shifts = [spread_out(self.chosen[c.signal] * c.sign, c.spread) for c in others if c.signal in self.chosen]
        return torch.stack(shifts).sum(0, dtype=torch.int32) if shifts else None

    def release(self, signal: ResolvedSignal) -> None:
        for tensor, axis, carried in self.touched[signal.name]:
            self.tables.pop((tensor.name, axis, carried), None)

    def before_norm(self, name: str, r: int) -> int:
        """Return the exponent that a norm's input gets in addition to the stream exponent ``r``. It is 0, or negative
        if the input would exceed limits otherwise. It changes the norm's output by at most one fp16 rounding. name: the
        signal that the norm reads."""
        if name not in self.branched:
            return 0
        signal, norm = self.branched[name]
        rooms = largest_sums(signal, ((self.ranges, self.limit), (self.bounds, PROOF_LIMIT)))
        exponent = min(0, min(rooms, default=0) - r)
        while exponent < 0 and self.branch_drift(norm, exponent) > ROUNDING:
            exponent += 1
        return exponent

    def branch_drift(self, norm: str, exponent: int) -> float:
        """Return the mean squared relative change of a norm's output if ``exponent`` scales its input but not eps."""
        seen = self.ranges[norm].norm
        return 0.0 if seen is None or exponent == 0 else seen.drift(self.layout.eps, exponent) ** 2

    def at_point(self, point: ObservationPoint, r: int) -> int:
        branch = self.branches.get((point.module, point.side))
        return point.sign * r + (0 if branch is None else self.before_norm(branch[0].name, r))

    def drift(self, r: int, corrected: bool = True) -> float:
        """Return the mean squared relative change of a norm's output at the stream exponent ``r``, summed over norms
        whose input and eps are not scaled alike.

        A norm whose eps is not scaled computes with ``fixed_eps``, and the source's norm with eps. The output for a
        token of variance v then changes by √((v + eps) / (v + fixed_eps·4^-r)) − 1. corrected: whether the norms' gains
        get factors that remove the mean change. Each such factor costs one fp16 rounding."""
        norms = {norm: name for name, (_, norm) in self.branched.items() if norm in self.norms()}
        # Projectors' norms may share this model's eps.
        shared = [self.ranges[w.norm].norm for w in self.layout.projectors if w.shares_eps and w.norm in self.ranges]
        beside = [norm.kept(self.layout.eps, -r) for norm in shared if norm is not None and self.stream == RESIDUAL]
        total = sum(float((shares * (change - 1).square()).sum()) for change, shares in beside)
        total += sum(self.branch_drift(norm, self.before_norm(name, r)) for norm, name in norms.items())
        if not self.drifts(r):
            return total
        for path in self.norms():
            (kept, shares), correction = self.kept(path, r), self.gain_correction(path, r) if corrected else 1.0
            total += float((shares * (correction * kept - 1).square()).sum()) + ROUNDING * (correction != 1.0)
        return total

    def drifts(self, r: int) -> bool:
        return self.layout.fixed_eps is not None and self.layout.fixed_eps * 4.0**-r != self.layout.eps

    def rounded_gains(self, signal: str, exponents: torch.Tensor) -> float:
        """Return the squared relative error of rounding norms' gains that ``signal`` scales by ``exponents``. Only
        gains that are stored minus an offset count."""
        total = 0.0
        for tensor, axis, carried in self.touched[signal] if bool((exponents != 0).any()) else ():
            if tensor.offset:
                table = self.table(tensor, axis, carried)
                errors, at = table.at(EXPONENTS)[1].double(), carried.sign * exponents.long() + CHANNEL_RANGE
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
        """Return the factor on a norm's gains that leaves the least drift and fits fp16. Return 1 if a factor of 1
        would cost at most one fp16 rounding."""
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
