"""Read a config.json as its stock class does: with defaults, and with nulls and aliases resolved."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ..checkpoint.sources import shown
from ..errors import UserError
from .types import INNER, Family

BOTH_WAYS = (True, "all")  # values of ``use_bidirectional_attention`` with which text is seen from both sides

LABEL_DROPOUT = 0.1  # of stock classifiers whose config has none

OF_WHOLE = {"global_head_dim": "head_dim", "num_global_key_value_heads": "num_key_value_heads"}
"""Config keys of sizes that Gemma 4's full attention has, and their keys in transformers' ``per_layer_config``."""


def full_config(family: Family, config: Mapping[str, object]) -> Mapping[str, Any]:
    """Return a config as its stock class reads it, with defaults. Raises UserError if transformers cannot read it."""
    return _read(family.model_type, json.dumps(dict(config), default=str))


@lru_cache(maxsize=16)
def _read(model_type: str, text: str) -> Mapping[str, Any]:
    from transformers import CONFIG_MAPPING  # slow to load

    if model_type not in CONFIG_MAPPING:
        raise UserError(
            f"config.json: model_type {model_type!r} needs a newer transformers; pip install -U transformers"
        )
    config = json.loads(text)
    try:
        values = stock_values(CONFIG_MAPPING[model_type].from_dict(config))
    except Exception as error:  # each class raises its own kind
        reason = " ".join(str(error).split())
        raise UserError(f"config.json: {reason}; take it from the original checkpoint") from error
    # An older config with images may have the text model's keys outside.
    inner = values.get(INNER)
    return {**inner, **values} if isinstance(inner, dict) and not isinstance(config.get(INNER), dict) else values


def stock_values(config: Any) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    if getattr(config, "rope_parameters", None):
        config.standardize_rope_params()  # as before a run: the class's own call misses keys that are no fields of it
    values = config.to_dict()
    values |= {key: stock_values(each) for key, each in vars(config).items() if isinstance(each, PreTrainedConfig)}
    for alias in type(config).attribute_map:
        values.setdefault(alias, getattr(config, alias))
    if values.get("head_dim") is None and (heads := values.get("num_attention_heads")):
        values["head_dim"] = values["hidden_size"] // heads
    if values.get("classifier_dropout") is None:
        values["classifier_dropout"] = LABEL_DROPOUT
    # Stock code leaves out the layers' own sizes where all layers have the same.
    layers = values.get("per_layer_config") or {}
    own = {key: each for layer in layers.values() for key, each in layer.items()}
    values |= {name: own.get(key, values.get(name) or values.get(key)) for name, key in OF_WHOLE.items()}
    return values


def looked_up(config: Mapping[str, object], key: str, default: object = None) -> object:
    """Return the value of a config key, or ``default``; dots in the key lead into nested configs."""
    value: object = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def with_value(config: Mapping[str, object], key: str, value: object) -> dict[str, object]:
    first, _, rest = key.partition(".")
    inner = config.get(first)
    return {**config, first: with_value(inner if isinstance(inner, Mapping) else {}, rest, value) if rest else value}


def without_value(config: Mapping[str, object], key: str) -> dict[str, object]:
    first, _, rest = key.partition(".")
    inner = config.get(first)
    if rest and isinstance(inner, Mapping):
        return {**config, first: without_value(inner, rest)}
    return {name: value for name, value in config.items() if rest or name != first}


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Return the keys whose values differ (dotted in nested configs), each with its values ``before`` and ``after``."""
    differing: dict[str, dict[str, object]] = {}
    for key in (k for k in {**before, **after} if before.get(k, ...) != after.get(k, ...)):
        sides = {side: c[key] for side, c in (("before", before), ("after", after)) if key in c}
        old, new = sides.get("before"), sides.get("after")
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            differing |= {f"{key}.{inner}": each for inner, each in changes(old, new).items()}
        else:
            differing[key] = sides
    return differing


def config_value(family: Family, config: Mapping[str, object], key: str) -> object:
    """Return the value of a config key as transformers reads it, with defaults."""
    return looked_up(full_config(family, config), key)


def number_of(family: Family, config: Mapping[str, object], key: str, asked: str, *, least: int = 1) -> int:
    number = config_value(family, config, key)
    return whole_number(key, len(number) if isinstance(number, Mapping) else number, asked, least=least)


def whole_number(key: str, number: object, asked: str, *, least: int = 1) -> int:
    """Return ``number`` if it is an int in [``least``, 2³¹), else raise UserError. asked: describes such a number."""
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number < 2**31:
        raise UserError(f"config.json: {key!r} is {shown(number)}, not {asked}; take it from the original checkpoint")
    return number


def positive(key: str, value: object, asked: str, *, allow_zero: bool = False) -> float:
    """Return ``value`` as a float. Raises UserError unless it is finite and over 0, or 0 with ``allow_zero``. asked:
    describes such a value, for the error message."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and (value or allow_zero)
    if number and 0 <= float(str(value)) < math.inf:
        return float(str(value))
    raise UserError(f"config.json: {key!r} is {shown(value)}, not {asked}; take it from the original checkpoint")


def axis_size(family: Family, config: Mapping[str, object], name: str) -> int:
    """Return the size of the axis ``name`` in ``Family.sizes``. Names joined by "+" give the sum of their sizes."""

    def size(factor: str | int) -> int:
        return factor if isinstance(factor, int) else number_of(family, config, factor, "a size")

    return sum(math.prod(map(size, family.sizes[part])) for part in name.split("+"))


def is_nested(rotation: Mapping[str, object]) -> bool:
    return any(isinstance(value, Mapping) for value in rotation.values())


def kind_of(rotation: Mapping[str, object]) -> object:
    return rotation.get("rope_type", rotation.get("type", "default"))
