"""Convert a checkpoint and generate with stock transformers in pure fp16.

    python examples/convert_and_generate.py [SOURCE]

SOURCE is a local folder or a Hub id; the default is the small byte-level T5 that ships with the package, which fills
gaps in English text and overflows fp16 until it is converted.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from bf16_to_fp16 import convert

TEXT = "The primary must eva<extra_id_124>e object (user-defined functions, built-in functions, methods of built-in"


def fill(folder: str | Path, text: str) -> str:
    """Return what the model at ``folder`` puts in the gaps, with every parameter and activation in fp16."""
    # Nothing here is of this package. On a GPU, add .to("cuda").
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float16).half().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    made = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=40)
    return tokenizer.decode(made[0], skip_special_tokens=True)


def main() -> None:
    """Convert, say what the report says, generate."""
    source = sys.argv[1] if len(sys.argv) > 1 else str(files("bf16_to_fp16") / "demo_data" / "t5-gated-bytes")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "fp16"
        result = convert(source, out)
        half, close = result.report["regimes"]["half"], result.report["fidelity"]
        print(f"safe: {result.safe}, proof: {result.report['proof']}, headroom: {half['headroom_bits']:.2f} bits")
        print(f"KL to fp32: {close['kl_fp16']:.1e} in fp16, {close['kl_bf16']:.1e} in bf16")
        print(f"generated: {fill(out, TEXT)!r}")


if __name__ == "__main__":
    main()
