"""Tiny models of every family with odd shapes, whose activations pass fp16's range, and their folders as published
ones are."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers

transformers.logging.set_verbosity_error()

T5_SHAPE = {
    "d_model": 24,
    "d_kv": 5,
    "d_ff": 37,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "vocab_size": 97,
    "relative_attention_num_buckets": 9,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
}
PEGASUS_SHAPE = {
    "d_model": 24,
    "vocab_size": 97,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 29,
    "max_position_embeddings": 64,
    "activation_function": "relu",
    "scale_embedding": True,
    "decoder_start_token_id": 0,
}


def t5(**changes: Any) -> Any:
    """Return a T5 v1.0: ReLU, tied head."""
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**T5_SHAPE | changes))


def gated(projection: str = "gated-gelu", **changes: Any) -> Any:
    """Return a T5 v1.1: gated, untied, unscaled head."""
    config = transformers.T5Config(
        **T5_SHAPE | {"feed_forward_proj": projection, "tie_word_embeddings": False} | changes
    )
    return untied(transformers.T5ForConditionalGeneration(config))


def mt5(**changes: Any) -> Any:
    """Return an mT5."""
    return untied(transformers.MT5ForConditionalGeneration(transformers.MT5Config(**T5_SHAPE | changes)))


def umt5(**changes: Any) -> Any:
    """Return a UMT5."""
    return untied(transformers.UMT5ForConditionalGeneration(transformers.UMT5Config(**T5_SHAPE | changes)))


def pegasus(**changes: Any) -> Any:
    """Return a Pegasus."""
    return transformers.PegasusForConditionalGeneration(transformers.PegasusConfig(**PEGASUS_SHAPE | changes))


def t5_encoder(**changes: Any) -> Any:
    """Return a T5 encoder."""
    shape = T5_SHAPE | {"feed_forward_proj": "gated-gelu"} | changes
    return transformers.T5EncoderModel(transformers.T5Config(**shape))


def mt5_encoder(**changes: Any) -> Any:
    """Return an mT5 encoder."""
    return transformers.MT5EncoderModel(transformers.MT5Config(**T5_SHAPE | changes))


def umt5_encoder(**changes: Any) -> Any:
    """Return a UMT5 encoder."""
    return transformers.UMT5EncoderModel(transformers.UMT5Config(**T5_SHAPE | changes))


KINDS: dict[str, Callable[..., Any]] = {
    "t5": t5,
    "gated": gated,
    "gelu": lambda **changes: gated("gelu", **changes),
    "silu": lambda **changes: gated("gated-silu", **changes),
    "mt5": mt5,
    "umt5": umt5,
    "pegasus": pegasus,
    "t5-encoder": t5_encoder,
    "mt5-encoder": mt5_encoder,
    "umt5-encoder": umt5_encoder,
}


OUTLIERS = {"t5": 100.0, "gelu": 100.0, "pegasus": 150.0}
"""How much larger the outlier channels are, where it is not 8: plain feed-forwards give smaller products than gated
ones."""


def untied(model: Any) -> Any:
    """Give a model that stock code ties a head of its own."""
    model.lm_head.weight = torch.nn.Parameter(torch.randn(model.config.vocab_size, model.config.d_model))
    return model


def build(
    kind: str, seed: int = 0, *, factor: float = 900.0, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Any:
    """Return a random fp32 model in eval mode whose values are ``dtype``'s and whose residual stream passes 65504.

    factor: how much larger than usual the residual stream is; a few of its channels in the later half of each stack
    are larger still, and with them a few neurons, as in published checkpoints.
    """
    torch.manual_seed(seed)
    model = KINDS[kind](**changes).eval()
    wide = kind == "pegasus"
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(
                ("shared.weight", "embed_tokens.weight", "o.weight", "wo.weight", "out_proj.weight", "fc2.weight")
            ):
                scale = factor * (20.0 if wide and weight.shape[0] != 97 else 1.0)
                if name in ("shared.weight", "model.shared.weight") or not name.endswith("embed_tokens.weight"):
                    weight.mul_(scale)
                if name.endswith(("wo.weight", "fc2.weight")) and any(f".{i}." in name for i in (1, 2)):
                    weight[:2].mul_(OUTLIERS.get(kind, 8.0))
            if name.endswith("lm_head.weight"):
                weight.mul_(0.1)
            if name.endswith(".bias"):
                weight.normal_(0, 0.3 * (factor if name.endswith(("out_proj.bias", "fc2.bias")) else 1))
            if "norm" in name and name.endswith("weight"):
                weight.mul_(torch.rand_like(weight) + 0.5)
            if name.endswith("wi_1.weight"):
                weight[:2].mul_(20)
        if kind in ("t5", "pegasus"):
            tie = model.decoder if kind == "t5" else model.model.decoder
            norm = tie.final_layer_norm if kind == "t5" else tie.layer_norm
            # A tied head sees the large embedding; small gains keep its logits sane, as training does.
            for parameter in norm.parameters():
                parameter.mul_(8.0 / factor)
        for tensor in model.state_dict().values():
            tensor.copy_(tensor.to(dtype).to(tensor.dtype))
    return model


def save(model: Any, folder: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    """Save a model as its publisher would: ``dtype`` safetensors, and a config that says whether the head is tied."""
    folder.mkdir(parents=True, exist_ok=True)
    deepcopy(model).to(dtype).save_pretrained(folder, **options)
    config = json.loads((folder / "config.json").read_text())
    for key in ("scale_decoder_outputs", "tie_word_embeddings", "transformers_version"):
        config.pop(key, None)
    tied = not hasattr(model, "lm_head") or model.lm_head.weight is model.get_input_embeddings().weight
    config["tie_word_embeddings"] = tied
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder
