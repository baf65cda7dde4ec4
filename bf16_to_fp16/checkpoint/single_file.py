"""Open a single file of weights as a temporary folder. Forge and Wan's tools store a T5 encoder as such a file."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import UserError, shortened
from ..json_text import write_json
from . import formats, headers
from .files import FREE_SPACE_REMEDY, writing
from .naming import SPIECE, SPIECE_FILE, STOCK, WAN
from .recorded import summary_of
from .sources import RESTORE

ASIDE = (  # endings of tensors' names that are not weights, as ComfyUI's files have them
    *(".scale_weight", ".weight_scale", ".scale_input", ".input_scale", ".comfy_quant", "scaled_fp8", "logit_scale"),
    SPIECE,
)

SCRATCH: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


def open_single_file(file: Path) -> tuple[Path, dict[str, Any], dict[str, headers.TensorInfo], tuple[str, ...]]:
    """Open a single file of a T5 encoder's weights as a temporary folder with its config and tokenizer. Return the
    folder, the config, the tensors by their names in transformers, and notes on what was assumed."""
    safetensors = file.suffix in (".safetensors", ".sft")
    every = headers.read_whole_header(file)[0] if safetensors else formats.read_pickle(file)
    if not every:
        raise UserError(f"{file}: no tensors in it; {RESTORE}")
    inside = summary_of(file)
    of_ours = inside is not None and inside["layout"] == "single"
    naming = STOCK if of_ours else next((n for n in (STOCK, WAN) if every.keys() >= {*n.anchors}), None)
    if naming is None:
        raise UserError(
            f"{file}: holds no T5 encoder with the tensor names of transformers or Wan, but for example"
            f" {formats.shown(min(every))}; give the file of the text encoder alone, or a checkpoint's folder"
        )
    own = {naming.to_stock(name): info for name, info in every.items() if not name.endswith(ASIDE)}
    tensors = {name: replace(info, name=name) for name, info in sorted(own.items())}
    aside = sorted(name for name in every if name.endswith(ASIDE))
    if len(tensors) + len(aside) < len(every):
        raise UserError(f"{file}: two names in it stand for one tensor of the model; {RESTORE}")
    notes = []
    if inside is not None:
        settled = recorded_config(inside["config"], tensors)
        notes.append(f"{file.name}: has its config inside, from its conversion")
    else:
        settled = inferred_config(tensors, str(file))
        (name,) = settled["architectures"]
        notes.append(f"{file.name}: class {name}, as names and shapes of its tensors show")
    SCRATCH.append(tempfile.TemporaryDirectory(prefix="bf16-to-fp16-"))
    folder = Path(SCRATCH[-1].name).resolve()
    for name, info in tensors.items():
        headers.check_not_quantised(info.dtype, name, file)
    dtypes = [info.dtype for info in tensors.values()]
    settled.setdefault("torch_dtype", DTYPES.get(max(sorted(set(dtypes)), key=dtypes.count), "float32"))
    with writing(folder, f"{FREE_SPACE_REMEDY}, or set TMPDIR"):
        write_json(folder / "config.json", settled)
        if SPIECE in every and every[SPIECE].dtype == "U8":  # byte for byte a stock folder's file
            values = formats.read_range(every[SPIECE], every[SPIECE].shape, 0)
            (folder / SPIECE_FILE).write_bytes(formats.bytes_of(values))
            aside.remove(SPIECE)
    if aside:
        notes.append(f"{file.name}: leaves out {shortened(', '.join(aside))}, which transformers does not read")
    return folder, settled, tensors, tuple(notes)


# --- its config ------------------------------------------------------------------------------------------------------

# Names and shapes give nearly all of an encoder's config: the bias table has a column for each head, gates have two
# matrices, UMT5 has a bias table in every block. The rest (activation, pad and end ids, largest bucket distance, eps)
# is taken from the published models.

CLASSES = {  # stock classes by model type: an encoder alone, and a whole model
    "t5": ("T5EncoderModel", "T5ForConditionalGeneration"),
    "mt5": ("MT5EncoderModel", "MT5ForConditionalGeneration"),
    "umt5": ("UMT5EncoderModel", "UMT5ForConditionalGeneration"),
}

ATTENTION, FEED_FORWARD = "encoder.block.0.layer.0.SelfAttention", "encoder.block.0.layer.1.DenseReluDense"
BIASES = ".SelfAttention.relative_attention_bias.weight"
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def inferred_config(tensors: Mapping[str, headers.TensorInfo], where: str) -> dict[str, Any]:
    """Infer an encoder's config from the names and shapes of its tensors. Raises UserError if a needed matrix is
    missing. where: the file, for error messages."""

    def sizes(name: str) -> tuple[int, int]:
        info = tensors.get(name)
        if info is None or len(info.shape) != 2 or 0 in info.shape:
            raise UserError(
                f"{where}: no matrix {name}, so its config cannot be inferred; give the checkpoint's folder"
            )
        return info.shape[0], info.shape[1]

    vocabulary, width = sizes("shared.weight" if "shared.weight" in tensors else "encoder.embed_tokens.weight")
    buckets, heads = sizes(f"{ATTENTION}.relative_attention_bias.weight")
    inner, _ = sizes(f"{ATTENTION}.q.weight")
    gated = f"{FEED_FORWARD}.wi_0.weight" in tensors
    hidden, _ = sizes(f"{FEED_FORWARD}.{'wi_0' if gated else 'wi'}.weight")
    layers = len({m[0] for name in tensors if (m := re.match(r"encoder\.block\.\d+\.", name))})
    tables = sum(name.endswith(BIASES) for name in tensors)
    by_vocabulary = {250_112: "mt5", 256_384: "umt5"}  # of published models; T5 has others
    model_type = "umt5" if tables == layers > 1 else by_vocabulary.get(vocabulary, "t5")
    silu = gated and (width, hidden) == (4096, 16_384)  # of UL2, the published model with SiLU gates
    return {
        "architectures": [CLASSES[model_type][0]],
        "model_type": model_type,
        "d_model": width,
        "d_kv": inner // heads,
        "d_ff": hidden,
        "num_heads": heads,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "vocab_size": vocabulary,
        "feed_forward_proj": "gated-silu" if silu else "gated-gelu" if gated else "relu",
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "dropout_rate": 0.1,
        "initializer_factor": 1.0,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
        "is_encoder_decoder": False,
        "use_cache": False,
    }


def recorded_config(config: Mapping[str, Any], tensors: Mapping[str, headers.TensorInfo]) -> dict[str, Any]:
    """Return a file's recorded config with the class that fits the tensors: an encoder's if there is no decoder."""
    read = dict(config)
    model_type = str(read.get("model_type"))
    if model_type in CLASSES:
        whole = any(name.startswith("decoder.block.") for name in tensors)
        read["architectures"] = [CLASSES[model_type][whole]]
    return read
