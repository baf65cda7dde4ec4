"""A layout: a family's declaration applied to one checkpoint. It holds the role of each tensor, the connections of the
modules, and the sublayers in the order in which they add to the residual stream."""

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
"""The values of a classifier config's ``problem_type`` for which no softmax is taken of the logits."""


class TensorSource(Protocol):
    """The tensors and the config of a checkpoint on disk or of a model in memory."""

    @property
    def source(self) -> str:
        """The name of the checkpoint or model, for messages."""

    @property
    def config(self) -> Mapping[str, object]: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> torch.Tensor: ...

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return the rows of a tensor from ``start`` up to, but not including, ``stop``."""

    def read_some_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor: ...


TensorReader = Callable[[str], "torch.Tensor"]  # returns a layout's tensor by name, in any floating dtype


@dataclass(frozen=True)
class ResolvedTensor:
    """A tensor that one checkpoint's model needs, with the signals (activations rescaled together) on its axes."""

    name: str
    source: str | None  # its name in the checkpoint, None if it is generated
    shape: tuple[int, ...]
    axes: tuple[Axis | None, ...]  # None for an axis that no signal rescales
    generate: Callable[[int, int], torch.Tensor] | None = None  # makes the values by shape if no file has them
    gain: float = 1.0  # multiplies stored values before rescaling: d^-1/2 in an untied head, instead of ``head_scale``
    offset: float = 0.0  # what transformers adds to the stored values
    ahead: int = 0  # unused rows before the first position's, in a table of positions
    in_fp32: bool = False  # whether it is stored in fp32, as transformers keeps it

    @property
    def carries(self) -> tuple[Axis, ...]:
        return tuple(each for axis in self.axes for each in carried_by(axis))


@dataclass(frozen=True)
class ResolvedSignal:
    name: str
    kind: Kind
    size: int
    seen: tuple[ObservationPoint, ...]
    added_at: tuple[ObservationPoint, ...] = ()


@dataclass(frozen=True)
class ResolvedStack:
    """An encoder or decoder of one checkpoint, with its sublayers in order of execution. A model's only stack has both
    ``is_encoder`` and ``is_last``."""

    is_encoder: bool
    is_last: bool
    ends: StackEnds
    sublayers: tuple[Sublayer, ...]


@dataclass(frozen=True)
class Layout:
    """A family's declaration applied to one checkpoint: its tensors, its signals, and how its modules are connected."""

    family: Family
    config: Mapping[str, object]
    stock: StockClass
    tied: bool | None  # whether the embedding serves as head; None without a language-modelling head
    tensors: Mapping[str, ResolvedTensor]
    signals: Mapping[str, ResolvedSignal]
    dropped: Mapping[str, str]  # the checkpoint's tensors that are not used, each with the reason
    head_scale: float  # stock code's factor on the decoder's output before the head
    topology: tuple[Topology, ...] = ()
    """The encoder's embedding and final norm, then its sublayers in order; the same for a decoder; then the head and
    any projectors of another model's outputs."""
    eps_in_memory: Mapping[str, float] = field(default_factory=dict)
    """The eps of norms by module path, for a rescaled model in memory, since its config can express only one."""
    held_eps: float | None = None  # fixed in the program that runs the converted file; None if that reads the config's

    @property
    def of_other_classes(self) -> dict[str, str]:
        """The tensors that only other transformers classes of the family read, each with the reason for dropping it."""
        return {name: why for name, why in self.dropped.items() if why.startswith(self.stock.names[0])}

    @property
    def only_class(self) -> str | None:
        """The name of the checkpoint's class if the files also hold tensors ``of_other_classes``; None otherwise."""
        return self.stock.names[0] if self.of_other_classes else None

    @property
    def head(self) -> Head | None:
        """The head on the last norm's output; None if the transformers class returns the norm's output itself."""
        return next((part for part in self.topology if isinstance(part, Head)), None)

    @property
    def gives_probabilities(self) -> bool:
        """Whether the outputs are logits of two or more exclusive choices, which a softmax turns into probabilities."""
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
        """Return the c of a soft cap c·tanh(x/c) on an attention's scores or a head's logits, or None."""
        cap = config_value(self.family, self.config, of.cap) if of.cap else None
        return None if cap is None else positive(of.cap, cap, "a positive number")

    def most_keys(self, attention: Attention, length: int) -> int:
        """Return the largest number of keys to which one query attends, in sequences of up to ``length``."""
        if not attention.radius:
            return length
        near = 3 * (number_of(self.family, self.config, attention.radius, "a number of positions", least=0) + 1)
        return near + (length // self.positions_per_sum(attention) if attention.block else 0)

    def positions_per_sum(self, attention: Attention) -> int:
        """Return how many positions LongT5's attention sums into one global key; a remainder joins the last sum."""
        return number_of(self.family, self.config, attention.block, "a number of positions")

    def experts_together(self, experts: Experts) -> tuple[int, float, float]:
        """Return how many experts take a token, the largest routing weight, and the largest sum of a token's routing
        weights. A routing weight is the factor on one expert's output for one token."""
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
        """Return ε, where a router's random factors in training lie from 1 − ε to 1 + ε; 0 without such factors."""
        noise = config_value(self.family, self.config, experts.noise) if experts.noise else 0.0
        return positive(experts.noise, noise, "0 or a positive number", allow_zero=True)

    def embedding_scale(self, ends: StackEnds) -> float:
        """Return the factor by which transformers multiplies the output of a stack's embedding; 1 if it does not."""
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
        """The paths of modules that read a residual stream, each with the stream's name, in declared order."""
        return {s.module: name for name in self.streams for s in self.signals[name].seen if s.side == "input"}

    @property
    def streams_read(self) -> Mapping[str, str]:
        """The paths of norms that read a residual stream, each with the stream's name, in declared order."""
        linears = {name for name, tensor in self.tensors.items() if len(tensor.shape) == 2}
        return {path: name for path, name in self.entrances.items() if f"{path}.weight" not in linears}

    @property
    def reads_stream_itself(self) -> bool:
        """Whether some linears read a residual stream directly, without a norm."""
        return len(self.entrances) > len(self.streams_read)

    @property
    def norms(self) -> tuple[str, ...]:
        """The paths of the norms that read a residual stream, in declared order."""
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
        """The paths of gates: linears whose activated output multiplies another linear's output."""
        return frozenset(part.gate for part in self.feed_forwards if part.gate)

    @property
    def eps(self) -> float:
        values = {key: config_value(self.family, self.config, key) for key in self.family.eps_keys}
        eps = {positive(key, value, "a small positive number such as 1e-06") for key, value in values.items()}
        if len(eps) > 1:
            raise UserError(
                f"config.json: {' and '.join(map(repr, self.family.eps_keys))} differ, but a rescaled checkpoint needs"
                " the same eps in all norms; such a checkpoint is not supported"
            )
        return next(iter(eps), self.family.eps)

    @property
    def fixed_eps(self) -> float | None:
        """The norms' eps if rescaling cannot change it; None if the eps is scaled with the residual stream."""
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
