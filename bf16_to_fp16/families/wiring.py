"""The connections of a model's modules, as pure data: sublayers, the ends of a stack, heads and projectors."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal


@dataclass(frozen=True)
class StockAttributes:
    """Names of stock modules' attributes whose values the bounds need; "" if the class has none. ``heads``,
    ``head_size``: of an attention. ``groups``: the number of query heads per key head. ``embedding_scale``: the factor
    on the embedding, an attribute of the stack or of the embedding."""

    head_size: str
    heads: str = ""
    embedding_scale: str = ""
    groups: str = ""


@dataclass(frozen=True)
class Rotary:
    """Rotary positions: each pair of channels of a query or key is rotated by an angle.

    at: the module of cosines and sines; "" for a layer without rotation, which is bounded as if it had one. factor: the
    largest factor on cosines and sines, at least 1. interleaved: channels 2i and 2i + 1 form a pair; else i and
    i + r/2, where a head has r rotated channels. turned: r, 0 for all channels; the others are not rotated, but form
    pairs too. growth: (g, n) multiplies queries at position p by 1 + g·ln(1 + ⌊p/n⌋)."""

    at: str
    factor: float = 1.0
    interleaved: bool = False
    turned: int = 0
    growth: tuple[float, float] | None = None


@dataclass(frozen=True)
class Attention:
    """The connections of an attention sublayer's modules, for bounds on the values between them. Unless stated
    otherwise, names are module paths or, with a colon, sites as audits name them; "" is for none."""

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
    value_norm: str = ""  # the norm of each head of values, without gains
    norms_by_position: bool = False  # whether these norms read [rows, positions, heads, channels]
    norms_whole: bool = False  # whether these norms are over all heads together, as wide as the projection
    rotary: Rotary | None = None
    kv_heads: str = ""  # config key of the number of heads of keys and values, "" where it is ``heads``
    scale: str = ""  # config key of a number whose power of -1/2 multiplies ``scaled`` scores, "" for head_dim
    cap: str = ""  # config key of the c of a soft cap c·tanh(x/c) on scaled scores, before the mask; null for none
    radius: str = ""
    """Config key of the largest distance of a key from its query, "" for no limit. With one, blocks of radius + 1
    positions attend to themselves and their two neighbours. Stock code masks with −1e10, which is −inf in fp16."""
    block: str = ""
    """Config key of the number of positions in each sum that gives further keys and values, "" for no sums. A remainder
    at the end joins the last sum."""
    block_norm: str = ""  # the norm of the sums
    block_bias: str = ""  # tensor of their position bias
    divides: bool = False  # whether scores are divided by √head_dim instead, by a module without SDPA
    weights_dropout: str = ""  # the dropout module of the attention weights, "" for a function
    attributes: StockAttributes | None = None  # of its module, where they are not the family's
    fused: tuple[int, ...] = ()  # numbers of rows of queries, keys and values in the matrix of one module

    @property
    def entrance(self) -> str:
        """The module that reads the stream: the norm, or without one a linear."""
        return self.norm or self.query

    @property
    def turns(self) -> bool:
        return self.rotary is not None and bool(self.rotary.at)

    @property
    def scaling(self) -> tuple[str, ...]:
        """The sites where the scale multiplies the scores or, as its root, queries and keys. Audits number a module's
        multiplications: four by rotary positions come first, then one by ``Rotary.growth``, if any."""
        if self.divides:
            return (f"{self.at}:div",)
        first = 1 if not self.turns else 6 if self.rotary is not None and self.rotary.growth else 5
        return tuple(f"{self.at}:mul#{count}".removesuffix("#1") for count in (first, first + 1))

    @property
    def joining(self) -> str:
        """The site where position bias and mask are added to the scores."""
        return f"{self.at}:add#3" if self.turns else f"{self.at}:add"


@dataclass(frozen=True)
class FeedForward:
    """The connections of a feed-forward sublayer's modules.

    ``at``: the module that multiplies the activated ``gate`` by ``linear``'s output. ``gate``: path of a linear, "" for
    a sublayer without one, in which the activation acts on ``linear``'s output. ``activation``: the config's name;
    ``act``: the module. ``norm``, ``add``, ``post_norm`` as in ``Attention``. ``dropouts``: modules, first before the
    linear ``output``, then after it. ``fused``: row counts of gate and ``linear`` if one module computes both.
    ``scalar``: tensor of a number that multiplies the stream after this sublayer, "" for none; ``scaled``: the site of
    that product."""

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
    scalar: str = ""
    scaled: str = ""

    @property
    def entrance(self) -> str:
        return self.norm or self.linear


@dataclass(frozen=True)
class Experts:
    """The connections of a sublayer with a router and several feed-forwards (experts), some of which run for each
    token.

    ``at``: the module that sends tokens to experts and gathers the outputs; a token without an expert gets 0. ``norm``,
    ``add``, ``post_norm`` as in ``Attention``. ``router``: the module that chooses experts by its scores.
    ``classifier``: the router's linear, whose outputs are the experts' logits. ``noise``: config key of ε, "" for none;
    training multiplies what the router reads, or the experts too, by random factors from 1 − ε to 1 + ε. ``experts``:
    plain or gated feed-forwards that read the norm's output. ``dropouts``: of the output.

    ``chosen``: config key of the number of experts that take a token. "" means at most one, the most probable in fp32.
    The router then returns a mask of the choices, [rows, positions, experts], and their probabilities. With a key it
    returns logits, then weights and indices of the chosen experts, [tokens, experts of a token]. ``sigmoid``: whether
    scores are sigmoids of the logits, not a softmax. ``normalised``: config key of whether a token's weights are
    divided by their sum, "" for always. ``scaling``: config key of a number that multiplies the weights, "" for none.
    ``correction``: tensor that is added to the scores for the choice alone. ``shared``: a feed-forward that takes every
    token, with a weight of 1; ``sum``: the site where its output is added to the experts'."""

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
        """All feed-forwards of the sublayer, the shared one last."""
        return self.experts if self.shared is None else (*self.experts, self.shared)

    @property
    def entrance(self) -> str:
        return self.norm


@dataclass(frozen=True)
class StackEnds:
    """The beginning and the end of a stack.

    ``at``, ``embedding``: module paths of the stack and of its embedding. ``table``: the embedding's tensor, "" for the
    family's. ``positions``: tensor added to the embedding, "" for none. ``first_norm``: a norm of that sum, whose
    output begins the residual stream, "" for none. This norm's input is not rescaled, so its eps stays: the family must
    have no ``eps_key``. ``norm``: the final norm. ``dropouts``: after the embedding and the final norm.

    ``scaled_by``: what multiplies the embedding: its own module, the stack, or "" for nothing. The factor is the
    family's embedding multiplier if ``multiplier``, else √d. ``switch``: config key that turns √d on; without one √d is
    always on, rounded to the weight's dtype. A stack without a ``switch`` multiplies ``inputs_embeds`` too."""

    at: str
    embedding: str
    norm: str
    positions: str = ""
    dropouts: tuple[str, ...] = ()
    first_norm: str = ""
    scaled_by: Literal["", "module", "stack"] = ""
    switch: str = ""
    multiplier: bool = False
    table: str = ""

    @property
    def rounds_scale(self) -> bool:
        """Whether √d is rounded to the embedding's dtype before it multiplies the embedding."""
        return bool(self.scaled_by) and not self.switch and not self.multiplier

    @property
    def scaling_module(self) -> str:
        return self.embedding if self.scaled_by == "module" else self.at

    @property
    def scaling(self) -> str:
        """The site where stock code multiplies the embedding by √d or another number."""
        return f"{self.scaling_module}:mul"

    @property
    def embedded(self) -> str:
        """The site of the embedding after its scaling and the addition of positions, if any."""
        if self.positions:
            return f"{self.at}:add"
        return self.scaling if self.scaled_by else f"{self.embedding}:embedding"


@dataclass(frozen=True)
class HeadLinear:
    """A linear of a head. ``at``: its module path. ``weight``, ``bias``: tensors; the embedding for a tied head, "" for
    no bias. ``tanh``: the site of the tanh behind it, "" for none."""

    at: str
    weight: str
    bias: str = ""
    tanh: str = ""


@dataclass(frozen=True)
class Head:
    """The linears on the last norm's output, one after another. ``at``: the module that computes these linears.
    ``dropout``: the dropout module before each linear, "" for none. ``cap``: config key of a soft cap on the logits, as
    in ``Attention``; the model itself applies the cap."""

    at: str
    linears: tuple[HeadLinear, ...]
    dropout: str = ""
    cap: str = ""


MOST_MEAN = 1024.0  # largest mean magnitude of another model's outputs for which a LayerNorm's output is bounded


@dataclass(frozen=True)
class Projector:
    """The part that brings another model's outputs into the stream: a norm, then linears.

    ``at``: the module that contains norm and linears. ``pool``: the site that averages the other model's outputs before
    the norm, "" for none. ``add``: the site where the results replace embeddings, or join the stream. ``norm``: module
    path of the norm. ``layer_norm_eps``: the eps of a LayerNorm, None for an RMSNorm. A LayerNorm may lose small
    differences beside a large mean, so its bounds hold only for means of at most ``MOST_MEAN``. ``joined``: how many
    vectors from the norm form one input of the first linear; ``by_channel``: whether they are interleaved by channel.
    ``shares_eps``: whether the norm reads the text model's eps from the config. That eps scales with the stream's
    exponent, so the norm's output changes.

    ``weight``: tensor of a single linear, [inputs, outputs]; "" where the linears are modules: first ``merging``, ""
    for none, then the ``feed_forward``, if any. ``tower``: the other model's module, which is not analysed: its tensors
    are copied unchanged, and no bound covers its inside. ``behind``: the site of the stream to which the results are
    added, "" if they replace embeddings. ``image``: the inputs of the tower. ``gives``: the field with the results in
    the stock class's output, "" for none."""

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
    """How a stock class takes an image: seven config keys, then three arguments ("" for none).

    ``token``: key of the image token's id, for which the image's vectors are put in. ``channels``: key of the number of
    channels, "" for 3. ``size``: key of the image's height and width in pixels; "" where the model takes any size: the
    audit's image is then two tokens high and wide. ``tokens``: key of an image's number of image tokens, "" for four.
    ``patch``: key of a patch's height and width in pixels. ``merged``: key of n, where n × n patches make a token.
    ``frames``: key of the number of equal video frames that an image is made into, "" for none.

    ``marks``: the argument that is 1 at image tokens. ``sizes``: the argument with an image's height and width in
    pixels; with ``frames`` it has three counts of patches, along time, height and width. ``places``: the argument with
    column and row of each patch, where the image is given as patches."""

    token: str
    channels: str
    size: str = ""
    tokens: str = ""
    patch: str = ""
    merged: str = ""
    frames: str = ""
    marks: str = ""
    sizes: str = ""
    places: str = ""


Sublayer = Attention | FeedForward | Experts


def feed_forwards_of(sublayer: Sublayer) -> tuple[FeedForward, ...]:
    """Return the feed-forwards of a sublayer: itself, its experts, or none for an attention."""
    if isinstance(sublayer, Attention):
        return ()
    return sublayer.every if isinstance(sublayer, Experts) else (sublayer,)


def outputs_of(sublayer: Sublayer) -> tuple[str, ...]:
    """Return the module paths of a sublayer's output projections: one, or one for each expert."""
    return tuple(each.output for each in sublayer.every) if isinstance(sublayer, Experts) else (sublayer.output,)


Topology = Sublayer | StackEnds | Head | Projector
