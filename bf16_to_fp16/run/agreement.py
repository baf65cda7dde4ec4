"""Whether stock code, from the same folder, builds and fills the model that the layout describes.

Bounds are computed from the raw config.json and the tensors; what runs is what the stock classes make of them, and
those know aliases, defaults, derived fields that a file may set directly, and keys that lead to other weights. So the
stock class is built here by its own loader, on torch's meta device, where tensors have shapes and no values: what it
finds missing or unexpected, it says itself. A config that takes note of every key that is asked for then shows what
stock code reads at all, in a forward as well; each such key must be one that the layout is made from, one that no
bound depends on, or have the value that follows from the others. Nothing has to be known of a key for it to be
refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.reader import Checkpoint, shown
from ..errors import UserError
from ..families.known import FAMILIES, may_be_absent, stock_class
from ..families.resolve import resolve
from ..families.types import Attention, Family, FeedForward, Layout, StackEnds, config_value
from .stock import eps_attribute, load_config
from .texts import first_line

FREE_KEYS = frozenset(
    {
        "_name_or_path",
        "_output_attentions",
        "architectures",
        "bos_token_id",
        "decoder_start_token_id",
        "dtype",
        "eos_token_id",
        "gradient_checkpointing",
        "initializer_range",
        "name_or_path",
        "output_attentions",
        "output_cross_attentions",
        "output_hidden_states",
        "pad_token_id",
        "return_dict",
        "tie_word_embeddings",  # what comes of it, the loader says
        "transformers_version",
        "use_cache",
    }
)
"""Attributes of any stock config that stock code reads and no bound depends on."""


ATTENTIONS = (None, "eager", "sdpa")
"""Attention implementations that a config may ask for: those that the bounds are about."""


_ABSENT = object()


def agreed_layout(checkpoint: Checkpoint) -> Layout:
    """Return the layout of a checkpoint, of which stock code builds the very same model.

    Raises UserError as ``resolve`` does, and where stock code would load other weights, fill or drop any, compute
    something else, or cannot build it.
    """
    layout = resolve(checkpoint)
    check_agreement(checkpoint, layout)
    return layout


def check_agreement(checkpoint: Checkpoint, layout: Layout) -> None:
    """Raise UserError where the stock model in the checkpoint's folder is not the one that its layout describes."""
    where = f"{checkpoint.folder}/config.json"
    with quiet():
        config = load_config(checkpoint.folder)
    check_buckets(layout, where)
    asked: set[str] = set()
    written = dict(vars(config))
    with quiet():
        try:
            model, info = built(checkpoint, config, asked)
        except Exception as error:  # every field has its own way to fail
            raise UserError(
                f"{checkpoint.folder}: cannot be loaded ({first_line(error)});"
                " check its files, config.json first of all"
            ) from error
        # A key is the better explanation of what follows from it.
        check_keys(layout, type(config), written, asked, where)
        check_weights(checkpoint, layout, info)
        # Before the forward, in which impossible numbers fail with messages of their own.
        check_modules(layout, model, where)
        try:
            scales = run_short(model, layout)
        except Exception as error:
            check_keys(layout, type(config), written, asked, where)
            raise UserError(
                f"{where}: stock code cannot run the model ({first_line(error)});"
                " use the config.json that belongs to these weights"
            ) from error
    if scales != (layout.head_scale != 1.0):
        raise UserError(
            f"{where}: stock code {'multiplies' if scales else 'does not multiply'} the decoder's output by d^-1/2"
            " before the head, unlike the keys say that the bounds are made from; take it from the original checkpoint"
        )
    check_keys(layout, type(config), written, asked, where)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the bars and messages of the stock loader, whose findings are checked here, off the screen."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def built(checkpoint: Checkpoint, config: Any, asked: set[str]) -> tuple[Any, Mapping[str, Any]]:
    """Return the stock model of a checkpoint on the meta device and what its loader says of the weights.

    asked: receives the names of the config's attributes that stock code asks for, now and whenever the model runs.
    """
    import transformers

    weights = {name: torch.empty(info.shape, device="meta") for name, info in checkpoint.tensors.items()}
    kind: Any = getattr(transformers, stock_class(checkpoint.config))
    return kind.from_pretrained(
        None,
        config=noting(config, asked),
        state_dict=weights,
        dtype=torch.float32,
        attn_implementation="eager",
        device_map={"": "meta"},
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )


def noting(config: Any, asked: set[str]) -> Any:
    """Return a copy of a stock config that notes the name of every attribute that it, or a copy of it, is asked for."""
    kind: Any = type(config)

    def attribute(self: Any, name: str) -> Any:
        asked.add(kind.attribute_map.get(name, name))
        return kind.__getattribute__(self, name)

    copy = deepcopy(config)
    copy.__class__ = type(kind.__name__, (kind,), {"__getattribute__": attribute})
    return copy


def check_weights(checkpoint: Checkpoint, layout: Layout, info: Mapping[str, Any]) -> None:
    """Raise UserError for a tensor that stock code misses, drops or cannot place."""
    allowed = may_be_absent(layout.family)
    for name in sorted(set(info["missing_keys"]) - allowed):
        raise UserError(
            f"{checkpoint.source}: tensor {name} is missing, and stock code would fill it with random numbers;"
            " use the whole original checkpoint and its config.json"
        )
    for name in sorted(set(info["unexpected_keys"]) - set(layout.dropped)):
        raise UserError(
            f"{checkpoint.source}: stock code drops tensor {name}; use the config.json that belongs to these weights"
        )
    for name, *shapes in sorted(info["mismatched_keys"]):
        stored, wanted = (list(shape) for shape in shapes)
        raise UserError(
            f"{checkpoint.source}: tensor {name} has shape {stored}, and stock code makes it {wanted};"
            " use the config.json that belongs to these weights"
        )


def check_modules(layout: Layout, model: nn.Module, where: str) -> None:
    """Raise UserError for a module whose numbers or function are not those that its bounds are made from."""
    from transformers.activations import ACT2FN

    names = layout.family.attributes

    def same(path: str, attribute: str, expected: object, *, optional: bool = False) -> None:
        found = getattr(model.get_submodule(path), attribute, _ABSENT)
        if optional and found is _ABSENT:
            return
        if found != expected:
            raise UserError(
                f"{where}: in stock code {path}.{attribute} is {shown(found)}, where the keys that the bounds are made"
                f" from say {expected!r}; take it from the original checkpoint"
            )

    for w in layout.topology:
        if isinstance(w, Attention):
            heads = layout.heads(w)
            inner = layout.tensors[f"{w.query}.weight"].shape[0]
            same(w.at, names.heads, heads)
            same(w.at, names.head_size, inner // heads)
            same(w.at, "scaling", (inner // heads) ** -0.5 if w.scaled else 1.0, optional=not w.scaled)
        elif isinstance(w, FeedForward):
            found, expected = model.get_submodule(w.act), ACT2FN[w.activation]
            if type(found) is not type(expected) or functions(found) != functions(expected):
                raise UserError(
                    f"{where}: in stock code {w.act} is {type(found).__name__}, where the keys that the bounds are made"
                    f" from say {w.activation!r}; take it from the original checkpoint"
                )
        elif isinstance(w, StackEnds) and names.embedding_scale:
            width = layout.tensors[layout.family.embedding].shape[1]
            scaled = bool(w.scale and config_value(layout.family, layout.config, w.scale))
            same(w.at, names.embedding_scale, math.sqrt(width) if scaled else 1.0)
    for path in layout.norms:
        same(path, eps_attribute(model.get_submodule(path)), layout.eps)


def functions(module: nn.Module) -> dict[str, object]:
    """Return what a module without weights holds of its own."""
    return {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}


def check_buckets(layout: Layout, where: str) -> None:
    """Raise UserError for position buckets with which stock code would read outside their table."""
    if layout.family.buckets is None:
        return
    number, distance = (config_value(layout.family, layout.config, key) for key in layout.family.buckets)
    if not (isinstance(number, int) and isinstance(distance, int) and number >= 4 and distance > number // 2):
        keys = " and ".join(map(repr, layout.family.buckets))
        raise UserError(
            f"{where}: {keys} are {shown(number)} and {shown(distance)}, with which stock code reads outside the table"
            " of position biases; take them from the original checkpoint"
        )


def run_short(model: Any, layout: Layout) -> bool:
    """Run a meta model of one layer a stack on two tokens, as stock users do, and return whether it scales what its
    decoder gives before the head."""
    family = layout.family
    small = deepcopy(model.config)
    for stack in (family.encoder, family.decoder):
        if hasattr(small, stack.layers):
            setattr(small, stack.layers, 1)
    with torch.device("meta"), torch.no_grad():
        short = type(model)(small).eval()
        ids = torch.zeros(1, 2, dtype=torch.int64)
        if layout.encoder_only:
            short(input_ids=ids)
            return False
        seen: dict[str, Tensor] = {}
        decoder = layout.stacks()[1].ends.at
        head = short.get_submodule(family.head.removesuffix(".weight"))
        short.get_submodule(decoder).register_forward_hook(lambda _, __, out: seen.update(out=out[0]))
        head.register_forward_pre_hook(lambda _, inputs: seen.update(head=inputs[0]))
        short(input_ids=ids, decoder_input_ids=ids, use_cache=True)
    return seen["head"] is not seen["out"]


def check_keys(layout: Layout, kind: Any, written: Mapping[str, Any], asked: set[str], where: str) -> None:
    """Raise UserError for an attribute of the config, as the folder gives it, that stock code asks for and that does
    not follow from the keys that the layout is made from."""
    family = layout.family
    free = {*FREE_KEYS, *family.free_keys, *family.dropout.values()}
    free |= {known.initialisation.factor for known in FAMILIES}
    if layout.encoder_only:
        free.add("is_encoder_decoder")  # published encoders have either
    expected = vars(kind(**understood(family, layout.config)))
    implementation = written.get("_attn_implementation_internal")
    if implementation not in ATTENTIONS:
        raise UserError(
            f"{where}: asks for the attention implementation {shown(implementation)}, about which nothing is known;"
            " remove the key"
        )
    for name in sorted(asked - free - {"_attn_implementation_internal"}):
        found, wanted = written.get(name, _ABSENT), expected.get(name, _ABSENT)
        if found is not wanted and (type(found) is not type(wanted) or found != wanted):
            spelt = [k for k, v in layout.config.items() if kind.attribute_map.get(k, k) == name and v == found]
            value = f"is {shown(found)}" if found is not _ABSENT else "is missing"
            follows = f"to be {wanted!r}" if wanted is not _ABSENT else "not to be there"
            raise UserError(
                f"{where}: {next(iter(spelt), name)!r} {value}, which stock code goes by, where the other keys ask for"
                f" it {follows}; remove it, or take the file from the original checkpoint"
            )


def understood(family: Family, config: Mapping[str, object]) -> dict[str, object]:
    """Return the keys that a layout is made from, with their values in a config or those that stock code takes."""
    keys = {factor for product in family.sizes.values() for factor in product}
    keys |= {*family.defaults, family.encoder.layers, family.decoder.layers, "model_type"}
    found = {key: config_value(family, config, key) for key in keys if key in config or key in family.defaults}
    for key in filter(None, (family.eps_key, family.output_scale_key)):
        if config.get(key) is not None:
            found[key] = config[key]
    return found
