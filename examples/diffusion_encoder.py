"""The T5 text encoder of a diffusion pipeline in pure fp16: ``text_encoder_2``, without an fp32 ``wo``.

    python examples/diffusion_encoder.py

The pipeline is made here in the layout of diffusers, with the encoder of the shipped demo; with a real one only the
name of the source changes: ``convert("black-forest-labs/FLUX.1-dev", out, subfolder="text_encoder_2")``.
"""

from __future__ import annotations

import tempfile
from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoTokenizer, T5EncoderModel

from bf16_to_fp16 import convert

PROMPTS = ["a lighthouse in a storm, oil on canvas", "three red cubes on a glass table"]


def make_pipeline(folder: Path) -> None:
    """Write ``text_encoder_2`` and ``tokenizer_2`` as a pipeline has them."""
    demo = str(files("bf16_to_fp16") / "demo_data" / "t5-gated-bytes")
    T5EncoderModel.from_pretrained(demo, dtype=torch.bfloat16).save_pretrained(folder / "text_encoder_2")
    AutoTokenizer.from_pretrained(demo).save_pretrained(folder / "tokenizer_2")


def embed(encoder: Path, dtype: torch.dtype, tokenizer: Path) -> torch.Tensor:
    """Return the prompts' embeddings, every parameter in ``dtype``, as a pipeline computes them."""
    batch = AutoTokenizer.from_pretrained(tokenizer)(PROMPTS, padding="max_length", max_length=64, return_tensors="pt")
    model = T5EncoderModel.from_pretrained(encoder, dtype=dtype).to(dtype).eval()
    with torch.no_grad():
        return model(batch.input_ids).last_hidden_state.float()


def main() -> None:
    """Convert the encoder and compare it with the source in bf16 and in fp16."""
    with tempfile.TemporaryDirectory() as name:
        pipeline, out = Path(name) / "pipeline", Path(name) / "text_encoder_2-fp16"
        make_pipeline(pipeline)
        result = convert(pipeline, out, subfolder="text_encoder_2")
        print(f"safe: {result.safe}, proof: {result.report['proof']}")
        source, tokenizer = pipeline / "text_encoder_2", pipeline / "tokenizer_2"
        wanted = embed(source, torch.float32, tokenizer)
        for what, folder, dtype in (
            ("source in bf16", source, torch.bfloat16),
            ("source in fp16", source, torch.float16),
            ("converted, fp16", out, torch.float16),
        ):
            error = (embed(folder, dtype, tokenizer) - wanted).norm() / wanted.norm()
            print(f"{what}: relative error {error:.1e}")


if __name__ == "__main__":
    main()
