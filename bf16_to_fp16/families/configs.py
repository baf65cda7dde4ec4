"""Read values of a family's config keys, or the stock class's defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..checkpoint.sources import shown
from ..errors import UserError
from .types import Family, OfLayers, Quotient, SameAs, Sum

_NOWHERE = object()
SHARED_HEADS = "num_key_value_heads"  # where it is null, stock classes take one for each head of queries

BOTH_WAYS = (True, "all")  # values of ``use_bidirectional_attention`` with which text is seen from both sides

OF_LABELS: Mapping[str, object] = {"id2label": SameAs("num_labels"), "num_labels": 2, "classifier_dropout": 0.1}
"""What stock classes with labels take where no config says it."""


def looked_up(config: Mapping[str, object], key: str, default: object = None) -> object:
    """Return a key's value; dots in the key lead into nested configs."""
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
    """Return, by changed key, its values ``before`` and ``after``, if present; dots lead into nested configs."""
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
    """Return the config's value for ``key``, or the stock class's default; None where a null turns a part off."""
    value = looked_up(config, key)
    if value is None and (other := family.aliases.get(key)):
        value = looked_up(config, other)
    first, shared, end = key.partition(SHARED_HEADS)
    if value is None and shared and looked_up(config, key, _NOWHERE) is None:
        return config_value(family, config, f"{first}num_attention_heads{end}")
    optional = key in family.nullable
    if value is None and not (optional and looked_up(config, key, _NOWHERE) is None):
        value = family.defaults.get(key, OF_LABELS.get(key))
        if isinstance(value, OfLayers):
            layers = looked_up(config, ".".join((*key.split(".")[:-1], "per_layer_config")))
            own = [each for each in layers.values() if isinstance(each, Mapping)] if isinstance(layers, Mapping) else []
            value = next((each[value.key] for each in own if value.key in each), value.otherwise)
        if isinstance(value, SameAs):
            return config_value(family, config, value.key)
        if isinstance(value, Quotient):
            over, under = (number_of(family, config, part, "a size") for part in (value.over, value.under))
            return over // under
    if value is None and not optional:
        raise UserError(
            f"config.json has no {key!r}, which is needed for {family.title}; take it from the original checkpoint"
        )
    return value


def full_config(family: Family, config: Mapping[str, object]) -> dict[str, object]:
    defaults = {key: config_value(family, config, key) for key in family.defaults}
    return defaults | {key: value for key, value in config.items() if value is not None}


def number_of(family: Family, config: Mapping[str, object], key: str, what: str, *, least: int = 1) -> int:
    """Return a whole number for ``key``, or a mapping's length; raise UserError unless it is at least ``least``."""
    number = config_value(family, config, key)
    return whole_number(key, len(number) if isinstance(number, Mapping) else number, what, least=least)


def whole_number(key: str, number: object, what: str, *, least: int = 1) -> int:
    """Return a whole number in [``least``, 2³¹); raise UserError otherwise. what: the noun for the message."""
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number < 2**31:
        raise UserError(f"config.json: {key!r} is {shown(number)}, not {what}; take it from the original checkpoint")
    return number


def positive(key: str, value: object, what: str, *, zero: bool = False) -> float:
    """Return a finite number over 0 (``zero``: or 0); raise UserError otherwise. what: the noun for the message."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and (value or zero)
    if number and 0 <= float(str(value)) < math.inf:
        return float(str(value))
    raise UserError(f"config.json: {key!r} is {shown(value)}, not {what}; take it from the original checkpoint")


def axis_size(family: Family, config: Mapping[str, object], name: str) -> int:
    def size(factor: str | int | Sum) -> int:
        if isinstance(factor, Sum):
            return sum(math.prod(map(size, product)) for product in factor.products)
        return factor if isinstance(factor, int) else number_of(family, config, factor, "a size")

    return math.prod(map(size, family.sizes[name]))


def is_nested(rotation: Mapping[str, object]) -> bool:
    return any(isinstance(value, Mapping) for value in rotation.values())


def kind_of(rotation: Mapping[str, object]) -> object:
    return rotation.get("rope_type", rotation.get("type", "default"))
