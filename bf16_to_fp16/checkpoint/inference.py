"""The config of a T5 told from the names and shapes of its tensors, for a file that has none beside it.

Nearly all of it can be read off: the bias table has a column for each head, gates have two matrices, UMT5 has a bias
table in every block. What cannot be seen (the activation, the ids of pads and ends, the largest distance of the
buckets) is that of the published models, by table; eps is theirs too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError, shortened
from .formats import TensorInfo, read_json

GIVE = "give its config.json with --config FILE"

CLASSES = {
    "t5": ("T5EncoderModel", "T5ForConditionalGeneration"),
    "mt5": ("MT5EncoderModel", "MT5ForConditionalGeneration"),
    "umt5": ("UMT5EncoderModel", "UMT5ForConditionalGeneration"),
}
"""Stock classes by model type: of an encoder alone, and of a whole model."""

TITLES = {"t5": "T5", "mt5": "mT5", "umt5": "UMT5"}

VOCABULARIES = {32_128: "t5", 384: "t5", 250_112: "mt5", 256_384: "umt5"}
"""Model types by the vocabularies of the published models: T5 and Flan-T5, ByT5, mT5, UMT5."""

SILU = {(4096, 16_384)}
"""Widths of stream and feed-forward of the published models whose gate is SiLU's (UL2); all others have GELU's."""

ATTENTION, FEED_FORWARD = "encoder.block.0.layer.0.SelfAttention", "encoder.block.0.layer.1.DenseReluDense"
EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def inferred_config(tensors: Mapping[str, TensorInfo], where: str) -> dict[str, Any]:
    """Return the stock config of the model that these tensors, by their stock names, are. where: what messages call it.
    Raises UserError, with the way out, where names and shapes leave it open."""

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


def number_of_blocks(tensors: Mapping[str, TensorInfo], stack: str, where: str) -> int:
    """Return the number of blocks of a stack; raise UserError where one of them is missing."""
    found = {int(m[1]) for name in tensors if (m := re.match(rf"{stack}\.block\.(\d{{1,6}})\.", name))}
    if found and max(found) != len(found) - 1:
        missing = min(set(range(len(found))) - found)
        raise UserError(f"{where}: block {missing} of the {stack} is missing; fetch the whole file again")
    return len(found)


def type_of(tensors: Mapping[str, TensorInfo], vocabulary: int, layers: int, where: str) -> str:
    """Return the model type, by which blocks have a bias table, and by the vocabulary where that leaves it open."""
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


def given_config(config: Path | Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Return a config that was given for these tensors, by its file or as what that holds, with the class that suits
    them: an encoder's where there is no decoder."""
    read = read_json(config, "config") if isinstance(config, Path) else dict(config)
    model_type = str(read.get("model_type"))
    if model_type in CLASSES:
        whole = any(name.startswith("decoder.block.") for name in tensors)
        read["architectures"] = [CLASSES[model_type][whole]]
    return read


def described(config: Mapping[str, Any]) -> str:
    """Return a config in a few words."""
    title = TITLES.get(str(config.get("model_type")), shortened(str(config.get("model_type"))))
    whole = "" if config["is_encoder_decoder"] else " encoder"
    return (
        f"{title}{whole}, {config['num_layers']} layers of width {config['d_model']:,}, {config['num_heads']} heads of"
        f" {config['d_kv']}, {config['feed_forward_proj']} feed-forward of {config['d_ff']:,}, vocabulary of"
        f" {config['vocab_size']:,}"
    )
