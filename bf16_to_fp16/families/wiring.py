"""The connections of a model's modules, as pure data: sublayers, the ends of a stack, heads and projectors."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal


@dataclass(frozen=True)
class StockAttributes:
    """The names of the attributes of transformers modules that the bounds read; "" stands for none. They are attributes
    of the attention module unless a comment says otherwise."""

    head_size: str
    heads: str = ""
    embedding_scale: str = ""  # the factor on the embedding, in the stack or the embedding
    groups: str = ""  # the number of query heads per key head


@dataclass(frozen=True)
class Rotary:
    """Rotary positions, which rotate each pair of channels of a query or key by an angle. Channels that are not rotated
    are paired too, and bounded as if they were rotated."""

    at: str  # the module that makes cosines and sines, "" if no channel is rotated
    factor: float = 1.0  # the largest factor by which cosines and sines are multiplied, at least 1
    interleaved: bool = False  # whether channels 2i and 2i + 1 form a pair; else i and i + r/2 of r rotated channels
    turned: int = 0  # r, the number of rotated channels in a head; 0 for all
    growth: tuple[float, float] | None = None  # (g, n) multiplies queries at position p by 1 + g·ln(1 + ⌊p/n⌋)


@dataclass(frozen=True)
class Attention:
    """The modules of an attention sublayer and their connections. A string is a module path or, with a colon, a site,
    unless its comment says otherwise; "" stands for none."""

    at: str  # the module that forms the scores
    norm: str  # reads the residual stream; "" where the linears read it themselves
    query: str
    key: str
    value: str
    output: str
    _: KW_ONLY
    heads: str  # config key of the number of heads
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
    scale: str = ""  # config key of n, where ``scaled`` scores are multiplied by n^-1/2, "" where n is head_dim
    cap: str = ""  # config key of the c of a soft cap c·tanh(x/c) on scaled scores, before the mask; null for none
    radius: str = ""  # config key of the largest distance between a query and a key, "" for no limit
    """With a limit, blocks of radius + 1 positions attend to themselves and their two neighbours. Stock code masks with
    −1e10, which is −inf in fp16."""
    block: str = ""  # config key of how many positions are summed into each further (global) key and value, "" for none
    block_norm: str = ""  # the norm that reads these sums
    block_bias: str = ""  # tensor of the position bias between queries and these sums
    divides: bool = False  # whether scores are divided by √head_dim instead, by a module without SDPA
    weights_dropout: str = ""  # the dropout module of the attention weights, "" for a function
    attributes: StockAttributes | None = None  # of its module, where they are not the family's
    fused: tuple[int, ...] = ()  # numbers of rows of queries, keys and values in the matrix of one module

    @property
    def entrance(self) -> str:
        """The module that reads the residual stream: the norm, or the query linear if there is no norm."""
        return self.norm or self.query

    @property
    def turns(self) -> bool:
        return self.rotary is not None and bool(self.rotary.at)

    @property
    def scaling(self) -> tuple[str, ...]:
        """The sites where attention scores are scaled: at the scores themselves, or at queries and keys."""
        if self.divides:
            return (f"{self.at}:div",)
        # Audits number a module's multiplications. Before these come rotary positions' four, and one by their growth.
        first = 1 if not self.turns else 6 if self.rotary is not None and self.rotary.growth else 5
        return tuple(f"{self.at}:mul#{count}".removesuffix("#1") for count in (first, first + 1))

    @property
    def joining(self) -> str:
        """The site where position bias and mask are added to the scores."""
        return f"{self.at}:add#3" if self.turns else f"{self.at}:add"


@dataclass(frozen=True)
class FeedForward:
    """The modules of a feed-forward sublayer and their connections. A string is a module path, unless its comment says
    otherwise; "" stands for none."""

    at: str  # the module that multiplies the activated ``gate`` by ``linear``'s output
    norm: str  # reads the residual stream; "" where the linears read it themselves
    gate: str  # a linear; "" for none, where the activation acts on ``linear``'s output
    linear: str
    output: str
    activation: str  # its name in the config
    act: str  # its module
    add: str  # the site where the output joins the residual stream
    dropouts: tuple[str, ...] = ()  # first before the linear ``output``, then after it
    post_norm: str = ""  # the norm between ``output`` and the stream
    fused: tuple[int, ...] = ()  # row counts of gate and ``linear`` if one module computes both
    scalar: str = ""  # tensor of a number that multiplies the stream after this sublayer
    scaled: str = ""  # the site of that product

    @property
    def entrance(self) -> str:
        return self.norm or self.linear


@dataclass(frozen=True)
class Experts:
    """A sublayer whose router sends each token to some of several feed-forwards (experts). A string is a module path,
    unless its comment says otherwise; "" stands for none."""

    at: str  # the module that sends tokens to experts and gathers the outputs; a token without an expert gets 0
    norm: str  # reads the residual stream
    router: str  # the module that chooses experts by its scores
    classifier: str  # the router's linear, whose outputs are the logits
    noise: str  # config key of a number ε, "" for none
    """In training, what the router reads, and in some families what the experts read, is multiplied by random factors
    from 1 − ε to 1 + ε."""
    experts: tuple[FeedForward, ...]
    add: str  # the site where the output joins the residual stream
    dropouts: tuple[str, ...] = ()
    post_norm: str = ""  # the norm between the outputs and the stream
    chosen: str = ""  # config key of the number of experts that take a token, "" for at most one
    """With a key, the router returns the logits, and the weights and indices of the chosen experts, each [tokens,
    experts of a token]. Without a key, the expert is the most probable in fp32, and the router returns a mask of the
    choices, [rows, positions, experts], and their probabilities."""
    sigmoid: bool = False  # whether scores are sigmoids of the logits, not a softmax
    normalised: str = ""  # config key of whether a token's weights are divided by their sum, "" for always
    scaling: str = ""  # config key of a factor on the weights, "" for none
    correction: str = ""  # tensor that is added to the scores for the choice alone
    shared: FeedForward | None = None  # a further feed-forward that takes every token, with a weight of 1
    sum: str = ""  # the site where the shared output is added to the experts'

    @property
    def every(self) -> tuple[FeedForward, ...]:
        """All feed-forwards of the sublayer, the shared one last."""
        return self.experts if self.shared is None else (*self.experts, self.shared)

    @property
    def entrance(self) -> str:
        return self.norm


@dataclass(frozen=True)
class StackEnds:
    """The embedding and the final norm of a stack. A string is a module path, unless its comment says otherwise; ""
    stands for none."""

    at: str
    embedding: str
    norm: str  # the final norm
    positions: str = ""  # tensor added to the embedding
    dropouts: tuple[str, ...] = ()  # after the embedding and the final norm
    first_norm: str = ""
    """A norm of the sum of embedding and positions, whose output begins the residual stream. Its input is not rescaled,
    so its eps stays: the family must have no ``eps_key``."""
    scaled_by: Literal["", "module", "stack"] = ""  # what multiplies the embedding
    switch: str = ""
    """Config key that switches the factor √d on, d being the width. Without such a key the factor is always on, rounded
    to the weight's dtype; if the stack applies it, it multiplies ``inputs_embeds`` too."""
    multiplier: bool = False  # whether the factor is the family's embedding multiplier, not √d
    table: str = ""  # the embedding's tensor, "" for the family's

    @property
    def rounds_scale(self) -> bool:
        """Whether the factor √d, d being the width, is rounded to the embedding's dtype before it is applied."""
        return bool(self.scaled_by) and not self.switch and not self.multiplier

    @property
    def scaling_module(self) -> str:
        return self.embedding if self.scaled_by == "module" else self.at

    @property
    def scaling(self) -> str:
        """The site where transformers multiplies the embedding by √d or another number."""
        return f"{self.scaling_module}:mul"

    @property
    def embedded(self) -> str:
        """The site of the embedding after its scaling and the addition of positions, if any."""
        if self.positions:
            return f"{self.at}:add"
        return self.scaling if self.scaled_by else f"{self.embedding}:embedding"


@dataclass(frozen=True)
class HeadLinear:
    """One linear of a head, its weight and bias tensors, and the site of a tanh on its output; "" stands for none."""

    at: str
    weight: str
    bias: str = ""
    tanh: str = ""


@dataclass(frozen=True)
class Head:
    """A model's head: linears in sequence, of which the first reads the last norm's output."""

    at: str  # the module that contains the linears, or the only linear
    linears: tuple[HeadLinear, ...]
    dropout: str = ""  # the module before each linear, "" for none
    cap: str = ""  # config key of the c of a soft cap c·tanh(x/c) on the logits, which the model itself applies


MOST_MEAN = 1024.0  # largest mean magnitude of another model's outputs for which a LayerNorm's output is bounded


@dataclass(frozen=True)
class Projector:
    """The part that brings another model's outputs, such as a vision tower's, into the residual stream: a norm and then
    linears. A string is a module path, unless its comment says otherwise; "" stands for none."""

    at: str  # the module that contains norm and linears
    add: str  # the site where the results replace embeddings, or join the stream
    norm: str
    tower: str  # the other model's module: its tensors are copied unchanged, and no bound covers its inside
    image: ImageInput
    pool: str = ""  # the site that averages the other model's outputs before the norm
    layer_norm_eps: float | None = None
    """The eps of a LayerNorm, None for an RMSNorm. A LayerNorm can lose small differences beside a large mean, so its
    bounds hold only for means of at most ``MOST_MEAN``."""
    joined: int = 1  # how many vectors from the norm form one input of the first linear
    by_channel: bool = False  # whether these are interleaved by channel
    shares_eps: bool = False  # whether the norm uses the text model's eps; rescaling that eps changes the norm's output
    weight: str = ""  # tensor of a single linear, [inputs, outputs]; "" where the linears are modules
    merging: str = ""  # the first linear
    feed_forward: FeedForward | None = None  # the linears after it
    behind: str = ""  # the site of the stream to which the results are added, "" if they replace embeddings
    gives: str = ""  # the field with the results in the stock class's output


@dataclass(frozen=True)
class ImageInput:
    """How a transformers class takes an image. The first seven fields are config keys, the last three are names of
    arguments of its forward; "" stands for none."""

    token: str  # the id of the image token, whose embeddings the image's vectors replace
    channels: str  # the number of an image's colour channels, "" for 3
    size: str = ""  # height and width in pixels; "" for any, and the audit's image is two tokens high and wide
    tokens: str = ""  # an image's number of image tokens, "" for four
    patch: str = ""  # a patch's height and width in pixels
    merged: str = ""  # n, where n × n patches make a token
    frames: str = ""  # the number of equal video frames that an image is made into
    marks: str = ""  # 1 at image tokens
    sizes: str = ""  # height and width in pixels; with ``frames``, numbers of patches along time, height and width
    places: str = ""  # column and row of each patch, where the image is given as patches


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
