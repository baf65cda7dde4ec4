"""Make transformers 4.57 read a config.json of transformers 5 correctly.

Version 4.57 ignores ``rope_parameters``, but both versions read older keys, which can be added beside it.
``differences`` returns a sentence for each difference that no key can remove."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .configs import config_value, is_nested, kind_of, looked_up, with_value
from .layout import Layout
from .types import Family

ROTATION = "rope_parameters"  # the key of rotary positions that transformers 5 writes

APART = ("rope_theta", "partial_rotary_factor")  # keys inside it that an older config has beside ``rope_scaling``

OF_PATCHES = {"rope_type": "axial", "rope_theta": 1e4}  # of a vision tower; 4.57 needs no key for it

AXES = "mrope_section"  # the key for positions on several axes, which 4.57 reads in ``rope_scaling``

SCALED = ("linear", "dynamic", "llama3", "yarn")  # kinds that 4.57 makes from ``rope_scaling`` as 5 does


def with_older_keys(family: Family, config: Mapping[str, object]) -> dict[str, object]:
    """Return the config with older keys added, so that transformers 4.57 computes the same rotary positions."""
    result = dict(config)
    result |= {key: config[other] for key, other in family.aliases.items() if other in config}
    for place in rotations(config):
        for layers, (base, scaling) in family.older_rotary.items():
            rotation = looked_up(config, ".".join(filter(None, (place, ROTATION, layers))))
            if not isinstance(rotation, Mapping) or is_nested(rotation):
                continue
            wanted = {base: rotation.get("rope_theta")}
            if "partial_rotary_factor" in family.free_keys:
                wanted["partial_rotary_factor"] = rotation.get("partial_rotary_factor")
            if scaling and (kind_of(rotation) in SCALED or AXES in rotation):
                wanted[scaling] = {key: value for key, value in rotation.items() if key not in APART}
            for key, value in wanted.items():
                if value is not None:
                    result = with_value(result, f"{place}.{key}" if place else key, value)
    return result


def is_older_key(family: Family, key: str) -> bool:
    keys = {*family.aliases, *(name for names in family.older_rotary.values() for name in names), APART[1]}
    return key.rpartition(".")[2] in keys


def differences(layout: Layout, config: Mapping[str, object]) -> list[str]:
    family = layout.family
    if not family.older_rotary:
        return ["transformers 4.57 has no class that loads it"]
    lost = []
    for place in rotations(config):
        rotation = looked_up(config, f"{place}.{ROTATION}" if place else ROTATION)
        assert isinstance(rotation, Mapping)
        by_layer = rotation if is_nested(rotation) else {"": rotation}
        for layers, own in by_layer.items():
            base, scaling = family.older_rotary.get(layers, ("", ""))
            kind = kind_of(own) if isinstance(own, Mapping) else "default"
            written = looked_up(config, f"{place}.{base}" if place else base)
            apart = isinstance(own, Mapping) and own.get("rope_theta") not in (None, written)
            if apart or layers not in family.older_rotary or (kind != "default" and not (scaling and kind in SCALED)):
                lost.append(f"transformers 4.57 and 5 differ in rotary positions of {layers or 'all layers'}")
    notes = [n for key, n in family.older_notes.items() if config_value(family, config, key) is not None]
    lost += dict.fromkeys(notes)
    if family.older_scales_tied and layout.stock.is_language_model:
        older = bool(looked_up(config, "tie_word_embeddings", True))
        if older != (layout.head_scale != 1.0):
            does = "divides the logits" if older else "does not divide the logits"
            lost.append(f"transformers 4.57 {does} of source and output by the square root of the model's width")
    return lost


def rotations(config: Mapping[str, object]) -> Iterator[str]:
    """Yield the key of each nested config that has ``rope_parameters``, and "" if the outer config has them. A
    nested config is skipped if its ``rope_parameters`` are the default of a vision tower."""
    if isinstance(config.get(ROTATION), Mapping):
        yield ""
    inside = ((k, v.get(ROTATION)) for k, v in config.items() if isinstance(v, Mapping))
    yield from (key for key, rotation in inside if isinstance(rotation, Mapping) and rotation != OF_PATCHES)
