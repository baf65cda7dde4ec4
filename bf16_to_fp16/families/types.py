"""The vocabulary in which a model family is declared, as pure data: nothing here computes on weights.

A *signal* flows between weights: the residual stream, one attention's values, the output of one norm. It may carry a
power of two, one for each channel. A weight that writes a signal is multiplied by its factor along the axis that
produces it; a weight that reads the signal is divided along the axis that consumes it. Queries and keys meet in a
product that must not move, so queries are multiplied and keys divided. An element's exponent is the sum over its axes,
each of which is ``multiplied_by(signal)``, ``divided_by(signal)`` or None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


class Kind(StrEnum):
    """The kind of a signal, which decides how its exponent may be chosen."""

    RESIDUAL = "residual"
    """A residual stream: one exponent for all stacks that share an embedding or the config's eps, else one for each."""
    NORM = "norm"  # output of one norm, per channel
    VALUE = "value"  # values of one attention, per channel; convex weights carry them on unchanged
    QUERY_KEY = "query_key"  # queries (+) and keys (−) of one attention, per channel
    NEURON = "neuron"  # neurons behind a homogeneous function (ReLU, a gate's linear branch), per channel
    ASYMPTOTIC = "asymptotic"
    """Input of a function that is homogeneous or constant for large |x|, per channel: pre-activations of a gate,
    queries. A power of two there costs little where all inputs are large, and much elsewhere."""
    LOGITS = "logits"
    """Input of a softmax over choices, with a price as ``ASYMPTOTIC``: one exponent where the embedding serves as head,
    since the norm in front carries it, else one for each choice."""
    COLUMNS = "columns"
    """The share of queries, or of a gate's pre-activations, that comes from each channel of their input: a power of two
    there changes nothing for inputs that lack the channel."""
    BEFORE_NORM = "before_norm"
    """Output of a linear that a norm alone reads: one exponent besides the stream's. The norm takes it out again but
    for its eps, so that gradients there need not grow as the stream shrinks."""
    FIXED = "fixed"  # a signal that no power of two can move: states that users read

    @property
    def has_price(self) -> bool:
        """Whether an exponent of such a signal changes the function, so that no exact plan has one."""
        return self in (Kind.ASYMPTOTIC, Kind.LOGITS, Kind.COLUMNS)

    @property
    def may_be_one_number(self) -> bool:
        """Whether axes of any length can carry such a signal, which then has one exponent."""
        return self in (Kind.RESIDUAL, Kind.LOGITS, Kind.BEFORE_NORM)


ROOT = "model"  # the model itself in names of sites
RESIDUAL = "residual"  # name of the residual signal, or the encoder's where each stack has one
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
    ``others``: further signals that these elements carry, or that others of the axis's elements carry, where several
    linears stand in one matrix."""

    sign: Sign
    signal: str
    spread: Spread = ()
    others: tuple[Axis, ...] = ()

    def beside(self, *others: Axis) -> Axis:
        """Return this axis with further signals, carried by some or all of its elements."""
        return replace(self, others=others)


def carried_by(axis: Axis | None) -> tuple[Axis, ...]:
    """Return an axis signal by signal; () for None."""
    return () if axis is None else (replace(axis, others=()), *axis.others)


def multiplied_by(signal: str, spread: Spread = ()) -> Axis:
    """Return an axis that a signal's factor multiplies: where a weight writes the signal."""
    return Axis(1, signal, spread)


def divided_by(signal: str, spread: Spread = ()) -> Axis:
    """Return an axis that a signal's factor divides: where a weight reads the signal, or cancels its factor (keys)."""
    return Axis(-1, signal, spread)


@dataclass(frozen=True)
class ObservationPoint:
    """A site where a signal is observed: the sign of its exponent there, the module's path, the module's side, and how
    the elements seen there share channels."""

    sign: Sign
    module: str
    side: Side
    spread: Spread = ()


def output_of(module: str, sign: Sign = 1, spread: Spread = ()) -> ObservationPoint:
    """Return a module's output as a point where a signal's exponent is observed with this sign."""
    return ObservationPoint(sign, module, "output", spread)


def input_of(module: str, spread: Spread = ()) -> ObservationPoint:
    """Return a module's input as a point where a signal's exponent is observed."""
    return ObservationPoint(1, module, "input", spread)


def columns_of(signal: str) -> str:
    """Return the name of the ``COLUMNS`` signal of a signal with a price."""
    return f"{signal}.columns"


def made_by(columns: str) -> str:
    """Return the name of the signal that has these columns."""
    return columns.removesuffix(columns_of(""))


def before(norm: str) -> str:
    """Return the name of the ``BEFORE_NORM`` signal of the norm at a path."""
    return f"{norm}.input"


@dataclass(frozen=True)
class Signal:
    """A signal. ``size``: the named size of its channels, or with ``spread`` of an axis whose elements share them so.
    ``seen``: the sites where it can be observed. ``beside``: sites of another signal whose factor it joins."""

    name: str
    kind: Kind
    size: str
    seen: tuple[ObservationPoint, ...]
    spread: Spread = ()
    beside: tuple[ObservationPoint, ...] = ()


@dataclass(frozen=True)
class Tensor:
    """One parameter: its name, the named sizes of its axes, and the signal whose exponent each axis carries, or None.

    ``absent``: why it may be missing from a file, or "" where it must be there. ``generate``: makes its unscaled values
    from its shape where stock code would. ``offset``: added to it by stock code, in fp32, before anything else;
    exponents are of the sum, and the file holds the sum less the offset, rounded. ``ahead``: rows of a table of
    positions before the first position's. ``in_fp32``: whether stock code keeps it in fp32 and chooses by it, so that
    it is not rounded.
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
    """Rotary positions: each pair of channels of a query or key is turned by an angle. at: the module of the cosines
    and sines. factor: their largest multiplier, at least 1. interleaved: pairs are channels 2i and 2i + 1, else i and i
    + head_dim/2. runs: the number of equal runs of a head, each paired by itself or not turned at all. growth: (g, n)
    multiplies queries at position p by 1 + g·ln(1 + ⌊p/n⌋)."""

    at: str
    factor: float = 1.0
    interleaved: bool = False
    runs: int = 1
    growth: tuple[float, float] | None = None


@dataclass(frozen=True)
class Attention:
    """The connections of an attention sublayer's modules, for the bounds on the values between them. Names without
    another remark are module paths or, with a colon, sites as audits name them; "" is for none."""

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
    dropout: str = ""  # the dropout module of the output, "" where it is a function
    post_norm: str = ""  # the norm between the output projection and the stream
    query_norm: str = ""  # the norm of each head of queries, as wide as a head
    key_norm: str = ""
    norms_by_position: bool = False  # whether these norms read [rows, positions, heads, channels]
    norms_whole: bool = False  # whether these norms are over all heads together, as wide as the projection
    rotary: Rotary | None = None
    kv_heads: str = ""  # config key of the number of heads of keys and values, "" where it is ``heads``
    scale: str = ""  # config key of a number whose power of -1/2 multiplies ``scaled`` scores, "" for head_dim
    cap: str = ""  # config key of the c of a soft cap c·tanh(x/c) on scaled scores, before the mask; null for none
    radius: str = ""
    """Config key of how far a position sees, "" for no limit. With one, sequences are cut into blocks of radius + 1
    positions that see themselves and their two neighbours. The stock class masks with −1e10, which is −inf in fp16."""
    block: str = ""
    """Config key of the number of positions in each sum that makes further keys and values, "" for no sums. A remainder
    at the end joins the last sum."""
    block_norm: str = ""  # the norm of the sums
    block_bias: str = ""  # tensor of their position bias
    divides: bool = False  # whether scores are divided by √head_dim instead, by a module without SDPA
    weights_dropout: str = ""  # the dropout module of the attention weights, "" for a function
    attributes: StockAttributes | None = None  # of its module, where they are not the family's
    fused: tuple[int, ...] = ()  # numbers of rows of queries, keys and values in the matrix of one module

    @property
    def entrance(self) -> str:
        """The module that reads the stream; without a norm, one of the linears."""
        return self.norm or self.query

    @property
    def scaling(self) -> tuple[str, ...]:
        """The sites at which scores are multiplied by a number, or queries and keys by its root. Rotary positions take
        four products before, and growing queries one more."""
        if self.divides:
            return (f"{self.at}:div",)
        first = 1 if self.rotary is None else 6 if self.rotary.growth else 5
        return tuple(f"{self.at}:mul#{count}".removesuffix("#1") for count in (first, first + 1))

    @property
    def capping(self) -> str:
        """The site at which eager attention multiplies a soft cap's tanh by c, after scaling the scores."""
        return self.scaling[1]

    @property
    def joining(self) -> str:
        """The site at which bias and mask join the scores."""
        return f"{self.at}:add#3" if self.rotary else f"{self.at}:add"


@dataclass(frozen=True)
class FeedForward:
    """The connections of a feed-forward sublayer's modules. ``at``: the module that forms the product. ``gate``: path
    of the linear whose activation multiplies ``linear``'s output, "" for a plain sublayer, whose ``linear`` is
    activated itself. ``activation``: its name in the config; ``act``: the module that applies it. ``norm``, ``add``,
    ``post_norm`` as in ``Attention``; ``dropouts``: of the neurons, of the output. ``fused``: numbers of rows of gate
    and ``linear``, where one module computes both."""

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
        return self.norm or self.linear


@dataclass(frozen=True)
class Experts:
    """The connections of a sublayer with several feed-forwards, of which each token takes some.

    ``at``: the module that hands tokens out and gathers their outputs, 0 for a token that no expert takes. ``norm``,
    ``add``, ``post_norm`` as in ``Attention``. ``router``: the module that chooses by its scores. ``classifier``: the
    linear whose outputs are the logits of that choice. ``noise``: config key of the largest distance from 1 of a random
    factor on the norm's output in training, for the router alone or for the experts too; "" for none. ``experts``:
    plain or gated feed-forwards that read the norm's output. ``dropouts``: of the output.

    ``chosen``: config key of the number of experts that take a token. "" means one or none, chosen by the largest
    probability in fp32; the router then returns the choice, [rows, positions, experts], and its probability. With a key
    it returns its logits, the weights of the outputs, and their experts' numbers, [tokens, experts of a token].
    ``sigmoid``: whether scores are sigmoids of the logits, and not a softmax. ``normalised``: config key of whether a
    token's weights are divided by their sum, "" for always. ``scaling``: config key of a number that multiplies them,
    "" for none. ``correction``: tensor that is added to the scores for the choice alone. ``shared``: a feed-forward
    that also takes every token, with a weight of 1; ``sum``: the site where it joins the others.
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
        """Its feed-forwards, the shared one last."""
        return self.experts if self.shared is None else (*self.experts, self.shared)

    @property
    def entrance(self) -> str:
        return self.norm


@dataclass(frozen=True)
class StackEnds:
    """The beginning and the end of a stack.

    ``at``: the stack. ``embedding``: module path. ``positions``: tensor added to the embedding, "" for none. ``scale``:
    config key of the switch that multiplies the embedding by √d, "" for none. ``norm``: the final one. ``dropouts``:
    after the embedding, after the final norm. ``scales_itself``: the embedding's own module multiplies by √d; with
    ``scale`` "" it always does, by √d rounded to the dtype of its weight. ``scales``: the stack multiplies by √d,
    rounded likewise, also what is passed in place of the embedding. ``table``: tensor of the embedding, "" for the
    family's.

    ``first_norm``: the norm of the embedding and its positions, whose output begins the residual stream, "" for none.
    Its input carries no factor, so its eps stays: the family must have no ``eps_key``.
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
        """The site of the embedding with everything added to it."""
        if self.positions:
            return f"{self.at}:add"
        return self.scaling if self.scales_itself or self.scales else f"{self.embedding}:embedding"


@dataclass(frozen=True)
class HeadLinear:
    """A linear of a head. ``at``: its module path. ``weight``, ``bias``: tensors; the embedding where it serves as
    head, "" for no bias. ``tanh``: the site of the tanh behind it, "" for none."""

    at: str
    weight: str
    bias: str = ""
    tanh: str = ""


@dataclass(frozen=True)
class Head:
    """The reader of the last norm's output: linears, one after another. ``at``: the module that computes them.
    ``dropout``: the dropout module before each of the linears, "" for none. ``cap``: config key of a soft cap on the
    logits, as in ``Attention``, which the model itself applies."""

    at: str
    linears: tuple[HeadLinear, ...]
    dropout: str = ""
    cap: str = ""


MOST_MEAN = 1024.0  # largest mean magnitude of another model's outputs for which a LayerNorm's output is bounded


@dataclass(frozen=True)
class Projector:
    """The part that brings another model's outputs into the stream: a norm, and linears behind it.

    ``at``: the module that computes both. ``pool``: the site that averages several outputs into each input of the norm,
    "" for none. ``add``: the site where they replace embeddings, or join the stream. ``norm``: module path, with an eps
    of its own. ``layer_norm_eps``: of a LayerNorm, None for an RMSNorm. A LayerNorm may lose the variation beside a
    large mean, so that bounds hold for outputs of up to ``MOST_MEAN`` in the mean. ``joined``: number of the norm's
    outputs that the first linear reads at once; ``by_channel``: with one channel's values side by side. ``shares_eps``:
    whether the norm has the text model's eps, which scales with the stream's exponent, so that its output drifts.
    ``weight``: tensor of the only linear, [inputs, outputs], "" where there are several: ``merging``, "" for none, then
    those of ``feed_forward`` with the activation between them. ``tower``: the other model's module, of which nothing is
    known: its tensors are carried over as they are, and no bound covers its inside. ``behind``: the site of the
    stream's sum to which these outputs are added, "" where they replace embeddings. ``image``: the inputs of the tower.
    ``gives``: the field of the stock class's output with the brought values, "" for none.
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
    """The inputs by which a stock class takes an image. Fields without another remark are config keys.

    ``token``: of the id that the outputs replace. ``channels``: of an image. ``size``: of its height and width in
    pixels; "" where the model takes any size, and the audit's image has two merged patches each way. ``tokens``: of the
    number of such ids for one image, "" for four. ``patch``: of a patch's height and width in pixels. ``merged``: of
    the number of patches that make a token, in height and in width. ``frames``: of the number of times that each pixel
    is given; "" for whole images. ``marks``: the argument that is 1 at these ids, "" for none. ``sizes``: the argument
    with an image's size: for whole images in pixels, else as the numbers of frames and of patches in height and width.
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
    """Signals and tensors that belong together: a sublayer, an embedding, a head. Signals of the same name in several
    parts are one signal, with all their ``seen`` entries. ``topology``: the connections of the modules, None where
    there are none: states that users read."""

    signals: tuple[Signal, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    topology: Topology | None = None


@dataclass(frozen=True)
class StockClass:
    """A class of transformers that loads a family's checkpoints.

    ``names``: the one to load with, then older ones. ``decodes``: whether it has a decoder. ``takes_decoder_ids``:
    whether it must be given the decoder's ids; else it makes them from the encoder's. ``end``: the reader of the last
    norm's output; None for a language-modelling head, whose tensors say whether it is the embedding. ``gives``: the
    fields of its output. ``body``: the module that holds the stacks, "" for the model itself. ``reads_end_token``:
    whether its head reads only the last end token of a row. ``auto``: the Auto class that loads it, "" for the usual
    one.
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
    """A column of blocks. ``layers``: config key of their number. ``block(config, i)``: the parts of block i."""

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
    ``scaled``: multiplied by the family's factor, see ``Initialisation``."""

    over: tuple[str, ...] = ()
    scaled: bool = True


@dataclass(frozen=True)
class Initialisation:
    """How the stock class draws its weights; biases begin at 0. ``factor``: config key of the number that multiplies
    deviations, ``default`` where the config has none. ``modules``: deviations by the last part of a module's name, or
    by a pattern for its whole name; the first that fits counts. None for weights that are not drawn."""

    factor: str
    default: float
    modules: Mapping[str, Deviation | None]


DropoutKind = Literal["stream", "branch", "attention", "neurons", "head"]
"""Where a dropout acts: the stream and its summands, these alone, attention weights, neurons, a classifier's input."""


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
    """Attributes of the stock class's modules with numbers that the bounds depend on; "" where the class has none.
    ``heads``, ``head_size``: of an attention; ``groups``: the number of query heads for each head of keys and values.
    ``embedding_scale``: the factor on the embedding, of a stack or of an embedding that scales itself."""

    head_size: str
    heads: str = ""
    embedding_scale: str = ""
    groups: str = ""


OLDER_ROTARY = {"": ("rope_theta", "rope_scaling")}  # where all layers have the same rotary positions


@dataclass(frozen=True)
class StoredExperts:
    """The names of experts in files, where stock code gathers all experts in two tensors: each has its own linears.
    ``inside``: the module around them in files, "" where stock code has the same name. ``at``: the module that gathers
    them. ``gates``, ``outputs``: its tensors, of gates and neurons [experts, 2 · neurons, width] and of outputs
    [experts, width, neurons]."""

    gate: str = "gate_proj"
    linear: str = "up_proj"
    output: str = "down_proj"
    inside: str = ""
    at: str = "experts"
    gates: str = "gate_up_proj"
    outputs: str = "down_proj"


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family, with all that the package knows of this family alone; pure data."""

    name: str
    title: str
    model_type: str
    classes: tuple[StockClass, ...]  # the classes of transformers that are supported
    sizes: Mapping[str, tuple[str | int, ...]]  # products of config keys and numbers; a table counts as its length
    defaults: Mapping[str, object]  # of the stock config class: a value, ``SameAs`` or ``Quotient``
    encoder: Stack  # the first stack, or a decoder-only model's stack
    decoder: Stack | None = None  # the stack that reads the first one's output, None for a family of one stack
    encoder_ends: Part  # an encoder's beginning and end, without its final norm's output
    encoder_output: Part  # the final norm's output, where a decoder or a user reads it
    decoder_ends: Part | None = None  # a decoder's beginning and end, like ``encoder_ends``
    tied_head: Part  # the final norm and the language-modelling head where the embedding serves as head
    untied_head: Part  # the final norm and a language-modelling head of its own
    embedding: str
    head: str
    copies: tuple[str, ...] = ()  # names under which stock files may repeat the embedding
    ignorable: tuple[str, ...] = ()  # tensors that stock classes drop without a word
    logits_bias: str = ""  # tensor that the stock class adds to the logits, "" for none
    output_scale: OutputScale = OutputScale.NEVER
    output_scale_key: str = ""  # config key that switches the scale before the head, "" where there is none
    kept_in_fp32: tuple[str, ...] = ()  # modules in stock code's ``_keep_in_fp32_modules``
    eps_key: str | None = None  # of the norms' eps, None where fixed; dots in any key lead into nested configs
    eps: float  # the eps that stock code uses where the config does not say
    centred_norm: bool = False  # true for LayerNorm (mean subtracted), False for RMSNorm
    norm_site: str = "mul#2"  # the operation that gives a norm's output, as the audit names it in fp16
    dropout: Mapping[DropoutKind, str]  # config keys of the dropout rates
    free_keys: tuple[str, ...] = ()
    """Config keys that the stock class reads and no bound depends on, such as the rate of layers dropped in training;
    one that ends in ``*`` stands for all keys with that beginning."""
    buckets: tuple[str, str] | None = None
    """Config keys of the number of position buckets and of the last one's distance, or None. Stock code computes
    indices outside the table unless there are at least 4 buckets and the distance is over half their number."""
    attributes: StockAttributes
    initialisation: Initialisation
    untie: Literal["", "copy", "scaled"]
    """How a tied head can be separated: "copy", "scaled" (with the d^-1/2 before the head folded in), or "" (never)."""
    variants: tuple[Mapping[str, object], ...] = ()  # config values with other parts in a block than the defaults
    ties_all_or_nothing: bool = False
    """Whether stock code that does not tie the head ties no other copy either, so that a file must hold each."""
    encoder_refuses_cache: bool = False  # whether stock code raises when a call with ``use_cache`` runs the encoder too
    norm_rounds_once: bool = False  # whether an RMSNorm is rounded only after its gain, and not before it too
    aliases: Mapping[str, str] = field(default_factory=dict)  # config keys of transformers 4.57, with names in 5
    alone: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    """Config keys with only one supported value: that value, and the message for any other."""
    nullable: tuple[str, ...] = ()  # config keys whose null leaves a part out, and does not mean the default
    made_in_fp32: bool = False
    """Whether stock code makes numbers in fp32 that no file holds, such as the frequencies of rotary positions:
    ``from_pretrained(dtype=float16)`` leaves them as they are, ``.half()`` rounds them and changes the function."""
    blind_padding: bool = False
    """Whether padding may see no position under a stack's masks: left of a row under a causal mask, or further from the
    row than a sliding window. Stock masks are finite in fp16, but scores under −16 add up with them to −inf; such a
    position, with all its scores under −16, is NaN under eager attention."""

    older_rotary: Mapping[str, tuple[str, str]] = field(default_factory=lambda: OLDER_ROTARY)
    """By kind of layer, "" for all: keys of base and scaling ("" for none) by which 4.57 makes rotary positions."""
    older_scales_tied: bool = False  # whether transformers 4.57 multiplies by d^-1/2 just where tied
    older_notes: Mapping[str, str] = field(default_factory=dict)
    """Config keys that transformers 4.57 ignores unless null, each with a sentence that says so."""
    eps_copies: tuple[str, ...] = ()  # further config keys that must say the same eps
    tie_keys: tuple[str, ...] = ("tie_word_embeddings",)  # config keys that tie the head, one for each version
    stored_experts: StoredExperts | None = None  # names in files of experts that stock code gathers
    flat: Family | None = None  # the same family for configs with the text model's keys outside
    brings: Callable[[Mapping[str, object]], Sequence[Part]] | None = None
    """Returns, by the config, the parts that bring another model's outputs into the first stack; None for no such."""

    @property
    def projector(self) -> Projector | None:
        """The part that puts another model's outputs in the places of embeddings, or None."""
        parts = self.brings({}) if self.brings is not None else ()
        return next((part.topology for part in parts if isinstance(part.topology, Projector)), None)

    @property
    def eps_keys(self) -> tuple[str, ...]:
        return () if self.eps_key is None else (self.eps_key, *self.eps_copies)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return (self.encoder,) if self.decoder is None else (self.encoder, self.decoder)

    def giving_states(self, *, decodes: bool) -> str | None:
        """Return the name of the stock class, with or without a decoder, that returns only last states; else None."""
        fitting = (each for each in self.classes if each.gives == ("last_hidden_state",) and each.decodes == decodes)
        return next((each.names[0] for each in fitting), None)

    @property
    def ends(self) -> tuple[Part, ...]:
        return (self.encoder_ends,) if self.decoder_ends is None else (self.encoder_ends, self.decoder_ends)


_KEYS = frozenset({"heads", "kv_heads", "scale", "cap", "radius", "block", "noise", "chosen", "normalised", "scaling"})
"""Fields of a topology that are config keys."""

_OF_CONFIG = _KEYS | {"activation", "gives"}  # fields of a topology that are not paths


def renamed_signals(part: Part, name: Callable[[str], str]) -> Part:
    def axis(of: Axis | None) -> Axis | None:
        return of and replace(of, signal=name(of.signal), others=tuple(filter(None, map(axis, of.others))))

    return replace(
        part,
        signals=tuple(replace(signal, name=name(signal.name)) for signal in part.signals),
        tensors=tuple(replace(t, axes=tuple(map(axis, t.axes))) for t in part.tensors),
    )


def inside(part: Part, body: str) -> Part:
    """Return a part with its modules inside the one at ``body``, whose own sites begin with a colon; "" for none."""

    def path(name: str) -> str:
        if name.startswith(":"):
            return f"{body or ROOT}{name}"
        return ".".join(filter(None, (body, name))) if name else name

    def topology(of: Topology) -> Topology:
        new: dict[str, object] = {}
        for each in fields(of):
            value = getattr(of, each.name)
            if each.name == "at":  # the stack itself may be the body
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
    """Return a family of one stack with its config nested under ``part``; keys set afterwards stay unnested."""

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
    """Return a family with its stacks inside the module at ``body``, "" for none. Parts of another model that are
    brought into them stand one module further out, where a model with images has both."""
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
