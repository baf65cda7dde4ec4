"""Signals (activations that are rescaled together) and the tensors that rescale them, as pure data.

A *signal* is what flows between weights: the residual stream, one attention's values, the output of one norm. Rescaling
may multiply each of its channels by a power of two, its factor. The factor multiplies weights that write the signal,
along their output axis, and divides weights that read it, along their input axis. Queries are multiplied and keys are
divided by the same factors, so that their products do not change. A weight's element is scaled by 2^(a + b), where a is
the exponent of the element's row and b is the exponent of its column."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


class Kind(StrEnum):
    """The kind of a signal. It decides which powers of two can rescale the signal."""

    RESIDUAL = "residual"
    """A residual stream. Stacks that share an embedding or the config's eps have one exponent, others one each."""
    NORM = "norm"  # output of one norm, per channel
    VALUE = "value"  # values of one attention, per channel; convex weights carry them on unchanged
    QUERY_KEY = "query_key"  # queries (+) and keys (−) of one attention, per channel
    NEURON = "neuron"  # neurons behind a homogeneous function (ReLU, a gate's linear branch), per channel
    ASYMPTOTIC = "asymptotic"
    """Input of a function that is homogeneous or constant for large |x|, per channel: pre-activations of a gate,
    queries. A power of two there changes outputs little where all inputs are large, and much elsewhere."""
    LOGITS = "logits"
    """Input of a softmax over choices; rescaling it changes the function. There is one exponent where the embedding
    serves as head, because the norm before it applies the factor; otherwise each choice has its own."""
    COLUMNS = "columns"
    """What each input channel contributes to queries or to a gate's pre-activations. A power of two there changes
    nothing for inputs in which that channel is 0."""
    BEFORE_NORM = "before_norm"
    """Output of a linear that only a norm reads: one exponent is added to the stream's. The norm removes the factor
    again, apart from its eps, so gradients there need not grow as the stream shrinks."""
    FIXED = "fixed"  # a signal that no power of two can move: states that users read

    @property
    def has_price(self) -> bool:
        """Whether rescaling the signal changes the model's function."""
        return self in (Kind.ASYMPTOTIC, Kind.LOGITS, Kind.COLUMNS)

    @property
    def has_one_exponent(self) -> bool:
        """Whether one exponent can scale all channels. Such an exponent fits tensor axes of any length."""
        return self in (Kind.RESIDUAL, Kind.LOGITS, Kind.BEFORE_NORM)


ROOT = "model"  # the model itself in names of sites
RESIDUAL = "residual"  # name of the residual signal, or the encoder's where each stack has one
LOGITS = "logits"  # name of the signal that a softmax over choices reads

Sign = Literal[1, -1]  # how a signal's exponent is counted: 1 where its factor multiplies, -1 where it divides
Side = Literal["input", "output"]  # side of a module
Spread = tuple[int, ...]
"""How the elements of a tensor's axis share the channels of a signal, as a shape in which the axis can be viewed. Along
its second, fourth, ... dimension the same channels repeat. () means that each element has a channel of its own.

For example, values that several query heads read have (value heads, query heads for each, size of a head). Pairs of
channels that a rotation mixes have (heads, 2, half the size of a head) or, if they are neighbours, (heads, 1, half the
size of a head, 2). A negative number at either end counts elements that are not rescaled: (-n, n) is for n neurons that
follow the n rows of their gates in one matrix."""


@dataclass(frozen=True)
class Axis:
    """A tensor's axis that is multiplied or divided by a signal's power of two."""

    sign: Sign
    signal: str
    spread: Spread = ()
    others: tuple[Axis, ...] = ()  # an ``Axis`` for each further signal that rescales this axis of the tensor

    def with_others(self, *others: Axis) -> Axis:
        """Return a copy with these ``others`` in place of its own: one for each further signal on the tensor's axis."""
        return replace(self, others=others)


def carried_by(axis: Axis | None) -> tuple[Axis, ...]:
    """Return a separate ``Axis`` for each signal that rescales ``axis``; () if ``axis`` is None."""
    return () if axis is None else (replace(axis, others=()), *axis.others)


def multiplied_by(signal: str, spread: Spread = ()) -> Axis:
    """Return an axis along which a weight is multiplied by a signal's power of two."""
    return Axis(1, signal, spread)


def divided_by(signal: str, spread: Spread = ()) -> Axis:
    """Return an axis divided by a signal's power of two, such as the input axis of a weight that reads the signal."""
    return Axis(-1, signal, spread)


@dataclass(frozen=True)
class ObservationPoint:
    """A module's input or output where a signal is observed."""

    sign: Sign  # -1 if the signal's power of two divides what is observed
    module: str
    side: Side
    spread: Spread = ()


def output_of(module: str, sign: Sign = 1, spread: Spread = ()) -> ObservationPoint:
    """Return a signal's observation point at a module's output. sign: −1 if the signal's factor divides the output."""
    return ObservationPoint(sign, module, "output", spread)


def input_of(module: str, spread: Spread = ()) -> ObservationPoint:
    """Return the observation point of a signal at a module's input."""
    return ObservationPoint(1, module, "input", spread)


def columns_of(signal: str) -> str:
    """Return the name of the ``COLUMNS`` signal, which scales a weight's input channels. signal: the name of the
    ``ASYMPTOTIC`` signal, which scales the same weight's output channels."""
    return f"{signal}.columns"


def signal_of_columns(columns: str) -> str:
    """Return the signal name from which ``columns_of`` made ``columns``: the name without the ending ".columns"."""
    return columns.removesuffix(columns_of(""))


def before(norm: str) -> str:
    """Return the name of the signal that the norm at the path ``norm`` reads."""
    return f"{norm}.input"


@dataclass(frozen=True)
class Signal:
    """Activations that are rescaled together."""

    name: str
    kind: Kind
    size: str  # the size of an axis of the signal, a key of ``Family.sizes``
    seen: tuple[ObservationPoint, ...]  # where the signal is observed
    spread: Spread = ()  # how that axis's elements share channels
    added_at: tuple[ObservationPoint, ...] = ()
    """Where a second signal is observed, and this signal's exponent is added to the second signal's exponent."""


@dataclass(frozen=True)
class Tensor:
    """One parameter, and how signals rescale it."""

    name: str
    shape: tuple[str, ...]  # names in ``Family.sizes``
    axes: tuple[Axis | None, ...]  # None for an axis that no signal rescales
    absent: str = ""  # why a file may lack it, "" if it must be there
    generate: Callable[[int, int], torch.Tensor] | None = None  # unscaled values by shape, if stock code computes them
    offset: float = 0.0
    """What transformers adds to it in fp32. Exponents act on the sum; the file holds the sum minus this, rounded."""
    ahead: int = 0  # unused rows before the first position's, in a table of positions
    in_fp32: bool = False  # whether stock code keeps it in fp32, since rounding could change which expert takes a token
