"""The types in which a model family is declared, as pure data: transformers classes, blocks and config keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from .signals import Signal, Tensor
from .wiring import Projector, StockAttributes, Topology


@dataclass(frozen=True)
class Part:
    """The declaration of a sublayer, an embedding, a head or a final norm. Parts share signals (activations that are
    rescaled together) of the same name."""

    signals: tuple[Signal, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    topology: Topology | None = None  # how the modules are connected; None for a final norm without a head


@dataclass(frozen=True)
class StockClass:
    """A class of transformers that loads a family's checkpoints."""

    names: tuple[str, ...]  # the current name first, then older ones
    decodes: bool = False  # whether it runs the decoder of a family with two stacks
    takes_decoder_ids: bool = False  # whether it needs ``decoder_input_ids``, or makes them from ``input_ids``
    end: Part | None = None  # the final norm and any head; None for a language-modelling head, declared by the family
    gives: tuple[str, ...] = ("logits",)  # the output's field names
    body: str = ""  # path of the module that contains the stacks, "" for the model itself
    reads_end_token: bool = False  # whether the head reads only a row's last end token
    reads_last_token: bool = False  # whether the head reads only the last token that is not padding
    auto: str = ""  # the Auto class that loads it, "" if ``loading_class`` decides

    @property
    def row_wise(self) -> bool:
        """Whether the class gives one output for each row of a batch, not for each token."""
        return self.reads_end_token or self.reads_last_token

    @property
    def is_language_model(self) -> bool:
        """Whether the class predicts the next token, and can generate."""
        return self.end is None


@dataclass(frozen=True)
class Stack:
    """An encoder or a decoder. ``layers`` is the config key of the number of its blocks, and ``block(config, i)``
    returns the parts of block i, counted from 0."""

    layers: str
    block: Callable[[Mapping[str, object], int], Sequence[Part]]


class OutputScale(StrEnum):
    """When transformers multiplies the decoder's output, of width d, by d^-1/2 before the head."""

    NEVER = "never"
    ALWAYS = "always"
    CONFIG = "config"  # when the config says so: by ``output_scale_key``, in its absence by the tie flag


MultiplierKind = Literal["embedding", "branch", "scores", "logits"]
"""What a number in the config multiplies: the embedding, each sublayer's output ("branch"), or the attention scores, in
place of head_dim^-1/2. The number for "logits" divides them."""

DropoutKind = Literal["stream", "branch", "attention", "neurons", "head"]
"""Where dropout acts: on the residual stream and sublayers' outputs ("stream"), on these outputs alone ("branch"), on
attention weights, on a feed-forward's neurons, or on a head's inputs."""


INNER = "text_config"  # key of a text model's nested config
OLDER_ROTARY = {"": ("rope_theta", "rope_scaling")}  # where all layers have the same rotary positions


@dataclass(frozen=True)
class StoredExperts:
    """The names that checkpoint files give to each expert's linears. transformers fuses these linears on loading."""

    gate: str = "gate_proj"
    linear: str = "up_proj"
    output: str = "down_proj"
    inside: str = ""  # the experts' parent module in files, "" if it has stock code's name


@dataclass(frozen=True, kw_only=True)
class Family:
    """Everything that the package knows about one model family, as pure data."""

    name: str
    title: str
    config_type: str = ""  # the config's ``model_type``, where it is not the name
    classes: tuple[StockClass, ...]  # the classes of transformers that are supported
    sizes: Mapping[str, tuple[str | int, ...]]
    """The sizes of tensors' axes by name, each a product of config values and numbers. Where a value is a mapping, such
    as ``id2label``, its length counts."""
    keys: tuple[str, ...] = ()
    """The config keys on which the blocks' parts depend, and that no other field names."""
    encoder: Stack  # the first stack, or a decoder-only model's stack
    decoder: Stack | None = None  # the stack that reads the first one's output, None for a family of one stack
    encoder_ends: Part  # an encoder's beginning and end, without its final norm's output
    encoder_output: Part  # the final norm's output, where a decoder or a user reads it
    decoder_ends: Part | None = None  # a decoder's beginning and end, like ``encoder_ends``
    tied_head: Part  # the final norm and the language-modelling head where the embedding serves as head
    untied_head: Part  # the final norm and a separate language-modelling head
    embedding: str
    head: str
    copies: tuple[str, ...] = ()  # names under which stock files may repeat the embedding
    ignorable: tuple[str, ...] = ()  # tensors that stock classes drop without a warning
    logits_bias: str = ""  # tensor that the stock class adds to the logits, "" for none
    output_scale: OutputScale = OutputScale.NEVER
    output_scale_key: str = ""  # config key that switches the scale before the head, "" where there is none
    kept_in_fp32: tuple[str, ...] = ()  # modules in stock code's ``_keep_in_fp32_modules``
    eps_key: str | None = None  # config key of the norms' eps, None if fixed; dots in keys lead into nested configs
    eps: float = 0.0  # the norms' eps where no config key says it
    centred_norm: bool = False  # true for LayerNorm (mean subtracted), False for RMSNorm
    norm_site: str = "mul#2"  # the operation that gives a norm's output, as the audit names it in fp16
    dropout: Mapping[DropoutKind, str]  # config keys of the dropout rates
    multipliers: Mapping[MultiplierKind, str] = field(default_factory=dict)  # config keys of numbers over 0
    free_keys: tuple[str, ...] = ()
    """Config keys that the transformers class reads and no bound depends on, such as the rate of layers dropped in
    training. One that ends in ``*`` means all keys that begin so."""
    attributes: StockAttributes
    untie: Literal["", "copy", "scaled"]
    """How a tied head can get a weight of its own: "copy" (the embedding's values), "scaled" (these times the d^-1/2
    before the head), or "" (it cannot)."""
    variants: tuple[Mapping[str, object], ...] = ()  # config values that give blocks other parts than the defaults do
    ties_all_or_nothing: bool = False
    """Whether transformers, if it does not tie the head, does not tie the embedding's other copies either. A file must
    then contain each of them."""
    encoder_refuses_cache: bool = False  # whether stock code raises when a call with ``use_cache`` runs the encoder too
    norm_rounds_once: bool = False  # whether an RMSNorm is rounded only after its gain, and not before it too
    aliases: Mapping[str, str] = field(default_factory=dict)  # config keys of transformers 4.57, with names in 5
    alone: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    """Config keys with only one supported value: that value, and the message for any other."""
    made_in_fp32: bool = False
    """Whether transformers computes buffers in fp32 that no file has, such as the frequencies of rotary positions:
    ``from_pretrained(dtype=float16)`` leaves them as they are, ``.half()`` rounds them and changes the function."""
    blind_padding: bool = False
    """Whether masks can leave a padding position nothing to attend to: one to the left of a row under a causal mask, or
    one further from the row than a sliding window. Its masks are finite in fp16, but a mask and a score under −16 sum
    to −inf. If all its scores are under −16, eager attention makes the position NaN."""

    older_rotary: Mapping[str, tuple[str, str]] = field(default_factory=lambda: OLDER_ROTARY)
    """The config keys by which transformers 4.57 sets the rotary base and scaling ("" for no key), for each kind of
    layer ("" for all layers)."""
    older_scales_tied: bool = False  # whether transformers 4.57 multiplies by d^-1/2 only if the head is tied
    older_notes: Mapping[str, str] = field(default_factory=dict)
    """Config keys that transformers 4.57 ignores unless null, each with a sentence that says so."""
    eps_copies: tuple[str, ...] = ()  # further config keys that must say the same eps
    tie_keys: tuple[str, ...] = ("tie_word_embeddings",)  # config keys, any of which unties the head if it is false
    stored_experts: StoredExperts | None = None  # names in files of the experts that transformers fuses
    flat: Family | None = None  # the same family for configs without ``text_config``
    brings: Callable[[Mapping[str, object]], Sequence[Part]] | None = None
    """Returns, for a config, the parts that add another model's outputs to the first stack; None if there are none."""

    @property
    def model_type(self) -> str:
        return self.config_type or self.name

    @property
    def projector(self) -> Projector | None:
        """The first part that adds another model's outputs to the first stack; None if there is none."""
        parts = self.brings({}) if self.brings is not None else ()
        return next((part.topology for part in parts if isinstance(part.topology, Projector)), None)

    @property
    def config_keys(self) -> frozenset[str]:
        """The config keys on which the layout depends, except those of the norms' eps."""
        sizes = (factor for product in self.sizes.values() for factor in product if isinstance(factor, str))
        others = (*self.dropout.values(), *self.multipliers.values(), *self.alone)
        return frozenset({*sizes, *(stack.layers for stack in self.stacks), *others, *self.keys})

    @property
    def eps_keys(self) -> tuple[str, ...]:
        return () if self.eps_key is None else (self.eps_key, *self.eps_copies)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return (self.encoder,) if self.decoder is None else (self.encoder, self.decoder)

    def giving_states(self, *, decodes: bool) -> str | None:
        """Return the name of the family's class without a head; None if there is none. decodes: True for the class that
        runs encoder and decoder, False for the class that runs the first stack only."""
        fitting = (each for each in self.classes if each.gives == ("last_hidden_state",) and each.decodes == decodes)
        return next((each.names[0] for each in fitting), None)

    @property
    def ends(self) -> tuple[Part, ...]:
        return (self.encoder_ends,) if self.decoder_ends is None else (self.encoder_ends, self.decoder_ends)
