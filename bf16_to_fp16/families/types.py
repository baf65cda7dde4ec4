"""The vocabulary in which a model family is declared, and its resolution against one checkpoint.

The idea that makes every coupling one line of data: a *signal* is something that flows between weights (the residual
stream, one attention's values, the output of one norm), and it may carry a power of two, one for each channel. A
weight that writes a signal is multiplied by the signal's factor along the axis that produces it, a weight that reads
it is divided along the axis that consumes it. So each axis of a tensor is ``multiplied_by(signal)``,
``divided_by(signal)`` or None, and the exponent of an element is the sum over its axes. Queries and keys meet in a
product that must not move, so queries are multiplied by their factor and keys divided by it.

A family is a list of such records. Nothing here or in the family files computes on weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, Protocol

from ..errors import UserError

if TYPE_CHECKING:
    import torch


class Kind(StrEnum):
    """What a signal is, which decides how its exponent may be chosen."""

    RESIDUAL = "residual"
    """A residual stream: one exponent for the whole model where its stacks share an embedding or the config's one eps,
    else one for each stack."""
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
"""Name of the residual signal, of the encoder's where stacks have one each."""


Sign = Literal[1, -1]
"""How a signal's exponent is counted: 1 where its factor multiplies, -1 where it divides."""


Side = Literal["input", "output"]
"""Side of a module."""


Spread = tuple[int, ...]
"""How the elements of an axis share the channels of a signal: factors of the axis, outermost first, of which every
second one only repeats. () where each element has a channel of its own.

Values that several query heads read: (heads of values, query heads for each, size of a head). Pairs of channels that a
rotation turns into one another: (heads, 2, half of a head) or, next to each other, (heads, 1, half of a head, 2). A
negative number at either end stands for so many elements that carry nothing: neurons behind their gates in one matrix,
(-neurons, neurons).
"""


@dataclass(frozen=True)
class Axis:
    """The signal whose exponent an axis of a tensor carries, its sign there, and how its elements share channels."""

    sign: Sign
    signal: str
    spread: Spread = ()


def multiplied_by(signal: str, spread: Spread = ()) -> Axis:
    """Return an axis that a signal's factor multiplies: where a weight writes the signal."""
    return Axis(1, signal, spread)


def divided_by(signal: str, spread: Spread = ()) -> Axis:
    """Return an axis that a signal's factor divides: where a weight reads the signal, or cancels its factor (keys)."""
    return Axis(-1, signal, spread)


@dataclass(frozen=True)
class ObservationPoint:
    """One site where a signal is observed: the sign of its exponent there, the module's path, the side of it, and how
    the elements seen there share channels."""

    sign: Sign
    module: str
    side: Side
    spread: Spread = ()


def output_of(module: str, sign: Sign = 1, spread: Spread = ()) -> ObservationPoint:
    """Return the output of the module at a path, where a signal's exponent is observed with this sign."""
    return ObservationPoint(sign, module, "output", spread)


def input_of(module: str, spread: Spread = ()) -> ObservationPoint:
    """Return the input of the module at a path, where a signal's exponent is observed."""
    return ObservationPoint(1, module, "input", spread)


@dataclass(frozen=True)
class Signal:
    """A signal, the named size of its channels, or with ``spread`` that of an axis whose elements share them so, and
    the sites where it can be observed."""

    name: str
    kind: Kind
    size: str
    seen: tuple[ObservationPoint, ...]
    spread: Spread = ()


@dataclass(frozen=True)
class Tensor:
    """One parameter: its name, the named sizes of its axes, and for each axis the signal whose exponent it carries,
    None for none.

    ``absent``: why it may be missing from a file, or "" where it must be there. ``generate``: makes its unscaled
    values from its shape where stock code would. ``offset``: what stock code adds to it, in fp32, before anything else:
    exponents are of the sum, and what is stored is the sum less the offset, rounded. ``ahead``: rows of a table of
    positions before the first one's.
    """

    name: str
    shape: tuple[str, ...]
    axes: tuple[Axis | None, ...]
    absent: str = ""
    generate: Callable[[int, int], torch.Tensor] | None = None
    offset: float = 0.0
    ahead: int = 0


@dataclass(frozen=True)
class Attention:
    """How the modules of an attention sublayer are connected, for the bounds on what flows between them.

    ``at``: the module that forms the scores. ``norm``, ``query``, ``key``, ``value``, ``output``: module paths.
    ``memory``: keys and values read the encoder's output. ``bias``: tensor of the position bias, "" where there is
    none. ``heads``: config key of their number. ``scaled``: scores are multiplied by head_dim^-1/2 after the
    product. ``add``: the site where the output joins the residual stream. ``dropout``: the module that
    only training switches on, for the output, "" where it is a function.

    ``post_norm``: the norm between the output projection and the stream. ``query_norm``, ``key_norm``: the norms of
    each head of queries and of keys, as wide as a head; ``norms_by_position``: they read positions before heads, [rows,
    positions, heads, channels]. ``rotary``: the module that gives the cosines and sines by
    which both are then turned, channel i with i + head_dim/2 or, ``interleaved``, 2i with 2i + 1; where it turns the
    first channels of a head alone, the others count as if they were. "" where there is none. ``kv_heads``: config key
    of the number of heads of keys and values, "" where it is ``heads``. ``scale``: config key of what scores are
    multiplied with to the power of -1/2 where they are ``scaled``, "" for head_dim. ``cap``: config key of the number c
    of a soft cap, which makes c·tanh(x/c) of the scaled scores before the mask joins them; "" where there is none, as
    where its value is null.
    ``radius``: config key of how far a position sees, "" for without an end. With one, sequences are cut into blocks of
    radius + 1 positions, each of which sees its own and its two neighbours, and the stock class masks with −1e10, which
    is −inf in fp16. ``block``: config key of the number of positions of which sums are made, for further keys and
    values; what is left over at the end joins the last sum. "" for none. ``block_norm``: the norm through which the
    sums go, ``block_bias``: tensor of their position bias.
    ``divides``: scores are divided by the root of head_dim instead, by a module that knows of no SDPA.
    ``weights_dropout``: the module that only training switches on, for the attention weights, "" where it is a
    function. ``attributes``: of its module, where they are not the family's.
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
    post_norm: str = ""
    query_norm: str = ""
    key_norm: str = ""
    rotary: str = ""
    kv_heads: str = ""
    scale: str = ""
    cap: str = ""
    radius: str = ""
    block: str = ""
    block_norm: str = ""
    block_bias: str = ""
    divides: bool = False
    weights_dropout: str = ""
    attributes: StockAttributes | None = None
    interleaved: bool = False
    norms_by_position: bool = False

    @property
    def scaling(self) -> tuple[str, ...]:
        """The sites at which scores are multiplied by a number, or queries and keys by its root; rotary positions take
        four products and two sums before."""
        if self.divides:
            return (f"{self.at}:div",)
        return (f"{self.at}:mul#5", f"{self.at}:mul#6") if self.rotary else (f"{self.at}:mul", f"{self.at}:mul#2")

    @property
    def capping(self) -> str:
        """The site at which eager attention multiplies what a soft cap's tanh gives, after it has scaled the scores."""
        return self.scaling[1]

    @property
    def joining(self) -> str:
        """The site at which bias and mask join the scores."""
        return f"{self.at}:add#3" if self.rotary else f"{self.at}:add"


@dataclass(frozen=True)
class FeedForward:
    """How the modules of a feed-forward sublayer are connected.

    ``at``: the module that forms the product. ``gate``: path of the linear whose activation multiplies ``linear``'s
    output, "" for a plain sublayer, whose ``linear`` is activated itself. ``activation``: its name in the config;
    ``act``: the module that applies it. ``add``, ``post_norm`` as in ``Attention``; ``dropouts``: of the neurons, of
    the output. ``fused``: gate and ``linear`` are one module, of whose rows the first half are the gate's.
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
    post_norm: str = ""
    fused: bool = False


@dataclass(frozen=True)
class Experts:
    """How the modules of a sublayer are connected that has several feed-forwards, of which each token takes one.

    ``at``: the module that hands tokens out and gathers what comes back, 0 for a token that no expert takes. ``norm``,
    ``add``, ``post_norm`` as in ``Attention``. ``router``: the module that chooses, in fp32, by the largest
    probability, and gives which expert takes a token, [rows, positions, experts], and with what probability its output
    is multiplied. ``classifier``: the linear whose outputs are the logits of that choice. ``noise``: config key of how
    far from 1 the factor may be by which the stock class multiplies the norm's output in training, for the router alone
    or for the experts too. ``experts``: plain feed-forwards, or gated ones, that read the norm's output. ``dropouts``:
    of the output.
    """

    at: str
    norm: str
    router: str
    classifier: str
    noise: str
    experts: tuple[FeedForward, ...]
    add: str
    dropouts: tuple[str, ...] = ()
    post_norm: str = ""


@dataclass(frozen=True)
class StackEnds:
    """Where a stack begins and ends.

    ``at``: the stack. ``embedding``: module path. ``positions``: tensor added to the embedding, "" where there is
    none. ``scale``: config key of the switch that multiplies the embedding by √d, "" for never. ``norm``: the final
    one. ``dropouts``: after the embedding, after the final norm. ``scales_itself``: the embedding's own module
    multiplies by √d, where ``scale`` is "" always and by √d rounded to the dtype of its weight; ``scales``: the stack
    does, so rounded, also what is given in place of the embedding. ``table``: tensor of the embedding, "" for the
    family's.

    ``first_norm``: the norm of the embedding with its positions, whose output is what the residual stream begins with,
    "" where there is none. What it reads carries no factor, so that its eps stays: the family must have no ``eps_key``.
    """

    at: str
    embedding: str
    positions: str
    scale: str
    norm: str
    dropouts: tuple[str, ...] = ()
    scales_itself: bool = False
    first_norm: str = ""
    scales: bool = False
    table: str = ""

    @property
    def rounds_scale(self) -> bool:
        """Whether √d is rounded to the dtype of the embedding before it multiplies."""
        return self.scales or (self.scales_itself and not self.scale)

    @property
    def scaling(self) -> str:
        """The site at which stock code multiplies by √d, where it does."""
        return f"{self.embedding if self.scales_itself else self.at}:mul"

    @property
    def embedded(self) -> str:
        """The site that gives the embedding with all that joins it, as the audit names it."""
        if self.positions:
            return f"{self.at}:add"
        return self.scaling if self.scales_itself or self.scales else f"{self.embedding}:embedding"


@dataclass(frozen=True)
class HeadLinear:
    """A linear of a head.

    ``at``: its module path. ``weight``, ``bias``: tensors, the embedding where it serves as head, "" for no bias.
    ``tanh``: the site of the tanh behind it, "" where there is none.
    """

    at: str
    weight: str
    bias: str = ""
    tanh: str = ""


@dataclass(frozen=True)
class Head:
    """What reads the last norm's output: linears, one after another.

    ``at``: the module that computes them. ``dropout``: the module that only training switches on, before each of the
    linears, "" where there is none. ``cap``: as in ``Attention``, of the logits, and by the model itself.
    """

    at: str
    linears: tuple[HeadLinear, ...]
    dropout: str = ""
    cap: str = ""


Sublayer = Attention | FeedForward | Experts


def feed_forwards_of(w: Sublayer) -> tuple[FeedForward, ...]:
    """Return the feed-forwards of a sublayer: itself, each expert, or none of an attention."""
    if isinstance(w, Attention):
        return ()
    return w.experts if isinstance(w, Experts) else (w,)


def outputs_of(w: Sublayer) -> tuple[str, ...]:
    """Return the module paths of a sublayer's output projections: one, or one for each expert."""
    return tuple(each.output for each in w.experts) if isinstance(w, Experts) else (w.output,)


Topology = Sublayer | StackEnds | Head


@dataclass(frozen=True)
class Part:
    """Signals and tensors that belong together: a sublayer, an embedding, a head.

    Signals of the same name in several parts are one signal; their ``seen`` entries add up. ``topology`` says how
    the modules are connected, None where nothing is: states that users read.
    """

    signals: tuple[Signal, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    topology: Topology | None = None


NOT_A_CHOICE = ("regression", "multi_label_classification")
"""What a classifier's config calls a problem whose logits are no choice of one among several."""


@dataclass(frozen=True)
class StockClass:
    """A class of transformers that a family's checkpoints are made for.

    ``names``: the one to load with first, then older ones. ``decodes``: whether it has a decoder.
    ``takes_decoder_ids``: whether it must be given the decoder's ids; what it makes itself are the encoder's. ``end``:
    what reads the last norm's output, None for a language-modelling head, of which the tensors say whether it is the
    embedding. ``gives``: the fields of its output. ``body``: the module that holds the stacks, "" for the model itself.
    ``reads_end_token``: whether its head reads the last end token of a row and nothing else.
    """

    names: tuple[str, ...]
    decodes: bool
    takes_decoder_ids: bool
    end: Part | None
    gives: tuple[str, ...] = ("logits",)
    body: str = ""
    reads_end_token: bool = False

    @property
    def is_language_model(self) -> bool:
        """Whether it predicts the next token, and can generate."""
        return self.end is None


@dataclass(frozen=True)
class Stack:
    """A column of blocks: as many as the config's ``layers`` says, the parts of block i given by ``block(config,
    i)``."""

    layers: str
    block: Callable[[Mapping[str, object], int], Sequence[Part]]


class OutputScale(StrEnum):
    """When the stock class multiplies the decoder's output by d^-1/2 before the head."""

    NEVER = "never"
    ALWAYS = "always"
    CONFIG = "config"
    """When the config says so: by ``output_scale_key``, in its absence by the tie flag."""


@dataclass(frozen=True)
class Deviation:
    """A standard deviation: one over the root of the product of the named sizes ``over``, 1 where there are none.

    ``scaled``: multiplied by the family's factor, see ``Initialisation``.
    """

    over: tuple[str, ...] = ()
    scaled: bool = True


@dataclass(frozen=True)
class Initialisation:
    """How the stock class draws its weights; biases begin at 0.

    ``title``: of the rule. ``factor``: config key of the number that multiplies deviations, ``default`` where the
    config has none. ``modules``: by the last part of a module's name, or by all of it, which may have wildcards, of
    which the first that fits counts; None for what is not drawn. ``shown``: the modules that stand for the rule in a
    list of rules; none where every matrix has the same.
    """

    title: str
    factor: str
    default: float
    modules: Mapping[str, Deviation | None]
    shown: tuple[str, ...] = ()


DropoutKind = Literal["stream", "attention", "neurons", "head"]
"""What a dropout is applied to: the residual stream and what joins it, attention weights, neurons, what a classifier
reads."""


@dataclass(frozen=True)
class SameAs:
    """A default that is the value of another config key."""

    key: str


@dataclass(frozen=True)
class Quotient:
    """A default that is one config key's number divided by another's, rounded down."""

    over: str
    under: str


@dataclass(frozen=True)
class StockAttributes:
    """Under which names modules of the stock class keep what the bounds depend on.

    ``heads``, ``head_size``: of an attention; ``groups``: how many query heads share one of keys and values.
    ``embedding_scale``: of a stack, or of an embedding that scales itself, the factor on it. "" where the class has
    none.
    """

    heads: str
    head_size: str
    embedding_scale: str = ""
    groups: str = ""


@dataclass(frozen=True)
class Family:
    """What a model family is made of, and all that the package knows of one family and not of another; pure data."""

    name: str
    title: str
    model_type: str
    classes: tuple[StockClass, ...]
    """The classes of transformers that are supported."""
    sizes: Mapping[str, tuple[str | int, ...]]
    """Named sizes, each the product of these config keys and numbers, 1 for none; a table counts as its length."""
    defaults: Mapping[str, object]
    """What the stock config class takes where a key is absent, a value, ``SameAs`` another key or a ``Quotient`` of
    two."""
    encoder: Stack
    """The first stack, and of a family without a decoder the only one, whatever its mask is."""
    decoder: Stack | None
    """The stack that reads the first one's output, None for a family of one stack."""
    encoder_ends: Part
    """Where an encoder begins and ends, apart from its final norm's output."""
    encoder_output: Part
    """What the encoder's final norm gives where a decoder, or a user, reads it."""
    decoder_ends: Part | None
    """Where a decoder begins and ends, apart from its final norm's output; None with ``decoder``."""
    tied_head: Part
    """The final norm and the language-modelling head where the embedding serves as head."""
    untied_head: Part
    """The final norm and a language-modelling head of its own."""
    embedding: str
    head: str
    copies: tuple[str, ...]
    """Names under which stock files may repeat the embedding."""
    ignorable: tuple[str, ...]
    """Tensors that stock classes drop without a word."""
    logits_bias: str
    """Tensor that the stock class adds to the logits, "" for none."""
    output_scale: OutputScale
    output_scale_key: str
    """Config key that switches the scale before the head, "" where there is none."""
    kept_in_fp32: tuple[str, ...]
    """Modules that the stock class leaves in fp32 when it loads a model in fp16, as ``_keep_in_fp32_modules`` names
    them."""
    eps_key: str | None
    """Config key of the norms' eps, None where stock code has it fixed. A key with dots is one of a config inside the
    config, wherever a family names keys."""
    eps: float
    """The eps that stock code uses where the config does not say."""
    centred_norm: bool
    """True for LayerNorm (mean subtracted), False for RMSNorm."""
    norm_site: str
    """Name of the operation that gives a norm's output, as the audit names it in fp16."""
    dropout: Mapping[DropoutKind, str]
    """Config keys of the dropout rates."""
    free_keys: tuple[str, ...]
    """Config keys that the stock class reads and no bound depends on, such as the rate of layers dropped in
    training."""
    buckets: tuple[str, str] | None
    """Config keys of a table of position buckets and of the distance that its last one stands for, None without. Stock
    code computes indices outside the table unless there are 4 buckets and the distance is more than half of them."""
    attributes: StockAttributes
    initialisation: Initialisation
    untie: Literal["", "copy", "scaled"]
    """How an embedding used as head can be separated: "copy", "scaled" (the d^-1/2 before the head folded in), or
    "" (never)."""
    variants: tuple[Mapping[str, object], ...] = ()
    """Config values that give a block other parts than the defaults do."""
    ties_all_or_nothing: bool = False
    """Whether stock code whose head is no embedding ties no other copy of the embedding either, so that a file must
    hold each."""
    encoder_refuses_cache: bool = False
    """Whether stock code raises where ``use_cache`` is asked for in a call that runs the encoder too."""
    norm_rounds_once: bool = False
    """Whether an RMSNorm is rounded after its gain alone, and not before it as well."""
    alone: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    """Config keys of which one value is supported and no other: that value, and what is said of any other."""
    nullable: tuple[str, ...] = ()
    """Config keys whose null is a value, which leaves a part out, and not what stock code has a default for."""
    made_in_fp32: bool = False
    """Whether stock code makes numbers in fp32 that no file holds, such as the frequencies of rotary positions:
    ``from_pretrained(dtype=float16)`` leaves them as they are, ``.half()`` rounds them and changes the function."""
    blind_padding: bool = False
    """Whether padding may see no position at all under the masks of a stack: left of a row where they are causal,
    and further from it than a sliding window. Stock masks are finite in fp16, but where all scores of such a position
    are under −16 they add up to −inf, and it is NaN under eager attention."""

    eps_copies: tuple[str, ...] = ()
    """Further config keys that must say the same eps."""

    @property
    def eps_keys(self) -> tuple[str, ...]:
        """All config keys of the norms' eps."""
        return () if self.eps_key is None else (self.eps_key, *self.eps_copies)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """Its stacks, in the order in which they run."""
        return (self.encoder,) if self.decoder is None else (self.encoder, self.decoder)

    @property
    def ends(self) -> tuple[Part, ...]:
        """Where they begin and end."""
        return (self.encoder_ends,) if self.decoder_ends is None else (self.encoder_ends, self.decoder_ends)


class TensorMetadata(Protocol):
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
    def tensors(self) -> Mapping[str, TensorMetadata]:
        """Return its tensors by name."""

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor."""

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of a tensor."""


TensorReader = Callable[[str], "torch.Tensor"]
"""Gives a layout's tensor by name, in any floating dtype."""


@dataclass(frozen=True)
class ResolvedTensor:
    """A tensor of one checkpoint: the source tensor it is made from (None: generated), its shape, and the
    signal that each axis carries.

    ``gain``: a factor on top of the exponents, other than 1 only for a head separated with its d^-1/2 folded in.
    ``offset``, ``ahead`` as in ``Tensor``.
    """

    name: str
    source: str | None
    shape: tuple[int, ...]
    axes: tuple[Axis | None, ...]
    generate: Callable[[int, int], torch.Tensor] | None = None
    gain: float = 1.0
    offset: float = 0.0
    ahead: int = 0


@dataclass(frozen=True)
class ResolvedSignal:
    """A signal of one checkpoint with its number of channels."""

    name: str
    kind: Kind
    size: int
    seen: tuple[ObservationPoint, ...]


@dataclass(frozen=True)
class ResolvedStack:
    """The encoder or the decoder of one checkpoint: its two ends, and its sublayers in the order in which they run.

    ``is_encoder``: whether it is the first, or the only one. ``is_last``: whether its final norm gives what the head,
    or the user, reads.
    """

    is_encoder: bool
    is_last: bool
    ends: StackEnds
    sublayers: tuple[Sublayer, ...]


@dataclass(frozen=True)
class Layout:
    """A family resolved against one checkpoint: every tensor classified, every signal with its channels.

    ``stock``: the class that it is for. ``tied``: True where the embedding serves as head, False for a head of its own,
    None without a language-modelling head.
    ``dropped``: source tensors that are not carried over, with the reason. ``head_scale``: what the stock class
    multiplies the decoder's output with before the head.
    """

    family: Family
    config: Mapping[str, object]
    stock: StockClass
    tied: bool | None
    tensors: Mapping[str, ResolvedTensor]
    signals: Mapping[str, ResolvedSignal]
    dropped: Mapping[str, str]
    head_scale: float
    topology: tuple[Topology, ...] = ()
    """Encoder ends, its sublayers in order, then the same of the decoder, and the head."""
    eps_in_memory: Mapping[str, float] = field(default_factory=dict)
    """Norms of a model in memory whose eps is another than stock code's and no config could say so, with that eps."""

    @property
    def head(self) -> Head | None:
        """What reads the last norm's output; None where users do."""
        return next((w for w in self.topology if isinstance(w, Head)), None)

    @property
    def gives_probabilities(self) -> bool:
        """Whether what it gives are logits of a choice among several."""
        if self.head is None:
            return False
        choices = self.tensors[self.head.linears[-1].weight].shape[0]
        return choices > 1 and self.config.get("problem_type") not in NOT_A_CHOICE

    def stacks(self) -> tuple[ResolvedStack, ...]:
        """Return the encoder and, unless there is none, the decoder."""
        found: list[tuple[StackEnds, list[Sublayer]]] = []
        for topology in self.topology:
            if isinstance(topology, StackEnds):
                found.append((topology, []))
            elif not isinstance(topology, Head):
                found[-1][1].append(topology)
        last = len(found) - 1
        return tuple(
            ResolvedStack(i == 0, i == last, ends, tuple(sublayers)) for i, (ends, sublayers) in enumerate(found)
        )

    def heads(self, attention: Attention) -> int:
        """Return the number of heads of an attention."""
        return number_of(self.family, self.config, attention.heads, "a number of heads")

    def kv_heads(self, attention: Attention) -> int:
        """Return the number of heads of an attention's keys and values."""
        return number_of(self.family, self.config, attention.kv_heads or attention.heads, "a number of heads")

    def score_scale(self, attention: Attention) -> float:
        """Return what an attention multiplies its scores with."""
        if not attention.scaled:
            return 1.0
        if attention.scale:
            return float(number_of(self.family, self.config, attention.scale, "a positive number") ** -0.5)
        return float((self.tensors[f"{attention.query}.weight"].shape[0] // self.heads(attention)) ** -0.5)

    def cap(self, of: Attention | Head) -> float | None:
        """Return the number at which a soft cap keeps an attention's scores, or a head's logits; None without one.

        Raises UserError where the config's is not a positive number.
        """
        found = config_value(self.family, self.config, of.cap) if of.cap else None
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 < found < math.inf:
            raise UserError(
                f"config.json: {of.cap!r} is {found!r}, not a positive number; take it from the original checkpoint"
            )
        return float(found)

    def sees(self, attention: Attention, length: int) -> int:
        """Return how many keys a row of an attention's scores has at most, in sequences of up to ``length``."""
        if not attention.radius:
            return length
        near = 3 * (number_of(self.family, self.config, attention.radius, "a number of positions", least=0) + 1)
        return near + (length // self.summed(attention) if attention.block else 0)

    def summed(self, attention: Attention) -> int:
        """Return of how many positions an attention makes one sum, apart from what is left over at the end."""
        return number_of(self.family, self.config, attention.block, "a number of positions")

    def embedding_scale(self, ends: StackEnds) -> float:
        """Return what stock code multiplies a stack's embedding with: √d, or 1 for nothing."""
        switch = config_value(self.family, self.config, ends.scale) if ends.scale else ends.scales_itself or ends.scales
        return math.sqrt(self.tensors[self.table(ends)].shape[1]) if switch else 1.0

    def stream(self, ends: StackEnds) -> str:
        """Return the site at which a stack's residual stream begins, as the audit names it."""
        return f"{ends.first_norm}:{self.family.norm_site}" if ends.first_norm else ends.embedded

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the residual signals: one, or one for each stack."""
        return tuple(name for name, signal in self.signals.items() if signal.kind is Kind.RESIDUAL)

    @property
    def streams_read(self) -> Mapping[str, str]:
        """Module paths of the norms that read a residual stream, in order, each with the signal's name."""
        return {s.module: name for name in self.streams for s in self.signals[name].seen if s.side == "input"}

    @property
    def norms(self) -> tuple[str, ...]:
        """Module paths of the norms that read what carries a residual exponent, in order: a residual stream, what joins
        it, and sums of a norm's output that carries it on."""
        return tuple(self.streams_read)

    def eps_of(self, norm: str) -> float:
        """Return the eps of the norm at a path."""
        return self.eps_in_memory.get(norm, self.eps)

    @property
    def feed_forwards(self) -> tuple[FeedForward, ...]:
        """Its feed-forwards in order, each expert among them."""
        return tuple(
            each for w in self.topology if isinstance(w, FeedForward | Experts) for each in feed_forwards_of(w)
        )

    @property
    def gates(self) -> frozenset[str]:
        """Module paths of the linears whose activation multiplies another's output."""
        return frozenset(w.gate for w in self.feed_forwards if w.gate)

    @property
    def eps(self) -> float:
        """The norms' eps as the stock class uses it.

        Raises UserError where the config's is not a positive number.
        """
        said = {self.family.eps}
        for number, key in enumerate(self.family.eps_keys):
            found = looked_up(self.config, key, self.family.eps)
            if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 < found < math.inf:
                raise UserError(f"config.json: {key!r} is {found!r}, not a small positive number such as 1e-06")
            said = {float(found)} if not number else {*said, float(found)}
        if len(said) > 1:
            raise UserError(
                f"config.json: {' and '.join(map(repr, self.family.eps_keys))} differ, and one exponent of the stream"
                " serves all norms; such a checkpoint is not supported"
            )
        return said.pop()

    def table(self, ends: StackEnds) -> str:
        """Return the tensor of a stack's embedding."""
        return ends.table or self.family.embedding

    @property
    def shares_table(self) -> bool:
        """Whether all stacks begin with one embedding."""
        return len({self.table(stack.ends) for stack in self.stacks()}) == 1


_NOWHERE = object()


def looked_up(config: Mapping[str, object], key: str, default: object = None) -> object:
    """Return a config's value for a key, which with dots is one of a config inside it; the default for none."""
    found: object = config
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return default
        found = found[part]
    return found


def with_value(config: Mapping[str, object], key: str, value: object) -> dict[str, object]:
    """Return a config with another value for a key, which with dots is one of a config inside it."""
    first, _, rest = key.partition(".")
    inner = config.get(first)
    return {**config, first: with_value(inner if isinstance(inner, Mapping) else {}, rest, value) if rest else value}


def config_value(family: Family, config: Mapping[str, object], key: str) -> object:
    """Return the config's value for ``key``, or what the stock class takes in its place; None for a part left out."""
    found = looked_up(config, key)
    optional = key in family.nullable
    if found is None and not (optional and looked_up(config, key, _NOWHERE) is None):
        found = family.defaults.get(key)
        if isinstance(found, SameAs):
            return config_value(family, config, found.key)
        if isinstance(found, Quotient):
            over, under = (number_of(family, config, part, "a size") for part in (found.over, found.under))
            return over // under
    if found is None and not optional:
        raise UserError(f"config.json has no {key!r}, which {family.title} needs; take it from the original checkpoint")
    return found


def full_config(family: Family, config: Mapping[str, object]) -> dict[str, object]:
    """Return a config with what the stock class takes for every key that it leaves out."""
    defaults = {key: config_value(family, config, key) for key in family.defaults}
    return defaults | {key: value for key, value in config.items() if value is not None}


def number_of(family: Family, config: Mapping[str, object], key: str, what: str, *, least: int = 1) -> int:
    """Return the config's number for ``key``, of a mapping its length; raise UserError unless it is a whole one and at
    least ``least``.

    what: it should be, in words.
    """
    number = config_value(family, config, key)
    return whole_number(key, len(number) if isinstance(number, Mapping) else number, what, least=least)


def whole_number(key: str, number: object, what: str, *, least: int = 1) -> int:
    """Return a config's number for ``key``; raise UserError unless it is a whole one and at least ``least``.

    what: it should be, in words.
    """
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise UserError(f"config.json: {key!r} is {number!r}, not {what}; take it from the original checkpoint")
    return number


def axis_size(family: Family, config: Mapping[str, object], name: str) -> int:
    """Return the number of elements along the axis called ``name``."""
    factors = family.sizes[name]
    return math.prod(of if isinstance(of, int) else number_of(family, config, of, "a size") for of in factors)


_OF_CONFIG = frozenset({"heads", "kv_heads", "activation", "scale", "cap", "radius", "block", "noise"})
"""Fields of a topology that are no paths."""


def inside(part: Part, body: str) -> Part:
    """Return a part whose modules stand inside the one at ``body``."""

    def path(name: str) -> str:
        return f"{body}.{name}" if name else name

    def axis(of: Axis | None) -> Axis | None:
        return of if of is None or of.signal == RESIDUAL else replace(of, signal=path(of.signal))

    def topology(of: Topology) -> Topology:
        moved: dict[str, object] = {}
        for each in fields(of):
            value = getattr(of, each.name)
            if each.name == "at":  # a stack may be the whole body
                moved[each.name] = path(value) or body
            elif isinstance(value, str) and each.name not in _OF_CONFIG:
                moved[each.name] = path(value)
            elif each.name == "dropouts":
                moved[each.name] = tuple(map(path, value))
            elif each.name == "experts":
                moved[each.name] = tuple(map(topology, value))
        return replace(of, **moved)  # type: ignore[arg-type]

    return Part(
        tuple(
            replace(
                signal,
                name=signal.name if signal.name == RESIDUAL else path(signal.name),
                seen=tuple(replace(point, module=path(point.module)) for point in signal.seen),
            )
            for signal in part.signals
        ),
        tuple(replace(t, name=path(t.name), axes=tuple(axis(each) for each in t.axes)) for t in part.tensors),
        None if part.topology is None else topology(part.topology),
    )


def family_inside(family: Family, body: str) -> Family:
    """Return a family whose stacks stand inside the module at ``body``, "" for none."""
    if not body:
        return family

    def stack(of: Stack) -> Stack:
        return replace(of, block=lambda config, i: [inside(part, body) for part in of.block(config, i)])

    return replace(
        family,
        encoder=stack(family.encoder),
        decoder=None if family.decoder is None else stack(family.decoder),
        encoder_ends=inside(family.encoder_ends, body),
        encoder_output=inside(family.encoder_output, body),
        decoder_ends=None if family.decoder_ends is None else inside(family.decoder_ends, body),
        embedding=f"{body}.{family.embedding}",
        copies=tuple(f"{body}.{name}" for name in family.copies),
        ignorable=tuple(f"{body}.{name}" for name in family.ignorable),
    )
