"""Translate tensor names between files and transformers' modules. The layouts that ``convert`` can write are here too:
a folder or one file. This module imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from ..errors import UserError

SPIECE, SPIECE_FILE = "spiece_model", "spiece.model"  # a tensor with the tokenizer's bytes, and the tokenizer's file
STOCK_BLOCK = "encoder.block.{i}.layer"

WAN_NAMES = (  # of wan/modules/t5.py in https://github.com/Wan-Video/Wan2.1, which fixes the eps in fp32
    ("shared.weight", "token_embedding.weight"),
    ("encoder.final_layer_norm.weight", "norm.weight"),
    (f"{STOCK_BLOCK}.0.layer_norm.weight", "blocks.{i}.norm1.weight"),
    *((f"{STOCK_BLOCK}.0.SelfAttention.{x}.weight", f"blocks.{{i}}.attn.{x}.weight") for x in "qkvo"),
    (f"{STOCK_BLOCK}.0.SelfAttention.relative_attention_bias.weight", "blocks.{i}.pos_embedding.embedding.weight"),
    (f"{STOCK_BLOCK}.1.layer_norm.weight", "blocks.{i}.norm2.weight"),
    (f"{STOCK_BLOCK}.1.DenseReluDense.wi_0.weight", "blocks.{i}.ffn.gate.0.weight"),
    (f"{STOCK_BLOCK}.1.DenseReluDense.wi_1.weight", "blocks.{i}.ffn.fc1.weight"),
    (f"{STOCK_BLOCK}.1.DenseReluDense.wo.weight", "blocks.{i}.ffn.fc2.weight"),
    # One table for all blocks, as in T5: Wan's class allows it, the published files have none.
    (f"{STOCK_BLOCK}.0.SelfAttention.relative_attention_bias.weight".format(i=0), "pos_embedding.embedding.weight"),
)


@dataclass(frozen=True)
class Naming:
    """The tensor names in a program's files. ``title``: the program, for messages. ``anchors``: names that every file
    has. ``pairs``: the name in transformers and the name in the file, with ``{i}`` for a layer's number."""

    title: str
    anchors: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...] = ()

    def to_stock(self, name: str) -> str:
        return translated(name, tuple((own, stock) for stock, own in self.pairs))

    def from_stock(self, name: str) -> str:
        own = translated(name, self.pairs)
        if self.pairs and own == name:
            raise UserError(f"{self.title} has no place for tensor {name}; choose --layout single")
        return own


STOCK = Naming("stock code", ("encoder.block.0.layer.0.SelfAttention.q.weight", "encoder.final_layer_norm.weight"))
WAN = Naming("Wan's own T5", ("blocks.0.attn.q.weight", "token_embedding.weight", "norm.weight"), WAN_NAMES)

WITH_IMAGES = {
    ("multi_modal_projector.", "language_model."): (
        ("language_model.lm_head.", "lm_head."),
        ("language_model.model.", "model.language_model."),
        ("vision_tower.vision_model.", "model.vision_tower."),
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ),
    ("visual.", "model.layers."): (("visual.", "model.visual."), ("model.", "model.language_model.")),
}
"""How files of LLaVA and Qwen2.5-VL name tensors. A key holds two prefixes of names that identify such files. The value
pairs each prefix in files with its prefix in transformers' modules. transformers 4.57 reads a vision tower only by its
names in files."""


def names_in_files(names: Iterable[str], source: str, classes: Iterable[object]) -> dict[str, str]:
    """Return a dictionary from tensor names in transformers' modules to tensor names in files. It has only the tensors
    whose two names differ. names: all tensor names in the files. source: the checkpoint's name, for errors. classes:
    the config's ``architectures``. Raises UserError if the files hold a tensor under two names."""
    names = frozenset(names)
    # Such a class has no head, so its module names lack the prefix.
    around = "model." if str(next(iter(classes), "")).endswith("Model") else ""
    kinds = (k for k in WITH_IMAGES if all(any(name.startswith(begin) for name in names) for begin in k))
    if (kind := next(kinds, None)) is None:
        return {}
    stored: dict[str, str] = {}
    for name in sorted(names):
        for begin, other in WITH_IMAGES[kind]:
            if name.startswith(begin):
                module = (other + name.removeprefix(begin)).removeprefix(around)
                if module == name:
                    break
                if module in stored or module in names:
                    twin = stored.get(module, module)
                    raise UserError(f"{source}: holds tensor {name} also as {twin}; remove one of them")
                stored[module] = name
                break
    return stored


def name_in_modules(name: str, known: Collection[str]) -> str:
    """Return the name that the tensor ``name`` of a file has in the loaded module, or ``name`` if no other is known.
    known: all names in the module."""
    if name in known:
        return name
    others = (
        other + name.removeprefix(begin)
        for (own, _), pairs in WITH_IMAGES.items()
        if any(f".{own}" in f".{each}" for each in known)
        for begin, other in pairs
        if name.startswith(begin)
    )
    spellings = (spelling for other in others for spelling in (other, other.removeprefix("model.")))
    return next((spelling for spelling in spellings if spelling in known), name)


@cache
def pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{i\}", r"(?P<i>\d+)"))


def translated(name: str, table: Iterable[tuple[str, str]]) -> str:
    for one, other in table:
        if match := pattern(one).fullmatch(name):
            return other.format(**match.groupdict())
    return name


FOLDER_LAYOUT = "hf"  # a folder with stock names; every other layout is one file


@dataclass(frozen=True)
class FileLayout:
    """A value of ``--layout`` that writes one file. ``readers``: the programs that read it, for messages.
    ``model_type``, ``eps``: the only model type and norm eps that these programs support; None for any."""

    name: str
    readers: str
    naming: Naming = STOCK
    model_type: str | None = None
    eps: float | None = None

    def check_model(self, model_type: object, where: str) -> None:
        if self.model_type not in (None, model_type):
            raise UserError(
                f"{where}: {self.readers} can load only an encoder of {self.model_type}, and this model is"
                f" {model_type!r}; leave out --layout"
            )


LAYOUTS: Mapping[str, FileLayout] = {
    "wan": FileLayout("wan", "Wan's tools", WAN, "umt5", 1e-6),
    "single": FileLayout("single", "any tool"),
}

LAYOUT_NAMES = (FOLDER_LAYOUT, *LAYOUTS)  # values of ``--layout``
