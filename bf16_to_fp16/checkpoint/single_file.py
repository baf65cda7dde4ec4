"""One file of weights as a source, as ComfyUI, Forge and Wan's tools keep text encoders, opened as a scratch folder."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import UserError, shortened
from ..json_text import write_json
from . import files, formats, headers
from .disk import FREE_SPACE_REMEDY, writing
from .naming import SPIECE, SPIECE_FILE, STOCK, Naming, found_in
from .packed import undo_data_of
from .places import RESTORE

ASIDE = (  # endings of tensors' names that are not weights
    *(".scale_weight", ".weight_scale", ".scale_input", ".input_scale", ".comfy_quant", "scaled_fp8", "logit_scale"),
    SPIECE,
)

SCRATCH_REMEDY = f"{FREE_SPACE_REMEDY}, or set TMPDIR"
SCRATCH: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


@dataclass(frozen=True)
class SingleFile:
    """``folder``: scratch, with config and tokenizer. ``tensors``: by stock names. ``notes``: the assumptions made."""

    file: Path
    folder: Path
    config: dict[str, Any]
    tensors: dict[str, headers.TensorInfo]
    states: dict[Path, formats.FileState]
    notes: tuple[str, ...]


def open_single_file(file: Path, prefix: str | None, config: Path | Mapping[str, Any] | None) -> SingleFile:
    """Open one file of weights. prefix: of one encoder's tensors among several. config: replaces the inferred one."""
    state = formats.state_of(file)
    every = read_any(file)
    inside = undo_data_of(file) if config is None else None
    if inside is not None and inside["layout"] == "single":
        before, naming = f"{prefix}." if prefix else "", STOCK
    else:
        before, naming = the_encoder(file, every, prefix)
    mine = {name.removeprefix(before): info for name, info in every.items() if name.startswith(before)}
    own = {naming.to_stock(name): info for name, info in mine.items() if not name.endswith(ASIDE)}
    tensors = {name: replace(info, name=name) for name, info in sorted(own.items())}
    if len(tensors) < sum(not name.endswith(ASIDE) for name in mine):
        raise UserError(f"{file}: holds a tensor under two names at once; {RESTORE}")
    settled, notes = settled_config(file, tensors, config)
    if before:
        others = sum(not name.startswith(before) for name in every)
        notes.append(f"{file.name}: takes the {len(mine)} tensors under {before}* and leaves {others} others")
    SCRATCH.append(tempfile.TemporaryDirectory(prefix="bf16-to-fp16-"))
    folder = Path(SCRATCH[-1].name).resolve()
    states = {file: state}
    for name, info in tensors.items():
        headers.check_not_quantised(info.dtype, name, file)
    dtypes = [info.dtype for info in tensors.values()]
    settled.setdefault("torch_dtype", DTYPES.get(max(sorted(set(dtypes)), key=dtypes.count), "float32"))
    with writing(folder, SCRATCH_REMEDY):
        write_json(folder / "config.json", settled)
        models = [name for name, info in every.items() if name.split(".")[-1] == SPIECE and info.dtype == "U8"]
        carried = models if len(models) == 1 else []
        for name in carried:  # byte for byte a stock folder's file
            values = formats.read_range(every[name], every[name].shape, 0)
            (folder / SPIECE_FILE).write_bytes(formats.bytes_of(values))
    if aside := [name for name in sorted(mine) if name.endswith(ASIDE) and before + name not in carried]:
        notes.append(f"{file.name}: leaves out {shortened(', '.join(aside))}, which stock code does not read")
    return SingleFile(file, folder, settled, tensors, states, tuple(notes))


def read_any(file: Path) -> dict[str, headers.TensorInfo]:
    safetensors = file.suffix in (".safetensors", ".sft")
    tensors = headers.read_whole_header(file, any_dtype=True)[0] if safetensors else formats.read_pickle(file)
    if not tensors:
        raise UserError(f"{file}: no tensors in it; {RESTORE}")
    return tensors


def the_encoder(file: Path, tensors: Mapping[str, headers.TensorInfo], prefix: str | None) -> tuple[str, Naming]:
    encoders = found_in(tensors)
    if prefix is not None:
        wanted = f"{prefix.rstrip('.')}." if prefix else ""
        encoders = [pair for pair in encoders if pair[0] == wanted]
    if len(encoders) == 1:
        return encoders[0]
    if encoders:
        names = " or ".join((before.rstrip(".") or "''") for before, _ in encoders)
        raise UserError(f"{file}: holds {len(encoders)} T5 models; name one with --subfolder: {names}")
    under = "" if prefix is None else f" under {formats.shown(prefix)}"
    some = formats.shown(min(tensors))
    raise UserError(
        f"{file}: no T5 in it{under}, by its stock names or Wan's (its first tensor is {some});"
        " give the file of the text encoder, or a checkpoint's folder"
    )


def settled_config(
    file: Path, tensors: Mapping[str, headers.TensorInfo], config: Path | Mapping[str, Any] | None
) -> tuple[dict[str, Any], list[str]]:
    if config is not None:
        return given_config(config, tensors), []
    if (inside := undo_data_of(file)) is not None:
        return given_config(inside["config"], tensors), [f"{file.name}: has its config inside, from its conversion"]
    inferred = inferred_config(tensors, str(file))
    whole = bool(inferred["is_encoder_decoder"])
    inferred["architectures"] = [CLASSES[inferred["model_type"]][whole]]
    return inferred, [f"{file.name}: {described(inferred)}, told from names and shapes (--config FILE overrides it)"]


# --- its config ------------------------------------------------------------------------------------------------------

# Names and shapes give nearly all of a T5's config: the bias table has a column for each head, gates have two matrices,
# UMT5 has a bias table in every block. The rest (activation, pad and end ids, largest bucket distance, eps) is taken
# from the published models.
GIVE = "give its config.json with --config FILE"

CLASSES = {  # stock classes by model type: an encoder alone, and a whole model
    "t5": ("T5EncoderModel", "T5ForConditionalGeneration"),
    "mt5": ("MT5EncoderModel", "MT5ForConditionalGeneration"),
    "umt5": ("UMT5EncoderModel", "UMT5ForConditionalGeneration"),
}

TITLES = {"t5": "T5", "mt5": "mT5", "umt5": "UMT5"}

VOCABULARIES = {32_128: "t5", 384: "t5", 250_112: "mt5", 256_384: "umt5"}  # by size in published models

SILU = {(4096, 16_384)}  # widths of stream and feed-forward in published models with SiLU gates (UL2)

ATTENTION, FEED_FORWARD = "encoder.block.0.layer.0.SelfAttention", "encoder.block.0.layer.1.DenseReluDense"
EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def inferred_config(tensors: Mapping[str, headers.TensorInfo], where: str) -> dict[str, Any]:
    """Return the stock config of these tensors; raise UserError where names and shapes leave it open."""

    def sizes(name: str) -> tuple[int, int]:
        info = tensors.get(name)
        if info is None or len(info.shape) != 2:
            raise UserError(f"{where}: no matrix {name}, from which its config could be told; {GIVE}")
        return info.shape[0], info.shape[1]

    embedding = next((name for name in EMBEDDINGS if name in tensors), EMBEDDINGS[0])
    vocabulary, width = sizes(embedding)
    buckets, heads = sizes(f"{ATTENTION}.relative_attention_bias.weight")
    inner, _ = sizes(f"{ATTENTION}.q.weight")
    if not heads or inner % heads:
        raise UserError(f"{where}: {inner} rows of queries are not those of {heads} heads; {GIVE}")
    gated = f"{FEED_FORWARD}.wi_0.weight" in tensors
    hidden, _ = sizes(f"{FEED_FORWARD}.{'wi_0' if gated else 'wi'}.weight")
    layers, decoder_layers = number_of_blocks(tensors, "encoder", where), number_of_blocks(tensors, "decoder", where)
    model_type = type_of(tensors, vocabulary, layers, where)
    silu = gated and (width, hidden) in SILU
    config = {
        "model_type": model_type,
        "d_model": width,
        "d_kv": inner // heads,
        "d_ff": hidden,
        "num_heads": heads,
        "num_layers": layers,
        "num_decoder_layers": decoder_layers or layers,
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
        "is_encoder_decoder": bool(decoder_layers),
        "use_cache": bool(decoder_layers),
    }
    if decoder_layers:
        config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    return config


def number_of_blocks(tensors: Mapping[str, headers.TensorInfo], stack: str, where: str) -> int:
    blocks = {int(m[1]) for name in tensors if (m := re.match(rf"{stack}\.block\.(\d{{1,6}})\.", name))}
    if blocks and max(blocks) != len(blocks) - 1:
        missing = min(set(range(len(blocks))) - blocks)
        raise UserError(f"{where}: block {missing} of the {stack} is missing; fetch the whole file again")
    return len(blocks)


def type_of(tensors: Mapping[str, headers.TensorInfo], vocabulary: int, layers: int, where: str) -> str:
    ending = "SelfAttention.relative_attention_bias.weight"
    tables = sum(name.startswith("encoder.block.") and name.endswith(ending) for name in tensors)
    known = VOCABULARIES.get(vocabulary, "t5")
    if layers == 1:
        return known
    if tables not in (1, layers):
        raise UserError(
            f"{where}: {tables} of {layers} blocks have a bias table, where T5 has one and UMT5 one in every block;"
            f" fetch the whole file again, or {GIVE}"
        )
    if (tables == 1) == (known == "umt5"):
        if tables == 1:
            raise UserError(
                f"{where}: its vocabulary of {vocabulary} is UMT5's, but only one block has a bias table; {GIVE}"
            )
        return "umt5"
    return known


def given_config(config: Path | Mapping[str, Any], tensors: Mapping[str, headers.TensorInfo]) -> dict[str, Any]:
    """Return a given config with the class that fits the tensors: an encoder's where there is no decoder."""
    read = files.read_json(config, "config") if isinstance(config, Path) else dict(config)
    model_type = str(read.get("model_type"))
    if model_type in CLASSES:
        whole = any(name.startswith("decoder.block.") for name in tensors)
        read["architectures"] = [CLASSES[model_type][whole]]
    return read


def described(config: Mapping[str, Any]) -> str:
    title = TITLES.get(str(config.get("model_type")), shortened(str(config.get("model_type"))))
    whole = "" if config["is_encoder_decoder"] else " encoder"
    return (
        f"{title}{whole}, {config['num_layers']} layers of width {config['d_model']:,}, {config['num_heads']} heads of"
        f" {config['d_kv']}, {config['feed_forward_proj']} feed-forward of {config['d_ff']:,}, vocabulary of"
        f" {config['vocab_size']:,}"
    )
