"""What tensors are called: those of a T5 encoder in stock code and in Wan's, and those of a stock class with images in
its modules and in its files; and the layouts that ``convert`` writes, of which one is a folder and the others files.

ComfyUI, Forge, SD3's and Flux's files have the stock names, in a bundle behind a prefix. Wan's own T5
(``wan/modules/t5.py`` of https://github.com/Wan-Video/Wan2.1) names the same tensors otherwise, one by one. The
command line reads the layouts before anything heavy is imported, so nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from ..errors import UserError

STOCK_BLOCK = "encoder.block.{i}.layer"

WAN_NAMES = (
    ("shared.weight", "token_embedding.weight"),
    ("encoder.final_layer_norm.weight", "norm.weight"),
    (f"{STOCK_BLOCK}.0.layer_norm.weight", "blocks.{i}.norm1.weight"),
    *((f"{STOCK_BLOCK}.0.SelfAttention.{x}.weight", f"blocks.{{i}}.attn.{x}.weight") for x in "qkvo"),
    (f"{STOCK_BLOCK}.0.SelfAttention.relative_attention_bias.weight", "blocks.{i}.pos_embedding.embedding.weight"),
    (f"{STOCK_BLOCK}.1.layer_norm.weight", "blocks.{i}.norm2.weight"),
    (f"{STOCK_BLOCK}.1.DenseReluDense.wi_0.weight", "blocks.{i}.ffn.gate.0.weight"),
    (f"{STOCK_BLOCK}.1.DenseReluDense.wi_1.weight", "blocks.{i}.ffn.fc1.weight"),
    (f"{STOCK_BLOCK}.1.DenseReluDense.wo.weight", "blocks.{i}.ffn.fc2.weight"),
    # One table for all blocks, as in T5: not in the published files, but in what their class can be.
    (f"{STOCK_BLOCK}.0.SelfAttention.relative_attention_bias.weight".format(i=0), "pos_embedding.embedding.weight"),
)
"""Stock names and Wan's, ``{i}`` for a block's number."""

WAN_MODELS = {"umt5": "UMT5"}  # model types, with their titles, that Wan's code has a class for
COMFY_MODELS = {"t5": "T5", "umt5": "UMT5", "mt5": "mT5"}  # the same of ComfyUI's ``detect_te_model``
GELU, RELU = "gelu_new", "relu"  # the activations that the tools' classes have, by stock names
TOKENIZER_WITH_WEIGHTS = ("umt5",)  # model types of which ComfyUI takes the tokenizer from the file of the weights


@dataclass(frozen=True)
class Naming:
    """A way to name the tensors of a T5: ``pairs`` of the stock name and this one's, none where all are stock.
    ``anchors``: names that a file in this naming has, whatever its size."""

    title: str
    anchors: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...] = ()

    def to_stock(self, name: str) -> str:
        """Return the stock name of a tensor, and the name as it is where it is in no table."""
        return translated(name, tuple((own, stock) for stock, own in self.pairs))

    def from_stock(self, name: str) -> str:
        """Return what a tensor of this stock name is called; raise UserError where there is no such tensor."""
        own = translated(name, self.pairs)
        if self.pairs and own == name:
            raise UserError(f"{self.title} has no tensor for {name}; choose --layout comfy or single")
        return own


STOCK = Naming("stock code", ("encoder.block.0.layer.0.SelfAttention.q.weight", "encoder.final_layer_norm.weight"))
WAN = Naming("Wan's own T5", ("blocks.0.attn.q.weight", "token_embedding.weight", "norm.weight"), WAN_NAMES)
NAMINGS = (STOCK, WAN)

TOKENIZER = "spiece_model"  # under this name ComfyUI keeps the bytes of a SentencePiece model in a file of weights
TOKENIZER_FILE = "spiece.model"
FOLDER_LAYOUT = "hf"  # a folder of stock names, the only layout that is not one file


@dataclass(frozen=True)
class FileLayout:
    """A layout of one file: how its tensors are named, and who reads it, as a card says. ``tool``: the tool that has a
    T5 of its own for it. ``eps``: of that tool's norms, which no file can change. ``models``: the model types, with
    their titles, whose encoders it has a class for, of feed-forwards with one of ``activations``. ``tokenizers``: those
    whose tokenizer it takes from the file of weights. ``target``: what suits it where it costs little, None for any."""

    name: str
    naming: Naming
    readers: str
    tool: str | None = None
    eps: float | None = None
    models: Mapping[str, str] = field(default_factory=dict)
    activations: tuple[str, ...] = ()
    tokenizers: tuple[str, ...] = ()
    target: str | None = None

    def check_model(self, model_type: object, where: str) -> None:
        """Raise UserError for a model of a type that the tool has no class for."""
        if self.tool is not None and model_type not in self.models:
            *most, last = self.models.values()
            reads = f"{', '.join(most)} or {last}" if most else last
            raise UserError(
                f"{where}: {self.tool} reads the encoder of {reads}, and this is {model_type!r}; leave out --layout,"
                " and give --eps fixed if its reader has an eps of its own"
            )


LAYOUTS: Mapping[str, FileLayout] = {
    layout.name: layout
    for layout in (
        FileLayout(
            "comfy",
            STOCK,
            "ComfyUI, Forge",
            "ComfyUI",
            1e-6,
            COMFY_MODELS,
            (GELU, RELU),
            TOKENIZER_WITH_WEIGHTS,
            target="norm-safe",  # for activations that a node or a fork makes fp16: norms then square in fp16
        ),
        FileLayout("wan", WAN, "Wan's tools", "Wan", 1e-6, WAN_MODELS, (GELU,), target="half"),  # whose norms are fp32
        FileLayout("single", STOCK, "any tool, stock names"),
    )
}
"""The layouts of one file, by the names that ``--layout`` has for them."""

LAYOUT_NAMES = (FOLDER_LAYOUT, *LAYOUTS)  # what ``--layout`` takes

WITH_IMAGES = {
    ("language_model.", "multi_modal_projector."): (
        ("language_model.lm_head.", "lm_head."),
        ("language_model.model.", "model.language_model."),
        ("vision_tower.vision_model.", "model.vision_tower."),
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ),
    ("visual.", "model.layers."): (("visual.", "model.visual."), ("model.", "model.language_model.")),
}
"""How names begin in files of stock classes that read images as well, of LLaVA's kind and of Qwen2.5-VL's, and how in
their modules, by beginnings by which the kind is known: every version of transformers writes the former and reads
either, but 4.57 of a vision tower no other than its own."""


def names_in_files(names: Iterable[str], source: str, classes: Iterable[object]) -> dict[str, str]:
    """Return the names in the files of ``source`` of those tensors that modules call otherwise, by the modules' names;
    raise UserError for two tensors of one name. classes: that the config names; one without a head ends in ``Model``,
    and what stands in one with a head stands in none there."""
    names = frozenset(names)
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
                    raise UserError(f"{source}: tensor {name} is there as {twin} too; remove one of them")
                stored[module] = name
                break
    return stored


@cache
def pattern(template: str) -> re.Pattern[str]:
    """Return what matches the names of a template, with the block's number as its group."""
    return re.compile(re.escape(template).replace(r"\{i\}", r"(?P<i>\d+)"))


def translated(name: str, table: Iterable[tuple[str, str]]) -> str:
    """Return the name that a table of templates gives for another, the first that fits; else the name itself."""
    for one, other in table:
        if found := pattern(one).fullmatch(name):
            return other.format(**found.groupdict())
    return name


def found_in(names: Iterable[str]) -> list[tuple[str, Naming]]:
    """Return every prefix under which tensors of these names are a T5 encoder's, and how they are named there."""
    names = frozenset(names)
    found = []
    for naming in NAMINGS:
        first, *others = naming.anchors
        prefixes = (name.removesuffix(first) for name in names if name.endswith(first))
        found += [(p, naming) for p in prefixes if not p or p.endswith(".") if all(p + o in names for o in others)]
    return sorted(found, key=lambda pair: pair[0])
