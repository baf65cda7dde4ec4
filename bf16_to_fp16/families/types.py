"""The vocabulary in which a model family is declared, and its resolution against one checkpoint.

The idea that makes every coupling one line of data: a *signal* is something that flows between weights (the residual
stream, one attention's values, the output of one norm), and it may carry a power of two, one for each channel. A
weight that writes a signal is multiplied by the signal's factor along the axis that produces it, a weight that reads
it is divided along the axis that consumes it. So each axis of a tensor says ``+signal``, ``-signal`` or nothing, and
the exponent of an element is the sum over its axes. Queries and keys meet in a product that must not move, so queries
write ``+query_key`` and keys ``-query_key``.

A family is a list of such records. Nothing here or in the family files computes on weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch

from ..errors import UserError


class Kind(StrEnum):
    """What a signal is, which decides how its exponent may be chosen."""

    RESIDUAL = "residual"
    """The residual stream: one exponent for the whole model, since stock configs have one norm eps."""
    NORM = "norm"
    """Output of one norm, per channel."""
    VALUE = "value"
    """Values of one attention, per channel; convex weights carry them unchanged to the output projection."""
    QUERY_KEY = "query_key"
    """Queries (+) and keys (−) of one attention, per channel."""
    NEURON = "neuron"
    """Feed-forward neurons behind a homogeneous function (ReLU, or the linear branch of a gate), per channel."""
    FIXED = "fixed"
    """A signal that no coupling can move: gate pre-activations, the encoder's output, logits."""


RESIDUAL = "residual"
"""Name of the one residual signal."""


@dataclass(frozen=True)
class Signal:
    """A signal and the places where it can be observed.

    ``seen``: entries ``+path:output`` or ``-path:input``: the module, which side of it, and the sign with which the
    signal's exponent appears there.
    """

    name: str
    kind: Kind
    size: str
    seen: tuple[str, ...]


@dataclass(frozen=True)
class Tensor:
    """One parameter: its name, the named sizes of its axes, and for each axis the signal whose exponent it carries.

    ``absent``: why it may be missing from a file, or "" where it must be there. ``generate``: makes its unscaled
    values from its shape where stock code would.
    """

    name: str
    shape: tuple[str, ...]
    axes: tuple[str, ...]
    absent: str = ""
    generate: Callable[[int, int], torch.Tensor] | None = None


@dataclass(frozen=True)
class Attention:
    """How the modules of an attention sublayer are wired, for the bounds on what flows between them.

    ``at``: the module that forms the scores. ``norm``, ``query``, ``key``, ``value``, ``output``: module paths.
    ``memory``: keys and values read the encoder's output. ``bias``: tensor of the position bias, "" where there is
    none. ``heads``: config key of their number. ``scaled``: scores are multiplied by head_dim^-1/2 after the
    product. ``add``: the site where the output joins the residual stream. ``dropout``: the module that
    only training switches on, for the output, "" where it is a function.
    """

    at: str
    norm: str
    query: str
    key: str
    value: str
    output: str
    memory: bool
    bias: str
    heads: str
    scaled: bool
    add: str
    dropout: str = ""


@dataclass(frozen=True)
class FeedForward:
    """How the modules of a feed-forward sublayer are wired.

    ``at``: the module that forms the product. ``gate``: path of the linear whose activation multiplies ``linear``'s
    output, "" for a plain sublayer, whose ``linear`` is activated itself. ``activation``: its name in the config;
    ``act``: the module that applies it. ``add`` as in ``Attention``; ``dropouts``: of the neurons, of the output.
    """

    at: str
    norm: str
    gate: str
    linear: str
    output: str
    activation: str
    act: str
    add: str
    dropouts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ends:
    """Where a stack begins and ends.

    ``at``: the stack. ``embedding``: module path. ``positions``: tensor added to the embedding, "" where there is
    none. ``scale``: config key of the switch that multiplies the embedding by √d, "" for never. ``norm``: the final
    one. ``dropouts``: after the embedding, after the final norm.
    """

    at: str
    embedding: str
    positions: str
    scale: str
    norm: str
    dropouts: tuple[str, ...] = ()


Wiring = Attention | FeedForward | Ends


@dataclass(frozen=True)
class Part:
    """Signals and tensors that belong together: a sublayer, an embedding, a head.

    Signals of the same name in several parts are one signal; their ``seen`` entries add up. ``wiring`` says how
    the modules are connected, None for a head.
    """

    signals: tuple[Signal, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    wiring: Wiring | None = None


@dataclass(frozen=True)
class Stack:
    """A column of blocks: as many as the config's ``layers`` says, the parts of block i given by ``block(config,
    i)``."""

    layers: str
    block: Callable[[Mapping[str, object], int], Sequence[Part]]


@dataclass(frozen=True)
class Family:
    """What a model family is made of; pure data, and everything the rest of the package knows about it."""

    name: str
    title: str
    model_type: str
    seq2seq: tuple[str, ...]
    encoder_only: tuple[str, ...]
    sizes: Mapping[str, str]
    """Named sizes as products of config keys: ``num_heads*d_kv``."""
    defaults: Mapping[str, object]
    """What the stock config class takes where a key is absent; a value ``=key`` copies another key."""
    encoder: Stack
    decoder: Stack
    encoder_ends: Part
    """Embedding and final norm of an encoder."""
    decoder_ends: Part
    """What a decoder adds to that, apart from its final norm and head."""
    tied_head: Part
    untied_head: Part
    embedding: str
    head: str
    copies: tuple[str, ...]
    """Names under which stock files may repeat the embedding."""
    ignorable: tuple[str, ...]
    """Tensors that stock classes drop without a word."""
    eps_key: str | None
    """Config key of the norms' eps, None where stock code has it fixed."""
    eps: float
    """The eps that stock code uses where the config does not say."""
    centred_norm: bool
    """True for LayerNorm (mean subtracted), False for RMSNorm."""
    norm_site: str
    """Name of the operation that gives a norm's output, as the audit names it in fp16."""
    dropout: Mapping[str, str]
    """Config keys of the dropout rates: of the residual "stream" and what joins it, of "attention" weights, of
    "neurons"."""
    untie: str
    """How an embedding used as head can be separated: "copy", "scaled" (the d^-1/2 before the head folded in), or
    "" (never)."""


class TensorInfo(Protocol):
    """What the families need to know of a stored tensor."""

    @property
    def dtype(self) -> str:
        """Return the dtype in safetensors' spelling: BF16, F32."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape."""


class TensorSource(Protocol):
    """Where tensors come from: a checkpoint on disk, or a model in memory."""

    @property
    def source(self) -> str:
        """Return what to call it in messages."""

    @property
    def config(self) -> Mapping[str, object]:
        """Return its config."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return its tensors by name."""

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor."""

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of a tensor."""


@dataclass(frozen=True)
class ResolvedTensor:
    """A tensor of one checkpoint: the source tensor it is made from (None: generated), its shape, and each axis'
    (sign, signal).

    ``gain``: a factor on top of the exponents, other than 1 only for a head separated with its d^-1/2 folded in.
    """

    name: str
    source: str | None
    shape: tuple[int, ...]
    axes: tuple[tuple[int, str] | None, ...]
    generate: Callable[[int, int], torch.Tensor] | None = None
    gain: float = 1.0


@dataclass(frozen=True)
class Sighting:
    """One place where a signal is observed: module path, "input" or "output", and the sign of its exponent there."""

    sign: int
    module: str
    side: str


@dataclass(frozen=True)
class ResolvedSignal:
    """A signal of one checkpoint with its number of channels."""

    name: str
    kind: Kind
    size: int
    seen: tuple[Sighting, ...]


@dataclass(frozen=True)
class Layout:
    """A family resolved against one checkpoint: every tensor classified, every signal with its channels.

    ``tied``: True where the embedding serves as head, False for a head of its own, None without a decoder.
    ``dropped``: source tensors that are not carried over, with the reason. ``head_scale``: what the stock class
    multiplies the decoder's output with before the head.
    """

    family: Family
    config: Mapping[str, object]
    encoder_only: bool
    tied: bool | None
    tensors: Mapping[str, ResolvedTensor]
    signals: Mapping[str, ResolvedSignal]
    dropped: Mapping[str, str]
    head_scale: float
    wiring: tuple[Wiring, ...] = ()
    """Encoder ends, its sublayers in order, then the same of the decoder."""

    @property
    def norms(self) -> tuple[str, ...]:
        """Module paths of the norms that read the residual stream, in order."""
        return tuple(s.module for s in self.signals[RESIDUAL].seen if s.side == "input")

    @property
    def eps(self) -> float:
        """The norms' eps as the stock class uses it.

        Raises UserError where the config's is not a positive number.
        """
        key = self.family.eps_key
        if key is None:
            return self.family.eps
        found = self.config.get(key, self.family.eps)
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 < found < math.inf:
            raise UserError(f"config.json: {key!r} is {found!r}, not a small positive number such as 1e-06")
        return float(found)


def value(family: Family, config: Mapping[str, object], key: str) -> object:
    """Return the config's value for ``key``, or what the stock class takes in its place."""
    found = config.get(key)
    if found is None:
        found = family.defaults.get(key)
        if isinstance(found, str) and found.startswith("="):
            return value(family, config, found[1:])
    if found is None:
        raise UserError(f"config.json has no {key!r}, which {family.title} needs; take it from the original checkpoint")
    return found


def size(family: Family, config: Mapping[str, object], name: str) -> int:
    """Return the number of elements along the axis called ``name``."""
    product = 1
    for factor in family.sizes[name].split("*"):
        number = int(factor) if factor.isdigit() else value(family, config, factor)
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise UserError(f"config.json: {factor!r} is {number!r}, not a size; take it from the original checkpoint")
        product *= number
    return product
