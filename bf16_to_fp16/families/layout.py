"""A family applied to one checkpoint: the role of each tensor, the connections of its modules, and the sublayers in
order along the residual stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from ..checkpoint.headers import TensorInfo
from ..errors import UserError
from .configs import config_value, number_of, positive
from .signals import Axis, Kind, ObservationPoint, carried_by
from .types import Family, MultiplierKind, StockClass
from .wiring import Attention, Experts, FeedForward, Head, Projector, StackEnds, Sublayer, Topology, feed_forwards_of

if TYPE_CHECKING:
    import torch


NOT_A_CHOICE = ("regression", "multi_label_classification")
"""Values of a classifier's ``problem_type`` with which no softmax is taken of its logits."""


class TensorSource(Protocol):
    """A source of tensors: a checkpoint on disk, or a model in memory."""

    @property
    def source(self) -> str:
        """The name of this source, for messages."""

    @property
    def config(self) -> Mapping[str, object]: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> torch.Tensor: ...

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop)."""

    def read_some_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor: ...


TensorReader = Callable[[str], "torch.Tensor"]  # returns a layout's tensor by name, in any floating dtype


@dataclass(frozen=True)
class ResolvedTensor:
    """A tensor of one checkpoint. ``generate`` and the fields after ``gain`` are as in ``Tensor``."""

    name: str
    source: str | None  # its name in the checkpoint, None if it is generated
    shape: tuple[int, ...]
    axes: tuple[Axis | None, ...]
    generate: Callable[[int, int], torch.Tensor] | None = None
    gain: float = 1.0  # on stored values before rescaling: d^-1/2 if a separated head takes over ``head_scale``
    offset: float = 0.0
    ahead: int = 0
    in_fp32: bool = False

    @property
    def carries(self) -> tuple[Axis, ...]:
        return tuple(each for axis in self.axes for each in carried_by(axis))


@dataclass(frozen=True)
class ResolvedSignal:
    name: str
    kind: Kind
    size: int
    seen: tuple[ObservationPoint, ...]
    beside: tuple[ObservationPoint, ...] = ()


@dataclass(frozen=True)
class ResolvedStack:
    """A stack of one checkpoint, its sublayers in order of execution. If it is the only one, both flags are true."""

    is_encoder: bool
    is_last: bool
    ends: StackEnds
    sublayers: tuple[Sublayer, ...]


@dataclass(frozen=True)
class Layout:
    """A family applied to one checkpoint."""

    family: Family
    config: Mapping[str, object]
    stock: StockClass
    tied: bool | None  # whether the embedding serves as head; None without a language-modelling head
    tensors: Mapping[str, ResolvedTensor]
    signals: Mapping[str, ResolvedSignal]
    dropped: Mapping[str, str]  # the checkpoint's tensors that are not used, each with the reason
    head_scale: float  # stock code's factor on the decoder's output before the head
    topology: tuple[Topology, ...] = ()
    """The encoder's ends and then its sublayers in order, the same for the decoder, and the head."""
    eps_in_memory: Mapping[str, float] = field(default_factory=dict)
    """By norm, the eps of a model in memory where no config can express it."""
    held_eps: float | None = None  # fixed in the tool that reads the output; None if that follows the config

    @property
    def of_other_classes(self) -> dict[str, str]:
        """Tensors that the stock class ignores and other classes of the family read, each with the reason."""
        return {name: why for name, why in self.dropped.items() if why.startswith(self.stock.names[0])}

    @property
    def only_class(self) -> str | None:
        """The stock class's name if there are tensors ``of_other_classes``, which the report leaves out; else None."""
        return self.stock.names[0] if self.of_other_classes else None

    @property
    def head(self) -> Head | None:
        """The head on the last norm's output; None if the stock class returns the norm's output itself."""
        return next((part for part in self.topology if isinstance(part, Head)), None)

    @property
    def gives_probabilities(self) -> bool:
        """Whether a softmax turns the outputs into probabilities: they are logits of two or more exclusive choices."""
        if self.head is None:
            return False
        choices = self.tensors[self.head.linears[-1].weight].shape[0]
        return choices > 1 and self.config.get("problem_type") not in NOT_A_CHOICE

    @property
    def projectors(self) -> tuple[Projector, ...]:
        """The parts that add another model's outputs, such as a vision tower's, to the first stack."""
        return tuple(part for part in self.topology if isinstance(part, Projector))

    def input_width(self, projector: Projector) -> int:
        """Return the width of the outputs that a projector reads, such as a vision tower's."""
        norm = self.tensors.get(f"{projector.norm}.weight")
        return norm.shape[0] if norm is not None else self.tensors[f"{projector.merging}.weight"].shape[1]

    def stacks(self) -> tuple[ResolvedStack, ...]:
        ends_and_sublayers: list[tuple[StackEnds, list[Sublayer]]] = []
        for topology in self.topology:
            if isinstance(topology, StackEnds):
                ends_and_sublayers.append((topology, []))
            elif not isinstance(topology, Head | Projector):
                ends_and_sublayers[-1][1].append(topology)
        last = len(ends_and_sublayers) - 1
        return tuple(
            ResolvedStack(i == 0, i == last, ends, tuple(sublayers))
            for i, (ends, sublayers) in enumerate(ends_and_sublayers)
        )

    def heads(self, attention: Attention) -> int:
        return number_of(self.family, self.config, attention.heads, "a number of heads")

    def kv_heads(self, attention: Attention) -> int:
        return number_of(self.family, self.config, attention.kv_heads or attention.heads, "a number of heads")

    def score_scale(self, attention: Attention) -> float:
        if not attention.scaled:
            return 1.0
        if "scores" in self.family.multipliers:
            return self.multiplier("scores")
        if attention.scale:
            return float(number_of(self.family, self.config, attention.scale, "a positive number") ** -0.5)
        return float(self.head_size(attention) ** -0.5)

    def head_size(self, attention: Attention) -> int:
        rows = attention.fused[0] if attention.fused else self.tensors[f"{attention.query}.weight"].shape[0]
        return rows // self.heads(attention)

    def cap(self, of: Attention | Head) -> float | None:
        """Return the c of a soft cap c·tanh(x/c) on scores or logits, None without one."""
        cap = config_value(self.family, self.config, of.cap) if of.cap else None
        return None if cap is None else positive(of.cap, cap, "a positive number")

    def most_keys(self, attention: Attention, length: int) -> int:
        """Return the largest number of keys to which one query attends, in sequences of up to ``length``."""
        if not attention.radius:
            return length
        near = 3 * (number_of(self.family, self.config, attention.radius, "a number of positions", least=0) + 1)
        return near + (length // self.positions_per_sum(attention) if attention.block else 0)

    def positions_per_sum(self, attention: Attention) -> int:
        """Return the size of the blocks of positions that an attention sums; a remainder joins the last block."""
        return number_of(self.family, self.config, attention.block, "a number of positions")

    def experts_together(self, experts: Experts) -> tuple[int, float, float]:
        """Return the number of experts per token, their largest weight, and the largest sum of one token's weights."""
        if not experts.chosen:
            return 1, 1.0, 1.0
        number = min(number_of(self.family, self.config, experts.chosen, "a number of experts"), len(experts.experts))
        scale = 1.0
        if experts.scaling:
            scaling = config_value(self.family, self.config, experts.scaling)
            scale = positive(experts.scaling, scaling, "a number to multiply with", allow_zero=True)
        convex = not experts.sigmoid or bool(config_value(self.family, self.config, experts.normalised))
        return number, scale, scale if convex else scale * number

    def noise(self, experts: Experts) -> float:
        """Return the largest distance from 1 of a router's random factor in training; 0 without one."""
        noise = config_value(self.family, self.config, experts.noise) if experts.noise else 0.0
        return positive(experts.noise, noise, "how far from 1 a factor may be, 0 for none", allow_zero=True)

    def embedding_scale(self, ends: StackEnds) -> float:
        """Return stock code's factor on the output of a stack's embedding; 1 for none."""
        if ends.multiplier:
            return self.multiplier("embedding")
        scaled = config_value(self.family, self.config, ends.switch) if ends.switch else ends.scaled_by
        return math.sqrt(self.tensors[self.table(ends)].shape[1]) if scaled else 1.0

    def multiplier(self, what: MultiplierKind) -> float:
        key = self.family.multipliers.get(what)
        return positive(key, config_value(self.family, self.config, key), "a number over 0") if key else 1.0

    def stream(self, ends: StackEnds) -> str:
        return f"{ends.first_norm}:{self.family.norm_site}" if ends.first_norm else ends.embedded

    @cached_property
    def streams(self) -> tuple[str, ...]:
        return tuple(name for name, signal in self.signals.items() if signal.kind is Kind.RESIDUAL)

    @property
    def entrances(self) -> Mapping[str, str]:
        """Paths of the modules that read a residual stream, in order, each with the stream's name."""
        return {s.module: name for name in self.streams for s in self.signals[name].seen if s.side == "input"}

    @property
    def streams_read(self) -> Mapping[str, str]:
        """Module paths of the norms that read a residual stream, each with the stream's name, in order."""
        linears = {name for name, tensor in self.tensors.items() if len(tensor.shape) == 2}
        return {path: name for path, name in self.entrances.items() if f"{path}.weight" not in linears}

    @property
    def reads_stream_itself(self) -> bool:
        """Whether some linears read a residual stream directly, without a norm."""
        return len(self.entrances) > len(self.streams_read)

    @property
    def norms(self) -> tuple[str, ...]:
        """Module paths of the norms that read a residual stream, in order."""
        return tuple(self.streams_read)

    def eps_of(self, norm: str) -> float:
        return self.eps_in_memory.get(norm, self.eps)

    @property
    def feed_forwards(self) -> tuple[FeedForward, ...]:
        return tuple(
            each for part in self.topology if isinstance(part, FeedForward | Experts) for each in feed_forwards_of(part)
        )

    @property
    def gates(self) -> frozenset[str]:
        """Module paths of gates: linears whose activation multiplies another linear's output."""
        return frozenset(part.gate for part in self.feed_forwards if part.gate)

    @property
    def eps(self) -> float:
        values = {key: config_value(self.family, self.config, key) for key in self.family.eps_keys}
        eps = {positive(key, value, "a small positive number such as 1e-06") for key, value in values.items()}
        if len(eps) > 1:
            raise UserError(
                f"config.json: {' and '.join(map(repr, self.family.eps_keys))} differ, but one power of two scales"
                " the eps of all norms; such a checkpoint is not supported"
            )
        return next(iter(eps), self.family.eps)

    @property
    def fixed_eps(self) -> float | None:
        """The norms' eps if rescaling cannot change it; None if eps is scaled with the stream."""
        return self.eps if self.family.eps_key is None else self.held_eps

    def table(self, ends: StackEnds) -> str:
        return ends.table or self.family.embedding

    @property
    def shares_table(self) -> bool:
        return len({self.table(stack.ends) for stack in self.stacks()}) == 1


@dataclass(frozen=True)
class Reader:
    """A sublayer or final norm that reads the residual stream."""

    norm: str  # path of the norm that reads it, "" if linears do
    entrance: str  # path of this norm or of one of the linears
    site: str  # the site of the stream there
    sublayer: Sublayer | None  # None for a final norm
    stack: ResolvedStack
    is_first: bool  # whether no sublayer has added to the stream yet


def walk(layout: Layout) -> Iterator[Reader]:
    """Yield the sublayers and final norms that read the residual stream, in order of execution, the encoder's first."""
    for stack in layout.stacks():
        first = site = layout.stream(stack.ends)
        for sublayer in stack.sublayers:
            yield Reader(sublayer.norm, sublayer.entrance, site, sublayer, stack, site == first)
            site = (isinstance(sublayer, FeedForward) and sublayer.scaled) or sublayer.add
        yield Reader(stack.ends.norm, stack.ends.norm, site, None, stack, site == first)


def norms_inside(sublayer: Sublayer | None) -> list[str]:
    if sublayer is None:
        return []
    norms = [sublayer.post_norm]
    if isinstance(sublayer, Attention):
        norms += [sublayer.block_norm, sublayer.query_norm, sublayer.key_norm, sublayer.value_norm]
    return [norm for norm in norms if norm]
