"""The vocabulary in which a model family is declared, as pure data: nothing here computes on weights.

A *signal* is something that flows between weights (the residual stream, one attention's values, the output of one
norm), and it may carry a power of two, one for each channel. A weight that writes a signal is multiplied by its factor
along the axis that produces it, a weight that reads it divided along the axis that consumes it; queries and keys meet
in a product that must not move, so queries are multiplied and keys divided. An element's exponent is the sum over its
axes, each of which is ``multiplied_by(signal)``, ``divided_by(signal)`` or None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


class Kind(StrEnum):
    """What a signal is, which decides how its exponent may be chosen."""

    RESIDUAL = "residual"
    """A residual stream: one exponent for the whole model where its stacks share an embedding or the config's one eps,
    else one for each stack."""
    NORM = "norm"  # output of one norm, per channel
    VALUE = "value"
    """Values of one attention, per channel; convex weights carry them unchanged to the output projection."""
    QUERY_KEY = "query_key"  # queries (+) and keys (−) of one attention, per channel
    NEURON = "neuron"
    """Feed-forward neurons behind a homogeneous function (ReLU, or the linear branch of a gate), per channel."""
    ASYMPTOTIC = "asymptotic"
    """What a function reads that is homogeneous or constant far out, per channel: pre-activations of a gate, queries. A
    power of two there costs little where all that it reads is far out, and much elsewhere."""
    LOGITS = "logits"
    """The same of what a softmax over choices reads: one exponent where the embedding serves as head, since the norm in
    front carries it, else one for each choice."""
    COLUMNS = "columns"
    """What queries, or pre-activations of a gate, take from each channel of what they read: a power of two there
    changes nothing for inputs that lack the channel."""
    BEFORE_NORM = "before_norm"
    """What a linear gives to a norm alone: one exponent beside the stream's, which the norm takes out again but for
    its eps, so that gradients there need not grow as the stream shrinks."""
    FIXED = "fixed"  # a signal that no power of two can move: states that users read

    @property
    def has_price(self) -> bool:
        """Whether an exponent of such a signal changes the function, so that no exact plan has one."""
        return self in (Kind.ASYMPTOTIC, Kind.LOGITS, Kind.COLUMNS)

    @property
    def may_be_one_number(self) -> bool:
        """Whether axes of any length can carry such a signal, which then has one exponent."""
        return self in (Kind.RESIDUAL, Kind.LOGITS, Kind.BEFORE_NORM)


ROOT = "model"  # what sites call the model itself
RESIDUAL = "residual"  # name of the residual signal, of the encoder's where stacks have one each
LOGITS = "logits"  # name of the signal that a softmax over choices reads
Sign = Literal[1, -1]  # how a signal's exponent is counted: 1 where its factor multiplies, -1 where it divides
Side = Literal["input", "output"]  # side of a module

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
    """The signal whose exponent an axis of a tensor carries, its sign there, and how its elements share channels.

    ``others``: what its elements carry besides, or others of them, where several linears stand in one matrix.
    """

    sign: Sign
    signal: str
    spread: Spread = ()
    others: tuple[Axis, ...] = ()

    def beside(self, *others: Axis) -> Axis:
        """Return an axis whose elements, some or all of them, carry other signals as well."""
        return replace(self, others=others)


def carried_by(axis: Axis | None) -> tuple[Axis, ...]:
    """Return what the elements of an axis carry, signal by signal."""
    return () if axis is None else (replace(axis, others=()), *axis.others)


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


def columns_of(signal: str) -> str:
    """Return the name of what the weight that makes a signal with a price takes from each channel of its input."""
    return f"{signal}.columns"


def made_by(columns: str) -> str:
    """Return the name of the signal that these columns make."""
    return columns.removesuffix(columns_of(""))


def before(norm: str) -> str:
    """Return the name of what the norm at a path reads, where a linear gives it to the norm alone."""
    return f"{norm}.input"


@dataclass(frozen=True)
class Signal:
    """A signal, the named size of its channels, or with ``spread`` that of an axis whose elements share them so, and
    the sites where it can be observed; ``beside``: those where another signal is observed that it joins."""

    name: str
    kind: Kind
    size: str
    seen: tuple[ObservationPoint, ...]
    spread: Spread = ()
    beside: tuple[ObservationPoint, ...] = ()


@dataclass(frozen=True)
class Tensor:
    """One parameter: its name, the named sizes of its axes, and for each axis the signal whose exponent it carries,
    None for none.

    ``absent``: why it may be missing from a file, or "" where it must be there. ``generate``: makes its unscaled
    values from its shape where stock code would. ``offset``: what stock code adds to it, in fp32, before anything else:
    exponents are of the sum, and what is stored is the sum less the offset, rounded. ``ahead``: rows of a table of
    positions before the first one's. ``in_fp32``: whether stock code keeps it in fp32 and chooses by it, so that it is
    not rounded.
    """

    name: str
    shape: tuple[str, ...]
    axes: tuple[Axis | None, ...]
    absent: str = ""
    generate: Callable[[int, int], torch.Tensor] | None = None
    offset: float = 0.0
    ahead: int = 0
    in_fp32: bool = False


@dataclass(frozen=True)
class Rotary:
    """Rotary positions: each pair of channels of a query or key is turned by an angle.

    at: the module of the cosines and sines. factor: the largest multiplier of these, at least 1. interleaved: pairs are
    channels 2i and 2i + 1, else i and i + head_dim/2. runs: a head consists of so many runs, each paired by itself or
    not turned at all. growth: (g, n) multiplies queries at position p with 1 + g·ln(1 + ⌊p/n⌋).
    """

    at: str
    factor: float = 1.0
    interleaved: bool = False
    runs: int = 1
    growth: tuple[float, float] | None = None


@dataclass(frozen=True)
class Attention:
    """How the modules of an attention sublayer are connected, for the bounds on what flows between them.

    Names without another remark are module paths or, with a colon, sites as audits name them; "" is for none.
    """

    at: str  # the module that forms the scores
    norm: str  # "" where its linears read the stream itself
    query: str
    key: str
    value: str
    output: str
    _: KW_ONLY
    heads: str  # config key of their number
    add: str  # the site where the output joins the residual stream
    memory: bool = False  # whether keys and values read the encoder's output
    bias: str = ""  # tensor of the position bias
    scaled: bool = True  # whether scores are multiplied by head_dim^-1/2 after the product
    dropout: str = ""  # the module that only training switches on, for the output, "" where it is a function
    post_norm: str = ""  # the norm between the output projection and the stream
    query_norm: str = ""  # the norm of each head of queries, as wide as a head
    key_norm: str = ""
    norms_by_position: bool = False
    """Whether these norms read positions before heads, [rows, positions, heads, channels]."""
    norms_whole: bool = False  # whether they are of all heads together, as wide as the projection
    rotary: Rotary | None = None
    kv_heads: str = ""  # config key of the number of heads of keys and values, "" where it is ``heads``
    scale: str = ""
    """Config key of what scores are multiplied with to the power of -1/2 where they are ``scaled``, "" for head_dim."""
    cap: str = ""
    """Config key of the c of a soft cap, which makes c·tanh(x/c) of the scaled scores before the mask joins them; there
    is none where its value is null."""
    radius: str = ""
    """Config key of how far a position sees, "" for without an end. With one, sequences are cut into blocks of radius +
    1 positions, each of which sees its own and its two neighbours, and the stock class masks with −1e10, which is −inf
    in fp16."""
    block: str = ""
    """Config key of the number of positions of which sums are made, for further keys and values; what is left over at
    the end joins the last sum."""
    block_norm: str = ""  # the norm through which the sums go
    block_bias: str = ""  # tensor of their position bias
    divides: bool = False
    """Whether scores are divided by the root of head_dim instead, by a module that knows of no SDPA."""
    weights_dropout: str = ""
    """The module that only training switches on, for the attention weights, "" where it is a function."""
    attributes: StockAttributes | None = None  # of its module, where they are not the family's
    fused: tuple[int, ...] = ()
    """How many rows of one matrix are of queries, keys and values, in this order, where these three are one module."""

    @property
    def entrance(self) -> str:
        """The module that reads the stream, one of them where it has no norm."""
        return self.norm or self.query

    @property
    def scaling(self) -> tuple[str, ...]:
        """The sites at which scores are multiplied by a number, or queries and keys by its root; rotary positions take
        four products before, and queries that grow one more."""
        if self.divides:
            return (f"{self.at}:div",)
        first = 1 if self.rotary is None else 6 if self.rotary.growth else 5
        return tuple(f"{self.at}:mul#{count}".removesuffix("#1") for count in (first, first + 1))

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
    ``act``: the module that applies it. ``norm``, ``add``, ``post_norm`` as in ``Attention``; ``dropouts``: of the
    neurons, of the output. ``fused``: how many rows of one matrix are of gate and ``linear``, where these two are one
    module.
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
    fused: tuple[int, ...] = ()

    @property
    def entrance(self) -> str:
        """As in ``Attention``."""
        return self.norm or self.linear


@dataclass(frozen=True)
class Experts:
    """How the modules of a sublayer are connected that has several feed-forwards, of which each token takes some.

    ``at``: the module that hands tokens out and gathers what comes back, 0 for a token that no expert takes. ``norm``,
    ``add``, ``post_norm`` as in ``Attention``. ``router``: the module that chooses by its scores. ``classifier``: the
    linear whose outputs are the logits of that choice. ``noise``: config key of how far from 1 the factor may be by
    which the stock class multiplies the norm's output in training, for the router alone or for the experts too, "" for
    never. ``experts``: plain feed-forwards, or gated ones, that read the norm's output. ``dropouts``: of the output.

    ``chosen``: config key of how many experts take a token; "" where it is one, or none, by the largest probability in
    fp32, and the router gives which, [rows, positions, experts], and its probability. With a key it gives its logits,
    the weights of the outputs and the numbers of their experts, [tokens, experts of a token]. ``sigmoid``: whether
    scores are sigmoids of the logits, and not a softmax. ``normalised``: config key of whether a token's weights are
    divided by their sum, "" for always. ``scaling``: config key of what they are multiplied with, "" for nothing.
    ``correction``: tensor that is added to the scores for the choice alone. ``shared``: a feed-forward that takes every
    token as well, with a weight of 1; ``sum``: the site where it joins the others.
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
    chosen: str = ""
    sigmoid: bool = False
    normalised: str = ""
    scaling: str = ""
    correction: str = ""
    shared: FeedForward | None = None
    sum: str = ""

    @property
    def every(self) -> tuple[FeedForward, ...]:
        """All its feed-forwards, the shared one last."""
        return self.experts if self.shared is None else (*self.experts, self.shared)

    @property
    def entrance(self) -> str:
        """As in ``Attention``."""
        return self.norm


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
    norm: str
    positions: str = ""
    scale: str = ""
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


MOST_MEAN = 1024.0
"""Largest mean magnitude of another model's outputs for which what a LayerNorm makes of them is bounded."""


@dataclass(frozen=True)
class Projector:
    """What brings the outputs of another model into the stream: a norm, and linears behind it.

    ``at``: the module that computes both. ``pool``: the site that averages several outputs into each that the norm
    reads, "" for none. ``add``: the site where they take the places of embeddings, or join the stream. ``norm``: module
    path, of an eps of its own. ``layer_norm_eps``: of a LayerNorm, None for an RMSNorm; it may lose what varies beside
    a large mean, so that bounds hold for outputs of up to ``MOST_MEAN`` in the mean. ``joined``: how many of the norm's
    outputs the first linear reads at once; ``by_channel``: one channel's side by side. ``shares_eps``: whether the norm
    has the text model's eps, which goes with the stream's exponent, so that what it gives drifts. ``weight``: tensor of
    the only linear, [inputs, outputs], "" where there are several: ``merging``, "" for none, then those of
    ``feed_forward`` with the activation between them. ``tower``: the module that is the other model, of which nothing
    is known: its tensors are carried over as they are, and no bound is about what flows in it. ``behind``: the site of
    the stream's sum to which these outputs are added, "" where they take the places of embeddings. ``image``: what
    makes one of the inputs of this kind. ``gives``: the field of the stock class's output that has what is brought, ""
    for none.
    """

    at: str
    add: str
    norm: str
    tower: str
    image: ImageInput
    pool: str = ""
    layer_norm_eps: float | None = None
    joined: int = 1
    by_channel: bool = False
    shares_eps: bool = False
    weight: str = ""
    merging: str = ""
    feed_forward: FeedForward | None = None
    behind: str = ""
    gives: str = ""


@dataclass(frozen=True)
class ImageInput:
    """What a stock class takes for an image, in keys of its config.

    ``token``: of the id in whose places the outputs stand. ``channels``: of an image. ``size``: of its height and width
    in pixels, "" where a model takes any, and here two merged patches each way. ``tokens``: of how many ids there are
    for one, "" for four. ``patch``, ``merged``, ``frames``: of a patch's height and width, of how many patches make a
    token each way, and of how many times each pixel is given; "" for whole images. ``marks``: the argument that is 1 at
    those ids, "" for none. ``sizes``: the argument that says the size, of whole images in pixels, else as number of
    frames and of patches each way.
    """

    token: str
    channels: str
    size: str = ""
    tokens: str = ""
    patch: str = ""
    merged: str = ""
    frames: str = ""
    marks: str = ""
    sizes: str = ""


Sublayer = Attention | FeedForward | Experts


def feed_forwards_of(sublayer: Sublayer) -> tuple[FeedForward, ...]:
    """Return the feed-forwards of a sublayer: itself, each expert, or none of an attention."""
    if isinstance(sublayer, Attention):
        return ()
    return sublayer.every if isinstance(sublayer, Experts) else (sublayer,)


def outputs_of(sublayer: Sublayer) -> tuple[str, ...]:
    """Return the module paths of a sublayer's output projections: one, or one for each expert."""
    return tuple(each.output for each in sublayer.every) if isinstance(sublayer, Experts) else (sublayer.output,)


Topology = Sublayer | StackEnds | Head | Projector


@dataclass(frozen=True)
class Part:
    """Signals and tensors that belong together: a sublayer, an embedding, a head.

    Signals of the same name in several parts are one signal; their ``seen`` entries add up. ``topology`` says how
    the modules are connected, None where nothing is: states that users read.
    """

    signals: tuple[Signal, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    topology: Topology | None = None


@dataclass(frozen=True)
class StockClass:
    """A class of transformers that a family's checkpoints are made for.

    ``names``: the one to load with first, then older ones. ``decodes``: whether it has a decoder.
    ``takes_decoder_ids``: whether it must be given the decoder's ids; what it makes itself are the encoder's. ``end``:
    what reads the last norm's output, None for a language-modelling head, of which the tensors say whether it is the
    embedding. ``gives``: the fields of its output. ``body``: the module that holds the stacks, "" for the model itself.
    ``reads_end_token``: whether its head reads the last end token of a row and nothing else. ``auto``: the Auto class
    that loads it, "" for the one of its kind.
    """

    names: tuple[str, ...]
    decodes: bool = False
    takes_decoder_ids: bool = False
    end: Part | None = None
    gives: tuple[str, ...] = ("logits",)
    body: str = ""
    reads_end_token: bool = False
    auto: str = ""

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
    CONFIG = "config"  # when the config says so: by ``output_scale_key``, in its absence by the tie flag


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

    ``factor``: config key of the number that multiplies deviations, ``default`` where the config has none. ``modules``:
    by the last part of a module's name, or by all of it, which may have wildcards, of which the first that fits counts;
    None for what is not drawn.
    """

    factor: str
    default: float
    modules: Mapping[str, Deviation | None]


DropoutKind = Literal["stream", "branch", "attention", "neurons", "head"]
"""What a dropout is applied to: the residual stream and what joins it, or what joins it alone, attention weights,
neurons, what a classifier reads."""


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

    head_size: str
    heads: str = ""
    embedding_scale: str = ""
    groups: str = ""


OLDER_ROTARY = {"": ("rope_theta", "rope_scaling")}  # the keys of a config whose layers all turn positions alike


@dataclass(frozen=True)
class StoredExperts:
    """How files hold experts that stock code gathers in two tensors: each by itself, as linears of these names.

    ``inside``: what files call the module around them, "" where that is stock code's name. ``at``: the module that
    gathers them. ``gates``, ``outputs``: its tensors, of gates and neurons [experts, 2 · neurons, width] and of outputs
    [experts, width, neurons].
    """

    gate: str = "gate_proj"
    linear: str = "up_proj"
    output: str = "down_proj"
    inside: str = ""
    at: str = "experts"
    gates: str = "gate_up_proj"
    outputs: str = "down_proj"


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a model family is made of, and all that the package knows of one family and not of another; pure data."""

    name: str
    title: str
    model_type: str
    classes: tuple[StockClass, ...]  # the classes of transformers that are supported
    sizes: Mapping[str, tuple[str | int, ...]]
    """Named sizes, each the product of these config keys and numbers, 1 for none; a table counts as its length."""
    defaults: Mapping[str, object]
    """What the stock config class takes where a key is absent, a value, ``SameAs`` another key or a ``Quotient`` of
    two."""
    encoder: Stack  # the first stack, and of a family without a decoder the only one, whatever its mask is
    decoder: Stack | None = None  # the stack that reads the first one's output, None for a family of one stack
    encoder_ends: Part  # where an encoder begins and ends, apart from its final norm's output
    encoder_output: Part  # what the encoder's final norm gives where a decoder, or a user, reads it
    decoder_ends: Part | None = None
    """Where a decoder begins and ends, apart from its final norm's output; None with ``decoder``."""
    tied_head: Part  # the final norm and the language-modelling head where the embedding serves as head
    untied_head: Part  # the final norm and a language-modelling head of its own
    embedding: str
    head: str
    copies: tuple[str, ...] = ()  # names under which stock files may repeat the embedding
    ignorable: tuple[str, ...] = ()  # tensors that stock classes drop without a word
    logits_bias: str = ""  # tensor that the stock class adds to the logits, "" for none
    output_scale: OutputScale = OutputScale.NEVER
    output_scale_key: str = ""  # config key that switches the scale before the head, "" where there is none
    kept_in_fp32: tuple[str, ...] = ()
    """Modules that the stock class leaves in fp32 when it loads a model in fp16, as ``_keep_in_fp32_modules`` names
    them."""
    eps_key: str | None = None
    """Config key of the norms' eps, None where stock code has it fixed. A key with dots is one of a config inside the
    config, wherever a family names keys."""
    eps: float  # the eps that stock code uses where the config does not say
    centred_norm: bool = False  # true for LayerNorm (mean subtracted), False for RMSNorm
    norm_site: str = "mul#2"
    """Name of the operation that gives a norm's output, as the audit names it in fp16."""
    dropout: Mapping[DropoutKind, str]  # config keys of the dropout rates
    free_keys: tuple[str, ...] = ()
    """Config keys that the stock class reads and no bound depends on, such as the rate of layers dropped in
    training; with ``*`` at the end all that begin so."""
    buckets: tuple[str, str] | None = None
    """Config keys of a table of position buckets and of the distance that its last one stands for, None without. Stock
    code computes indices outside the table unless there are 4 buckets and the distance is more than half of them."""
    attributes: StockAttributes
    initialisation: Initialisation
    untie: Literal["", "copy", "scaled"]
    """How an embedding used as head can be separated: "copy", "scaled" (the d^-1/2 before the head folded in), or
    "" (never)."""
    variants: tuple[Mapping[str, object], ...] = ()  # config values that give a block other parts than the defaults do
    ties_all_or_nothing: bool = False
    """Whether stock code whose head is no embedding ties no other copy of the embedding either, so that a file must
    hold each."""
    encoder_refuses_cache: bool = False
    """Whether stock code raises where ``use_cache`` is asked for in a call that runs the encoder too."""
    norm_rounds_once: bool = False  # whether an RMSNorm is rounded after its gain alone, and not before it as well
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Config keys that transformers 4.57 reads and 5 writes under another name: that name."""
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

    older_rotary: Mapping[str, tuple[str, str]] = field(default_factory=lambda: OLDER_ROTARY)
    """By kind of layer, "" for all: the config keys of the base and of the scaling, "" for none, that transformers 4.57
    reads in place of ``rope_parameters``."""
    older_scales_tied: bool = False
    """Whether transformers 4.57 multiplies the decoder's output by d^-1/2 where the tie flag is true and only there."""
    older_notes: Mapping[str, str] = field(default_factory=dict)
    """Config keys whose value transformers 4.57 does not obey unless it is null, each with a sentence that says so."""
    eps_copies: tuple[str, ...] = ()  # further config keys that must say the same eps
    tie_keys: tuple[str, ...] = ("tie_word_embeddings",)
    """Config keys of whether the embedding serves as head: every version of stock code goes by one of them."""
    stored_experts: StoredExperts | None = None
    """How files hold experts that stock code gathers, None where it has them as files do."""
    flat: Family | None = None
    """The same family where a config holds the keys of its text model itself and not inside, None for no such."""
    brings: Callable[[Mapping[str, object]], Sequence[Part]] | None = None
    """What brings another model's outputs into the first stack, by the config, None where nothing does."""

    @property
    def projector(self) -> Projector | None:
        """What puts another model's outputs in the places of embeddings, None where nothing does."""
        parts = self.brings({}) if self.brings is not None else ()
        return next((part.topology for part in parts if isinstance(part.topology, Projector)), None)

    @property
    def eps_keys(self) -> tuple[str, ...]:
        """All config keys of the norms' eps."""
        return () if self.eps_key is None else (self.eps_key, *self.eps_copies)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """Its stacks, in the order in which they run."""
        return (self.encoder,) if self.decoder is None else (self.encoder, self.decoder)

    def giving_states(self, *, decodes: bool) -> str | None:
        """Return the name of the stock class that gives last states and has a decoder or not, None without one."""
        fitting = (each for each in self.classes if each.gives == ("last_hidden_state",) and each.decodes == decodes)
        return next((each.names[0] for each in fitting), None)

    @property
    def ends(self) -> tuple[Part, ...]:
        """Where they begin and end."""
        return (self.encoder_ends,) if self.decoder_ends is None else (self.encoder_ends, self.decoder_ends)


_KEYS = frozenset({"heads", "kv_heads", "scale", "cap", "radius", "block", "noise", "chosen", "normalised", "scaling"})
"""Fields of a topology that are keys of the config."""

_OF_CONFIG = _KEYS | {"activation", "gives"}  # fields of a topology that are no paths


def renamed_signals(part: Part, name: Callable[[str], str]) -> Part:
    """Return a part whose signals have other names."""

    def axis(of: Axis | None) -> Axis | None:
        return of and replace(of, signal=name(of.signal), others=tuple(filter(None, map(axis, of.others))))

    return replace(
        part,
        signals=tuple(replace(signal, name=name(signal.name)) for signal in part.signals),
        tensors=tuple(replace(t, axes=tuple(map(axis, t.axes))) for t in part.tensors),
    )


def inside(part: Part, body: str) -> Part:
    """Return a part whose modules stand inside the one at ``body``, "" for the model itself; sites of that one begin
    with a colon."""

    def path(name: str) -> str:
        if name.startswith(":"):
            return f"{body or ROOT}{name}"
        return ".".join(filter(None, (body, name))) if name else name

    def topology(of: Topology) -> Topology:
        new: dict[str, object] = {}
        for each in fields(of):
            value = getattr(of, each.name)
            if each.name == "at":  # a stack may be the whole body
                new[each.name] = path(value) or body
            elif isinstance(value, str) and each.name not in _OF_CONFIG:
                new[each.name] = path(value)
            elif each.name == "dropouts":
                new[each.name] = tuple(map(path, value))
            elif each.name == "experts":
                new[each.name] = tuple(map(topology, value))
            elif isinstance(value, Rotary):
                new[each.name] = replace(value, at=path(value.at))
            elif isinstance(value, FeedForward):
                new[each.name] = topology(value)
        return replace(of, **new)  # type: ignore[arg-type]

    def moved(points: Iterable[ObservationPoint]) -> tuple[ObservationPoint, ...]:
        return tuple(replace(point, module=path(point.module)) for point in points)

    part = renamed_signals(part, lambda name: name if name == RESIDUAL else path(name))
    return Part(
        tuple(replace(signal, seen=moved(signal.seen), beside=moved(signal.beside)) for signal in part.signals),
        tuple(replace(tensor, name=path(tensor.name)) for tensor in part.tensors),
        None if part.topology is None else topology(part.topology),
    )


def keys_inside(family: Family, part: str) -> Family:
    """Return a family of one stack whose config is the one called ``part`` inside a config; what follows is still its
    own."""

    def key(name: str) -> str:
        return f"{part}.{name}" if name else name

    def keys(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(map(key, names))

    def default(value: object) -> object:
        if isinstance(value, SameAs):
            return SameAs(key(value.key))
        return Quotient(key(value.over), key(value.under)) if isinstance(value, Quotient) else value

    def moved(of: Part) -> Part:
        if (topology := of.topology) is None:
            return of
        names = [f.name for f in fields(topology) if f.name in _KEYS]
        keyed = replace(topology, **{n: key(getattr(topology, n)) for n in names})  # type: ignore[arg-type]
        return replace(of, topology=keyed)

    def block(config: Mapping[str, object], i: int) -> list[Part]:
        inner, dotted = config.get(part), {n: value for n, value in config.items() if n.startswith(f"{part}.")}
        own = dict(inner) if isinstance(inner, Mapping) else {}
        own |= {name.removeprefix(f"{part}."): value for name, value in dotted.items()}
        return [moved(each) for each in family.encoder.block(own, i)]

    return replace(
        family,
        sizes={name: tuple(f if isinstance(f, int) else key(f) for f in of) for name, of in family.sizes.items()},
        defaults={key(name): default(value) for name, value in family.defaults.items()},
        encoder=Stack(key(family.encoder.layers), block),
        encoder_ends=moved(family.encoder_ends),
        tied_head=moved(family.tied_head),
        untied_head=moved(family.untied_head),
        eps_key=family.eps_key and key(family.eps_key),
        dropout={kind: key(name) for kind, name in family.dropout.items()},
        free_keys=keys(family.free_keys),
        nullable=keys(family.nullable),
        alone={key(name): of for name, of in family.alone.items()},
        initialisation=replace(family.initialisation, factor=key(family.initialisation.factor)),
        tie_keys=keys(family.tie_keys),
    )


def family_inside(family: Family, body: str) -> Family:
    """Return a family whose stacks stand inside the module at ``body``, "" for none; what is brought into them stands
    around that, where a model with images has both."""
    if not body:
        return family
    brings, around = family.brings, body.rpartition(".")[0]

    def stack(of: Stack) -> Stack:
        return replace(of, block=lambda config, i: [inside(part, body) for part in of.block(config, i)])

    return replace(
        family,
        encoder=stack(family.encoder),
        decoder=family.decoder and stack(family.decoder),
        encoder_ends=inside(family.encoder_ends, body),
        encoder_output=inside(family.encoder_output, body),
        decoder_ends=family.decoder_ends and inside(family.decoder_ends, body),
        embedding=f"{body}.{family.embedding}",
        copies=tuple(f"{body}.{name}" for name in family.copies),
        ignorable=tuple(f"{body}.{name}" for name in family.ignorable),
        brings=brings and (lambda config: [inside(part, around) for part in brings(config)]),
    )
