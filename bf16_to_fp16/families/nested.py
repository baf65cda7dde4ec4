"""Put a family inside a larger model: its modules under a path prefix, its config keys in a nested config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from .signals import RESIDUAL, ROOT, Axis, ObservationPoint
from .types import INNER, Family, Part, Stack
from .wiring import FeedForward, Rotary, Topology

_KEYS = frozenset(
    {"heads", "kv_heads", "scale", "cap", "radius", "block", "noise", "chosen", "normalised", "scaling", "switch"}
)
"""The fields of the classes in ``wiring`` whose values are config keys."""

_OF_CONFIG = _KEYS | {"activation", "gives", "scaled_by"}  # fields of a topology that are not paths


def renamed_signals(part: Part, name: Callable[[str], str]) -> Part:
    def axis(of: Axis | None) -> Axis | None:
        return of and replace(of, signal=name(of.signal), others=tuple(filter(None, map(axis, of.others))))

    return replace(
        part,
        signals=tuple(replace(signal, name=name(signal.name)) for signal in part.signals),
        tensors=tuple(replace(t, axes=tuple(map(axis, t.axes))) for t in part.tensors),
    )


def inside(part: Part, body: str) -> Part:
    """Return a part with ``body`` before its module paths: "norm" becomes "body.norm", ":add" becomes "body:add"."""

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
        tuple(replace(signal, seen=moved(signal.seen), added_at=moved(signal.added_at)) for signal in part.signals),
        tuple(replace(tensor, name=path(tensor.name)) for tensor in part.tensors),
        None if part.topology is None else topology(part.topology),
    )


def keys_inside(family: Family) -> Family:
    """Return a one-stack family that reads its config keys in ``text_config``. The key that says whether the head is
    tied is read outside it too."""

    def key(name: str) -> str:
        return f"{INNER}.{name}" if name else name

    def keys(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(map(key, names))

    def moved(of: Part) -> Part:
        if (topology := of.topology) is None:
            return of
        names = [f.name for f in fields(topology) if f.name in _KEYS]
        keyed = replace(topology, **{n: key(getattr(topology, n)) for n in names})  # type: ignore[arg-type]
        return replace(of, topology=keyed)

    def block(config: Mapping[str, object], i: int) -> list[Part]:
        inner: Any = config[INNER]
        return [moved(each) for each in family.encoder.block(inner, i)]

    return replace(
        family,
        sizes={name: tuple(key(f) if isinstance(f, str) else f for f in of) for name, of in family.sizes.items()},
        keys=keys(family.keys),
        encoder=Stack(key(family.encoder.layers), block),
        encoder_ends=moved(family.encoder_ends),
        tied_head=moved(family.tied_head),
        untied_head=moved(family.untied_head),
        eps_key=family.eps_key and key(family.eps_key),
        dropout={kind: key(name) for kind, name in family.dropout.items()},
        free_keys=keys(family.free_keys),
        alone={key(name): of for name, of in family.alone.items()},
        tie_keys=("tie_word_embeddings", *keys(family.tie_keys)),
    )


def family_inside(family: Family, body: str) -> Family:
    """Return a family whose stacks lie inside the module ``body``; "" changes nothing. A vision tower and its projector
    become siblings of ``body``."""
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
