"""Scores target tokens with CTranslate2, after its own converter has read the folder, under transformers 4 only.

``python score_ct2.py FOLDER INPUTS.npz OUT.npz [FOLDER INPUTS.npz OUT.npz ...]``: INPUTS is that of ``logits.py``; OUT
gets ``output``: fp32 (batch, decoder length) log-probabilities. CTranslate2 ignores the config's epsilon.
"""

import sys
import tempfile
from pathlib import Path

import ctranslate2
import numpy as np
import transformers
from ctranslate2.converters import TransformersConverter


def main() -> None:
    if not transformers.__version__.startswith("4."):
        sys.exit(f"score_ct2.py: needs transformers 4, this is {transformers.__version__}")
    jobs = [Path(argument) for argument in sys.argv[1:]]
    for folder, inputs, out in zip(jobs[::3], jobs[1::3], jobs[2::3], strict=True):
        np.savez(out, output=score(folder, dict(np.load(inputs))))


def score(folder: Path, inputs: dict[str, np.ndarray]) -> np.ndarray:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sources = [
        tokenizer.convert_ids_to_tokens(ids[mask == 1].tolist())
        for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    targets = [tokenizer.convert_ids_to_tokens(ids.tolist()) for ids in inputs["decoder_input_ids"][:, 1:]]
    with tempfile.TemporaryDirectory() as converted:
        TransformersConverter(str(folder)).convert(converted, quantization="float32", force=True)
        translator = ctranslate2.Translator(
            converted, device="cpu", compute_type="float32", inter_threads=1, intra_threads=1
        )
        scores = translator.score_batch(sources, targets)
    return np.array([result.log_probs for result in scores], dtype=np.float32)


if __name__ == "__main__":
    main()
