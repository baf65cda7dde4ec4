"""What powers of two cost a layout's weights, axis by axis, under the exponents chosen for their other axes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field

import torch

from ..families.layout import Layout, ResolvedSignal, ResolvedTensor, TensorReader
from ..families.signals import Axis, Kind, carried_by
from ..families.spread import shared, spread_out
from ..progress import Advance
from .rounding_loss import LossTable, Tables, channel_energy, loss_table, of_channels, offset_loss_table


@dataclass(eq=False)
class WeightLosses:
    """weights: before any exponent. known: tables of these weights from earlier plans; gets new ones. advance: called
    with the number of tensors' axes whose losses are computed, and of all."""

    layout: Layout
    weights: TensorReader
    _: KW_ONLY
    known: Tables = field(default_factory=lambda: Tables(most=0))
    advance: Advance | None = None

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
            self.energies[key] = shared(energy, carried.spread).sum(1)
        return self.energies[key]

    def shift(self, tensor: ResolvedTensor, axis: int) -> torch.Tensor | None:
        others = carried_by(tensor.axes[1 - axis]) if len(tensor.axes) == 2 else ()
        shifts = [spread_out(self.chosen[c.signal] * c.sign, c.spread) for c in others if c.signal in self.chosen]
        return torch.stack(shifts).sum(0, dtype=torch.int32) if shifts else None

    def release(self, signal: ResolvedSignal) -> None:
        for tensor, axis, carried in self.touched[signal.name]:
            self.tables.pop((tensor.name, axis, carried), None)
