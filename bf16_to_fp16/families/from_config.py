"""The model that a config.json declares, before any tensor is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..checkpoint.sources import shown
from ..errors import UserError
from .configs import axis_size, config_value, full_config, looked_up, whole_number
from .known import class_of, placed_family
from .layout import Layout
from .types import Family, Part, Stack
from .wiring import Attention, Experts, Head

EARLY = 8  # how many layers of a stack are declared if the tensors are unknown; every kind of layer is among them

DTYPE_KEYS = ("dtype", "torch_dtype")  # keys for a word or, as stock code saves some models, a table by part

IDS = ("decoder_start_token_id", "pad_token_id")


@contextmanager
def in_folder(folder: str | Path) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        if str(error).startswith("config.json"):
            raise UserError(f"{folder}/{error}") from None
        raise


def declared(config: Mapping[str, object], tensors: int | None = None) -> tuple[Layout, list[Part]]:
    """Return a config's layout, without tensors and signals, and the declared parts (sublayers and the like) of its
    stacks. tensors: the number of tensors in the checkpoint; no stack can have more layers. If it is None, only the
    first ``EARLY`` layers of each stack are declared. Raises UserError for a bad config.json."""
    stock, family = class_of(config), placed_family(config)
    for key, (only, why) in family.alone.items():
        if (value := config_value(family, config, key)) != only:
            raise UserError(f"config.json: {key!r} is {value!r}, and {why}")
    check_flags(family, config)
    parts = [family.encoder_ends, *blocks(family.encoder, family, config, tensors)]
    if stock.decodes:
        assert family.decoder is not None and family.decoder_ends is not None
        parts += [family.encoder_output, family.decoder_ends, *blocks(family.decoder, family, config, tensors)]
    end = stock.end or family.untied_head
    brought = [] if family.brings is None else family.brings(config)
    topology = tuple(part.topology for part in (*parts, end, *brought) if part.topology is not None)
    shapes = {tensor.name: tensor.shape for part in (*parts, end, *brought) for tensor in part.tensors}
    sizes = {name: axis_size(family, config, name) for name in {name for shape in shapes.values() for name in shape}}
    layout = Layout(family, config, stock, None, {}, {}, {}, 1.0, topology)
    check_numbers(layout, {name: sizes[rows] for name, (rows, *_) in shapes.items()})
    return layout, parts


def check_config(config: Mapping[str, object]) -> Layout:
    layout, _ = declared(config)
    check_ids(lambda key: looked_up(config, key), axis_size(layout.family, config, "vocab"))
    return layout


def blocks(stack: Stack, family: Family, config: Mapping[str, object], tensors: int | None) -> list[Part]:
    full = full_config(family, config)
    count = whole_number(stack.layers, config_value(family, config, stack.layers), "a number of layers")
    if tensors is not None and count > tensors:
        raise UserError(
            f"config.json: {stack.layers!r} is {count}, more than the {tensors} tensors that there are;"
            " use the config.json that belongs to these weights"
        )
    return [part for i in range(min(count, EARLY if tensors is None else count)) for part in stack.block(full, i)]


def check_flags(family: Family, config: Mapping[str, object]) -> None:
    """Raise UserError if a dropout rate is outside [0, 1), or if ``tie_encoder_decoder`` is set."""
    for key in sorted({*family.dropout.values()}):
        rate = config_value(family, config, key)
        if isinstance(rate, (int, float)) and not 0 <= rate < 1:
            raise UserError(f"config.json: {key!r} is {rate}, not a dropout rate; give a number from 0 to under 1")
    if config.get(key := "tie_encoder_decoder"):
        raise UserError(
            f"config.json: {key!r} is {shown(config[key])}, by which transformers 4 ties encoder and decoder, and"
            " transformers 5 does not; remove the key"
        )


def check_numbers(layout: Layout, rows: Mapping[str, int]) -> None:
    assert layout.eps
    for part in layout.topology:
        if isinstance(part, Attention | Head):
            layout.cap(part)
        if isinstance(part, Attention):
            heads, size = layout.heads(part), 0 if part.fused else rows[f"{part.query}.weight"]
            if layout.kv_heads(part) and size % heads:
                raise UserError(
                    f"config.json: {part.heads!r} is {heads}, which does not divide the {size} rows of queries; take"
                    " it from the original checkpoint"
                )
        elif isinstance(part, Experts):
            layout.experts_together(part), layout.noise(part)


def check_ids(setting: Callable[[str], object], size: int) -> None:
    for key in IDS:
        token = setting(key)
        if token is not None and not (isinstance(token, int) and 0 <= token < size):
            raise UserError(
                f"config.json: {key} is {token!r}, not an id of the vocabulary of {size};"
                " take it from the original config.json"
            )
