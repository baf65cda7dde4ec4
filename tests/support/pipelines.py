"""Small diffusion pipelines, with the file names of diffusers and transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support import tiny
from transformers import ByT5Tokenizer, CLIPTextConfig, CLIPTextModel

CLIP = {"hidden_size": 8, "intermediate_size": 9, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 50}
CLIP |= {"projection_dim": 8, "max_position_embeddings": 9, "bos_token_id": 0, "eos_token_id": 2}

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"  # a file that is large enough to be linked


def encoder(kind: str = "t5-encoder", **changes: Any) -> Any:
    """Return a small encoder that overflows fp16, with room for the ids of bytes, whose every weight fp16 will hold."""
    model = tiny.build(kind, **{"vocab_size": 384, "factor": 8000.0} | changes)
    for weight in model.parameters():
        weight.data[weight.abs() < weight.abs().max() / 1000] = 0
    return model


def llama(**changes: Any) -> Any:
    model = encoder("llama", num_hidden_layers=4, **changes).model
    model.config.architectures = ["LlamaModel"]
    return model


def make(folder: Path, encoders: Mapping[str, Any], **others: Any) -> Path:
    """Write a pipeline of encoders by sub-folder, beside a CLIP encoder and the rest; others: of its index."""
    index: dict[str, Any] = {"_class_name": "FluxPipeline", "_diffusers_version": "0.42.1"}
    index |= {"feature_extractor": [None] * 2}
    for name, model in encoders.items():
        tiny.save(model, folder / name)
        tokenizer = name.replace("text_encoder", "tokenizer")
        ByT5Tokenizer(extra_ids=125).save_pretrained(folder / tokenizer)
        index |= {name: ["transformers", type(model).__name__], tokenizer: ["transformers", "ByT5Tokenizer"]}
    CLIPTextModel(CLIPTextConfig(**CLIP)).save_pretrained(folder / "clip")
    for name, shape in (("transformer", (600, 900)), ("vae", (3, 3))):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"_class_name": name}))
        save_file({"weight": torch.randn(shape)}, folder / name / "diffusion_pytorch_model.safetensors")
        index |= {name: ["diffusers", "AModel"]}
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    index |= {"clip": ["transformers", "CLIPTextModel"], "scheduler": ["diffusers", "AScheduler"], **others}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A pipeline\n")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
