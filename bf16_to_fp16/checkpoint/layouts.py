"""The layouts that ``convert`` writes, of which one is a folder and the others files, and the tools that read these.

ComfyUI and Wan's code compute encoders with classes of their own: with an eps that no file can change, for ComfyUI's
decoder-only ones (``comfy/text_encoders/llama.py`` of https://github.com/comfyanonymous/ComfyUI) of a few sizes alone.
What a pipeline there reads of such an encoder decides whether its stream may be scaled: last states and what enters a
norm may, inner states that enter a linear may not, since that linear is in another file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import UserError
from ..numerics import FP16_MAX
from .naming import STOCK, WAN, Naming

GELU, RELU = "gelu_new", "relu"  # the activations that the tools' classes of T5 have, by stock names
TANH, SILU = ("gelu_pytorch_tanh",), ("silu",)  # those of their decoder-only classes
FOLDER_LAYOUT = "hf"  # a folder of stock names, the only layout that is not one file


@dataclass(frozen=True)
class Size:
    """One size of which a tool has a class: the numbers of a config by their keys, beside those that all have. ``fit``:
    the pipelines that read its last states, or inner ones through a norm. ``unfit``: those that read inner states
    through a linear. ``left_out``: what its published config has beside ``Hosted.fixed`` and the tool leaves out."""

    title: str
    numbers: Mapping[str, int]
    fit: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()
    left_out: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Hosted:
    """How a tool computes encoders of one model type.

    ``naming``: of its tensors. ``eps``: of its norms, which no file can change. ``activations``: those that it has.
    ``target``: what suits it where that costs little. ``tokenizer``: the tensor whose bytes are its tokenizer, and the
    file in a folder that has them, "" where the tool has its own. ``sizes``: none where it takes any. ``stock``: the
    class whose names ``naming`` translates, "" where tensors tell it. ``fixed``: what its classes compute, by keys of
    the text model's stock config, of a tuple layer by layer and over again; None for nothing. ``mask``: what its masks
    take from a score in fp16.
    """

    title: str
    naming: Naming = STOCK
    eps: float = 1e-6
    activations: tuple[str, ...] = (GELU, RELU)
    target: str = "norm-safe"  # for activations that a node or a fork makes fp16: norms then square in fp16
    tokenizer: tuple[str, str] = ("", "")
    sizes: tuple[Size, ...] = ()
    stock: str = ""
    fixed: Mapping[str, object] = field(default_factory=dict)
    mask: float = FP16_MAX

    def size_of(self, config: Mapping[str, object]) -> Size | None:
        """Return its size with the numbers of a config, None where it has none."""
        return next((size for size in self.sizes if all(config.get(k) == v for k, v in size.numbers.items())), None)


SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "head_dim", "vocab_size")  # fmt: skip
"""Keys of a config in the order in which ``sized`` takes their numbers."""


def sized(title: str, shape: str, fit: str = "", unfit: str = "", left_out: Mapping[str, object] | None = None) -> Size:
    """Return a size; shape: width, neurons, layers, heads, heads of keys, channels of a head and vocabulary in one
    string, fit and unfit: names apart by commas."""
    numbers = dict(zip(SHAPE, map(int, shape.split()), strict=True))
    fits, unfits = (tuple(name for name in each.split(", ") if name) for each in (fit, unfit))
    return Size(title, numbers, fits, unfits, left_out or {})


def turned(base: float) -> dict[str, object]:
    """Return the keys of rotary positions of this base, in every layer alike."""
    return {"rope_parameters.rope_theta": base, "rope_parameters.rope_type": "default"}


def naming(*beginnings: tuple[str, str]) -> Naming:
    """Return how ComfyUI names a decoder-only encoder; beginnings: of stock names and of its own."""
    return Naming("ComfyUI's", ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight"), beginnings=beginnings)


TEXT = naming(("", "model."))  # a text model that stands alone
STACK = (("language_model.", "model."), ("language_model.model.", "model."))  # the second is how files name it
PROJECTED = ("multi_modal_projector.", "multi_modal_projector.")
PLAIN = {"attention_bias": False, "mlp_bias": False, "sliding_window": None}
SPIECE, TEKKEN = ("spiece_model", "tokenizer.model"), ("tekken_model", "tekken.json")

LLAMA = Hosted(
    "Llama",
    TEXT,
    1e-5,
    SILU,
    "half",
    sizes=(
        sized("Llama 3 8B", "4096 14336 32 32 8 128 128320", unfit="HunyuanVideo"),
        sized(
            "Llama 3.1 8B",
            "4096 14336 32 32 8 128 128256",
            unfit="HiDream",
            left_out={"rope_parameters.rope_type": "llama3"},
        ),
    ),
    stock="LlamaModel",
    fixed=PLAIN | turned(5e5),
    mask=FP16_MAX / 4,
)
MISTRAL = replace(
    LLAMA,
    title="Mistral 3",
    tokenizer=TEKKEN,
    sizes=(sized("Mistral Small 3 24B", "5120 32768 40 32 8 128 131072", unfit="Flux 2"),),
    stock="MistralModel",
    fixed=PLAIN | turned(1e9) | {"model_type": "mistral"},
)
QWEN3 = replace(
    LLAMA,
    title="Qwen3",
    eps=1e-6,
    sizes=(
        sized("Qwen3 0.6B", "1024 3072 28 16 8 128 151936", "Anima"),
        sized("Qwen3 1.7B", "2048 6144 28 16 8 128 151936", "Ovis-Image"),
        sized("Qwen3 4B", "2560 9728 36 32 8 128 151936", "Z-Image", "Flux 2 Klein"),
        sized("Qwen3 8B", "4096 12288 36 32 8 128 151936", unfit="Flux 2 Klein"),
    ),
    stock="Qwen3Model",
    fixed=PLAIN | turned(1e6),
)
QWEN2_5_VL = replace(
    QWEN3,
    title="Qwen2.5-VL",
    naming=naming(*STACK, ("model.", "model."), ("visual.", "visual.")),
    sizes=(
        sized("Qwen2.5-VL 3B", "2048 11008 36 16 2 128 151936", "OmniGen2"),
        sized(
            "Qwen2.5-VL 7B",
            "3584 18944 28 28 4 128 152064",
            "Qwen-Image, LongCat-Image",
            "HunyuanImage, HunyuanVideo 1.5, Kandinsky 5",
        ),
    ),
    stock="Qwen2_5_VLModel",
)
GEMMA = {"query_pre_attn_scalar": 256, "use_bidirectional_attention": False}
GEMMA2 = replace(
    QWEN3,
    title="Gemma 2",
    activations=TANH,
    tokenizer=SPIECE,
    sizes=(
        sized(
            "Gemma 2 2B",
            "2304 9216 26 8 4 256 256000",
            "Lumina 2",
            left_out={"attn_logit_softcapping": 50.0, "sliding_window": 4096},
        ),
    ),
    stock="Gemma2Model",
    fixed=GEMMA | turned(1e4) | {"attn_logit_softcapping": None, "sliding_window": None},
)
LAYERS = (*["sliding_attention"] * 5, "full_attention")
FAR = {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}
NEAR = {"rope_theta": 1e4, "rope_type": "default"}
GEMMA3 = replace(
    GEMMA2,
    title="Gemma 3",
    sizes=(
        sized("Gemma 3 4B", "2560 10240 34 8 4 256 262208", "NewBie"),
        sized("Gemma 3 12B", "3840 15360 48 16 8 256 262208", "LTX-2"),
    ),
    stock="Gemma3TextModel",
    fixed=GEMMA
    | {f"rope_parameters.{LAYERS[5]}.{key}": value for key, value in FAR.items()}
    | {f"rope_parameters.{LAYERS[0]}.{key}": value for key, value in NEAR.items()}
    | {"sliding_window": 1024, "layer_types": LAYERS},
)

COMFY_MODELS = {
    "t5": Hosted("T5"),
    "umt5": Hosted("UMT5", tokenizer=("spiece_model", "spiece.model")),
    "mt5": Hosted("mT5"),
    "llama": LLAMA,
    "mistral": replace(MISTRAL, title="Mistral"),
    "mistral3": replace(
        MISTRAL, naming=naming(*STACK, ("vision_tower.", "vision_tower."), PROJECTED), stock="Mistral3Model"
    ),
    "qwen3": QWEN3,
    "qwen2_5_vl": QWEN2_5_VL,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gemma3": replace(
        GEMMA3,
        naming=naming(
            *STACK, ("vision_tower.", "vision_model."), ("vision_tower.vision_model.", "vision_model."), PROJECTED
        ),
        stock="Gemma3Model",
    ),
}
"""By model type what ComfyUI has classes for: ``detect_te_model`` in ``comfy/sd.py``."""

WAN_MODELS = {"umt5": Hosted("UMT5", WAN, activations=(GELU,), target="half")}  # whose norms are fp32

TOKENIZERS = tuple(sorted({hosted.tokenizer[0] for hosted in COMFY_MODELS.values()} - {""}))
"""Tensors that are no weights but the bytes of a tokenizer's file."""


@dataclass(frozen=True)
class FileLayout:
    """A layout of one file, and who reads it, as a card says. ``tool``: the tool that has classes of its own for it, of
    ``models`` by model type; None for stock names and stock classes."""

    name: str
    readers: str
    tool: str | None = None
    models: Mapping[str, Hosted] = field(default_factory=dict)

    def hosted(self, model_type: object) -> Hosted | None:
        """Return how its tool computes models of a type, None where it has no class for them."""
        return self.models.get(str(model_type))

    def naming(self, model_type: object) -> Naming:
        """Return how the tensors of a model of a type are named in it."""
        hosted = self.hosted(model_type)
        return STOCK if hosted is None else hosted.naming

    def tokenizer_in(self, folder: Path, model_type: object) -> tuple[str, Path] | None:
        """Return the tensor that is to stand for the tokenizer in a folder, with its file; None where there is none, or
        the tool has its own."""
        hosted = self.hosted(model_type)
        name, file = ("", "") if hosted is None else hosted.tokenizer
        return (name, folder / file) if name and (folder / file).is_file() else None

    def check_model(self, model_type: object, where: str) -> None:
        """Raise UserError for a model of a type that the tool has no class for."""
        if self.tool is not None and model_type not in self.models:
            *most, last = dict.fromkeys(hosted.title for hosted in self.models.values())
            reads = f"{', '.join(most)} or {last}" if most else last
            raise UserError(
                f"{where}: {self.tool} reads the encoder of {reads}, and this is {model_type!r}; leave out --layout,"
                " and give --eps fixed if its reader has an eps of its own"
            )


LAYOUTS: Mapping[str, FileLayout] = {
    layout.name: layout
    for layout in (
        FileLayout("comfy", "ComfyUI, Forge", "ComfyUI", COMFY_MODELS),
        FileLayout("wan", "Wan's tools", "Wan", WAN_MODELS),
        FileLayout("single", "any tool, stock names"),
    )
}
"""The layouts of one file, by the names that ``--layout`` has for them."""

LAYOUT_NAMES = (FOLDER_LAYOUT, *LAYOUTS)  # what ``--layout`` takes
