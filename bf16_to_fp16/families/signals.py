"""Signals (activations that are rescaled together) and the tensors that rescale them, as pure data.

A *signal* is what flows between weights: the residual stream, one attention's values, the output of one norm. Rescaling
may multiply each of its channels by a power of two, its factor. A weight that writes a signal is multiplied by the
factor along the axis that produces it; a weight that reads the signal is divided along the axis that consumes it. The
product of queries and keys must not change, so queries are multiplied and keys divided. An element's exponent is the
sum over its tensor's axes. Each axis is ``multiplied_by(signal)``, ``divided_by(signal)`` or None."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


class Kind(StrEnum):
    """The kind of a signal, which decides which powers of two may rescale it."""

    RESIDUAL = "residual"
    """A residual stream: one exponent for all stacks that share an embedding or the config's eps, else one for each."""
    NORM = "norm"  # output of one norm, per channel
    VALUE = "value"  # values of one attention, per channel; convex weights carry them on unchanged
    QUERY_KEY = "query_key"  # queries (+) and keys (−) of one attention, per channel
    NEURON = "neuron"  # neurons behind a homogeneous function (ReLU, a gate's linear branch), per channel
    ASYMPTOTIC = "asymptotic"
    """Input of a function that is homogeneous or constant for large |x|, per channel: pre-activations of a gate,
    queries. A power of two there changes outputs little where all inputs are large, and much elsewhere."""
    LOGITS = "logits"
    """Input of a softmax over choices; rescaling it changes the function. One exponent where the embedding serves as
    head, since the norm in front applies it, else one for each choice."""
    COLUMNS = "columns"
    """What each input channel contributes to queries or a gate's pre-activations: a power of two there changes nothing
    for inputs in which the channel is 0."""
    BEFORE_NORM = "before_norm"
    """Output of a linear that only a norm reads: one exponent in addition to the stream's. The norm removes it, except
    for its eps, so that gradients there need not grow as the stream shrinks."""
    FIXED = "fixed"  # a signal that no power of two can move: states that users read

    @property
    def has_price(self) -> bool:
        """Whether rescaling the signal changes the model's function."""
        return self in (Kind.ASYMPTOTIC, Kind.LOGITS, Kind.COLUMNS)

    @property
    def has_one_exponent(self) -> bool:
        """Whether all channels have the same exponent, so that axes of any length fit."""
        return self in (Kind.RESIDUAL, Kind.LOGITS, Kind.BEFORE_NORM)


ROOT = "model"  # the model itself in names of sites
RESIDUAL = "residual"  # name of the residual signal, or the encoder's where each stack has one
LOGITS = "logits"  # name of the signal that a softmax over choices reads

Sign = Literal[1, -1]  # how a signal's exponent is counted: 1 where its factor multiplies, -1 where it divides
Side = Literal["input", "output"]  # side of a module
Spread = tuple[int, ...]
"""How the elements of an axis share the channels of a signal: factors of the axis's length, outermost first, of which
every second one only repeats. () where each element has a channel of its own.

Values that several query heads read: (heads of values, query heads for each, size of a head). Pairs of channels that a
rotation mixes: (heads, 2, half of a head) or, next to each other, (heads, 1, half of a head, 2). A negative number at
either end counts elements that are not rescaled: neurons behind their gates in one matrix, (-neurons, neurons).
"""


@dataclass(frozen=True)
class Axis:
    """A tensor's axis that a signal's power of two multiplies (``sign`` 1) or divides (−1). ``spread``: how the axis's
    elements share the signal's channels. ``others``: further signals on the same elements, or on other elements of the
    axis if several linears share a matrix."""

    sign: Sign
    signal: str
    spread: Spread = ()
    others: tuple[Axis, ...] = ()

    def beside(self, *others: Axis) -> Axis:
        """Return this axis with ``others`` as further signals, on the same or on other elements."""
        return replace(self, others=others)


def carried_by(axis: Axis | None) -> tuple[Axis, ...]:
    """Return an ``Axis`` for each signal that rescales an axis; () for None."""
    return () if axis is None else (replace(axis, others=()), *axis.others)


def multiplied_by(signal: str, spread: Spread = ()) -> Axis:
    """Return an axis multiplied by a signal's power of two: the weight computes the signal."""
    return Axis(1, signal, spread)


def divided_by(signal: str, spread: Spread = ()) -> Axis:
    """Return an axis divided by a signal's power of two: the weight reads the signal or computes keys."""
    return Axis(-1, signal, spread)


@dataclass(frozen=True)
class ObservationPoint:
    """A module's input or output where a signal is observed. ``sign``: −1 if the signal's power of two divides the
    values there. ``spread``: which values share one of the signal's channels, as a ``Spread``; () if none do."""

    sign: Sign
    module: str
    side: Side
    spread: Spread = ()


def output_of(module: str, sign: Sign = 1, spread: Spread = ()) -> ObservationPoint:
    """Return a signal's observation point at a module's output. sign: −1 if the signal divides it."""
    return ObservationPoint(sign, module, "output", spread)


def input_of(module: str, spread: Spread = ()) -> ObservationPoint:
    """Return the observation point of a signal at a module's input."""
    return ObservationPoint(1, module, "input", spread)


def columns_of(signal: str) -> str:
    """Return the name of the signal that scales the columns of the weight of ``signal``, queries or a gate."""
    return f"{signal}.columns"


def signal_of_columns(columns: str) -> str:
    """Return the signal whose ``columns_of`` is ``columns``: queries or a gate."""
    return columns.removesuffix(columns_of(""))


def before(norm: str) -> str:
    """Return the name of the signal that the norm at the path ``norm`` reads."""
    return f"{norm}.input"


@dataclass(frozen=True)
class Signal:
    """Activations that are rescaled together. ``size``: the named size of their channels; with ``spread``, of an axis
    that shares channels. ``seen``: where it is observed. ``beside``: where another signal's exponent is added to its
    own."""

    name: str
    kind: Kind
    size: str
    seen: tuple[ObservationPoint, ...]
    spread: Spread = ()
    beside: tuple[ObservationPoint, ...] = ()


@dataclass(frozen=True)
class Tensor:
    """One parameter: its name, the named sizes of its axes, and how signals rescale each axis (None: not at all).

    ``absent``: why a file may lack it, "" if it must be there. ``generate``: a function from its shape to its unscaled
    values, if stock code computes them. ``offset``: a number that stock code adds to it, in fp32, before use; exponents
    act on the sum, and the file holds the sum minus the offset, rounded. ``ahead``: unused rows before the first
    position in a table of positions. ``in_fp32``: whether stock code keeps it in fp32 for a choice, so that it must not
    be rounded."""

    name: str
    shape: tuple[str, ...]
    axes: tuple[Axis | None, ...]
    absent: str = ""
    generate: Callable[[int, int], torch.Tensor] | None = None
    offset: float = 0.0
    ahead: int = 0
    in_fp32: bool = False
