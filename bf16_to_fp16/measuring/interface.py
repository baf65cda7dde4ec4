"""The inputs and outputs of a stock model, read from its config. A family's declaration goes before the class's
signature, and that before the config's flags."""

from __future__ import annotations

from copy import copy
from typing import Any

from ..families.known import class_named
from ..families.layout import NOT_A_CHOICE
from ..families.types import StockClass
from .stock import described, setting, vocabulary_of


def class_in(config: Any) -> StockClass | None:
    names = getattr(config, "architectures", None) or ()
    return next((stock for look in (class_named, described) for name in names if (stock := look(name))), None)


def config_of(model: Any) -> Any:
    """Return a copy of a model's config with its class's name, which a config that was never saved lacks."""
    config = copy(model.config)
    config.architectures = [type(model).__name__]
    return config


def takes_decoder_ids(config: Any) -> bool:
    """Return whether a model needs decoder ids; ``is_encoder_decoder`` is often true of encoders too."""
    stock = class_in(config)
    return bool(config.is_encoder_decoder) if stock is None else stock.takes_decoder_ids


def predicts_tokens(config: Any) -> bool:
    stock = class_in(config)
    return takes_decoder_ids(config) if stock is None else stock.is_language_model


def is_causal(config: Any) -> bool:
    return predicts_tokens(config) and not takes_decoder_ids(config)


def gives_probabilities(config: Any) -> bool:
    stock = class_in(config)
    if stock is None or stock.is_language_model:
        return predicts_tokens(config)
    choices = config.num_labels > 1 and config.problem_type not in NOT_A_CHOICE
    return stock.gives == ("logits",) and choices


def longest_sequence(config: Any) -> int:
    positions = setting(config, "max_position_embeddings")
    return int(positions) if positions else 2**30


def decoder_start(config: Any) -> int:
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    return next((token for name in names for token in _named(config, name)), 0)


def pad_id(config: Any) -> int:
    return next(iter(_named(config, "pad_token_id")), 0)


def special_ids(config: Any) -> list[int]:
    """Return the config's special ids and the vocabulary's last id, sorted."""
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id", "decoder_start_token_id")
    return sorted({vocabulary_of(config) - 1, *(i for name in names for i in _named(config, name))})


def end_ids(config: Any) -> list[int]:
    return _named(config, "eos_token_id")[:1]


def first_ids(config: Any) -> list[int]:
    """Return a causal model's start token as a list of one; [] for other models."""
    return _named(config, "bos_token_id")[:1] if is_causal(config) else []


def _named(config: Any, name: str) -> list[int]:
    value = setting(config, name)
    several = value if isinstance(value, list) else [value]
    return [i for i in several if isinstance(i, int) and 0 <= i < vocabulary_of(config)]
