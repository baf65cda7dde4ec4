"""Read values of a family's config keys, or the stock class's defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from ..checkpoint.sources import shown
from ..errors import UserError
from .types import INNER, Family

_NOWHERE = object()

FOLLOWING = {
    "id2label": "num_labels",
    "num_decoder_layers": "num_layers",
    "num_global_key_value_heads": "num_key_value_heads",
    "num_key_value_heads": "num_attention_heads",
}
"""Config keys that take the value of another one where they are null, or where the stock class has no default."""

BOTH_WAYS = (True, "all")  # values of ``use_bidirectional_attention`` with which text is seen from both sides

OTHERWISE: Mapping[str, object] = {"num_labels": 2, "classifier_dropout": 0.1, "global_head_dim": 512}
"""Defaults of stock classes for keys that neither a config nor its class has."""


@cache
def stock_defaults(model_type: str) -> Mapping[str, object]:
    """Return the stock config class's defaults by key; None for values that follow from other keys."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig  # slow to load

    if model_type not in CONFIG_MAPPING:
        raise UserError(
            f"config.json: model_type {model_type!r} needs a newer transformers; pip install -U transformers"
        )

    def values(config: Any) -> dict[str, object]:
        own = {key: None if follows(config, key) else value for key, value in config.to_dict().items()}
        inside = {key: values(value) for key, value in vars(config).items() if isinstance(value, PreTrainedConfig)}
        return own | inside

    def follows(config: Any, key: str) -> bool:
        return key in (*FOLLOWING, "head_dim", "layer_types") and getattr(type(config), key, None) is None

    return values(CONFIG_MAPPING[model_type]())


def default_of(family: Family, key: str) -> object:
    """Return the stock config class's default for ``key``, at the top level or inside ``text_config``."""
    last, stock = key.rpartition(".")[2], stock_defaults(family.model_type)
    places = (key, f"{INNER}.{key}", family.aliases.get(key, key))
    values = (looked_up(stock, place) for place in places)
    return next((value for value in values if value is not None), OTHERWISE.get(last))


def of_other_layers(config: Mapping[str, object], before: str, name: str) -> object:
    """Return the value of ``name``, without its "global_", in ``per_layer_config``. before: the prefix of that key."""
    layers, plain = looked_up(config, f"{before}per_layer_config"), name.replace("global_", "")
    own = layers.values() if isinstance(layers, Mapping) else ()
    return next((each[plain] for each in own if isinstance(each, Mapping) and plain in each), None)


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
    """Return the config's value for ``key``, or the stock class's default; None if a null turns a part off."""
    value = value_or_none(family, config, key)
    if value is None and key not in family.nullable:
        raise UserError(
            f"config.json has no {key!r}, which is needed for {family.title}; take it from the original checkpoint"
        )
    return value


def value_or_none(family: Family, config: Mapping[str, object], key: str) -> object:
    value = looked_up(config, key)
    if value is None and (other := family.aliases.get(key)):
        value = looked_up(config, other)
    is_null = looked_up(config, key, _NOWHERE) is None
    if value is not None or (is_null and key in family.nullable):
        return value
    last = key.rpartition(".")[2]
    before = key.removesuffix(last)
    value = of_other_layers(config, before, last) if "global_" in last else None
    value = default_of(family, key) if value is None else value
    if is_null and type(value) is int:  # no stock class takes null for a number
        value = None
    if value is None and last in FOLLOWING:
        return value_or_none(family, config, before + FOLLOWING[last])
    if value is None and last == "head_dim":
        width, heads = (f"{before}{name}" for name in ("hidden_size", "num_attention_heads"))
        return number_of(family, config, width, "a size") // number_of(family, config, heads, "a size")
    return value


def full_config(family: Family, config: Mapping[str, object]) -> dict[str, object]:
    values = {key: value_or_none(family, config, key) for key in family.config_keys}
    return values | {key: value for key, value in config.items() if value is not None}


def number_of(family: Family, config: Mapping[str, object], key: str, what: str, *, least: int = 1) -> int:
    """Return ``whole_number`` of the value for ``key`` or, if that is a mapping, of the number of its entries."""
    number = config_value(family, config, key)
    return whole_number(key, len(number) if isinstance(number, Mapping) else number, what, least=least)


def whole_number(key: str, number: object, what: str, *, least: int = 1) -> int:
    """Return ``number``; raise UserError unless it is an int in [``least``, 2³¹). what: its noun in the message."""
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number < 2**31:
        raise UserError(f"config.json: {key!r} is {shown(number)}, not {what}; take it from the original checkpoint")
    return number


def positive(key: str, value: object, what: str, *, zero: bool = False) -> float:
    """Return a finite float over 0 (``zero``: or 0); raise UserError otherwise. what: its noun in the message."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and (value or zero)
    if number and 0 <= float(str(value)) < math.inf:
        return float(str(value))
    raise UserError(f"config.json: {key!r} is {shown(value)}, not {what}; take it from the original checkpoint")


def axis_size(family: Family, config: Mapping[str, object], name: str) -> int:
    """Return the size of a named axis. name: several, joined by "+", for the rows of a matrix of several linears."""

    def size(factor: str | int) -> int:
        return factor if isinstance(factor, int) else number_of(family, config, factor, "a size")

    return sum(math.prod(map(size, family.sizes[part])) for part in name.split("+"))


def is_nested(rotation: Mapping[str, object]) -> bool:
    return any(isinstance(value, Mapping) for value in rotation.values())


def kind_of(rotation: Mapping[str, object]) -> object:
    return rotation.get("rope_type", rotation.get("type", "default"))
