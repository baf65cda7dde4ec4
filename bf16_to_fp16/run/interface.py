"""What a stock model takes and gives, read from its config: ids for a decoder, logits of tokens, and which ids pad,
begin and end a text.

A class says more than its config's flags: what a family declares of it goes first, then how it describes itself.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from ..families.known import class_named
from ..families.layout import NOT_A_CHOICE
from ..families.types import StockClass
from .stock import described, setting, vocabulary_of


def class_in(config: Any) -> StockClass | None:
    """Return the stock class that a transformers configuration names, as its family declares it, else as it describes
    itself; None where it names none."""
    names = getattr(config, "architectures", None) or ()
    return next((found for look in (class_named, described) for name in names if (found := look(name))), None)


def config_of(model: Any) -> Any:
    """Return the configuration of a stock model in memory with the name of its class, which one that was never saved
    lacks."""
    config = copy(model.config)
    config.architectures = [type(model).__name__]
    return config


def takes_decoder_ids(config: Any) -> bool:
    """Return whether a model must be given ids for a decoder.

    Encoders, and classes that make them from the encoder's, are known by their names: ``is_encoder_decoder`` is often
    still true.
    """
    stock = class_in(config)
    return bool(config.is_encoder_decoder) if stock is None else stock.takes_decoder_ids


def predicts_tokens(config: Any) -> bool:
    """Return whether a model gives logits of the next token, so that it has a loss of its own and can generate."""
    stock = class_in(config)
    return takes_decoder_ids(config) if stock is None else stock.is_language_model


def is_causal(config: Any) -> bool:
    """Return whether a model predicts the next token of the very ids that it is given, with no decoder beside it."""
    return predicts_tokens(config) and not takes_decoder_ids(config)


def gives_probabilities(config: Any) -> bool:
    """Return whether a model's logits are of a choice among several tokens or labels, one for a position or a row."""
    stock = class_in(config)
    if stock is None or stock.is_language_model:
        return predicts_tokens(config)
    choices = config.num_labels > 1 and config.problem_type not in NOT_A_CHOICE
    return stock.gives == ("logits",) and choices


def longest_sequence(config: Any) -> int:
    """Return the most positions that a model of ``config`` has; 2³⁰ where nothing bounds them."""
    positions = setting(config, "max_position_embeddings")
    return int(positions) if positions else 2**30


def decoder_start(config: Any) -> int:
    """Return the token with which a decoder begins, as ``generate`` takes it; T5's is the padding's."""
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    return next((token for name in names for token in _named(config, name)), 0)


def pad_id(config: Any) -> int:
    """Return the id that fills up rows: the config's padding token, 0 where it names none."""
    token = setting(config, "pad_token_id")
    return 0 if token is None else int(token)


def special_ids(config: Any) -> list[int]:
    """Return the ids with a meaning of their own in order: those that the config names, and the last, the first of T5's
    sentinels."""
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id", "decoder_start_token_id")
    return sorted({vocabulary_of(config) - 1, *(i for name in names for i in _named(config, name))})


def end_ids(config: Any) -> list[int]:
    """Return the end token, the first where a config names several, as a list of one; an empty list where it names none
    of the vocabulary."""
    return _named(config, "eos_token_id")[:1]


def first_ids(config: Any) -> list[int]:
    """Return the token with which a causal language model's texts begin as a list of one; an empty list for any other
    model, and where the config names none of the vocabulary."""
    return _named(config, "bos_token_id")[:1] if is_causal(config) else []


def _named(config: Any, name: str) -> list[int]:
    """The ids of the vocabulary that a config gives under a name: none, one, or several ends of a text."""
    value = setting(config, name)
    several = value if isinstance(value, list) else [value]
    return [i for i in several if isinstance(i, int) and 0 <= i < vocabulary_of(config)]
