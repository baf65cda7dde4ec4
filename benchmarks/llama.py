"""A T5 in llama.cpp as an F16 GGUF file, beside stock code in fp32 and bf16.

``python benchmarks/llama.py LLAMA_CPP FOLDER [FOLDER ...]``, where LLAMA_CPP is a checkout of llama.cpp (for its
``convert_hf_to_gguf.py``) and llama-cpp-python and gguf are installed. Its converter wants a sentencepiece model, which
the byte-level demo has not: one is trained here, and only its size counts, since ids are given and no text.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import llama_cpp
import numpy as np
import sentencepiece
import torch

from bf16_to_fp16.run import probe
from bf16_to_fp16.run.batch import Batch
from bf16_to_fp16.run.runtime import in_torch
from bf16_to_fp16.run.stock import load_config

COPIED = ("config.json", "model.safetensors")


def make_gguf(checkout: Path, folder: Path, scratch: Path) -> Path:
    """Convert a checkpoint to an F16 GGUF file in ``scratch``."""
    copy = scratch / folder.name
    copy.mkdir()
    for name in COPIED:
        shutil.copy(folder / name, copy)
    sentencepiece.SentencePieceTrainer.train(
        input=str(files("bf16_to_fp16") / "demo_data" / "held_out.txt"),
        model_prefix=str(copy / "spiece"),
        vocab_size=380,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    out = scratch / f"{folder.name}.gguf"
    command = [sys.executable, checkout / "convert_hf_to_gguf.py", copy, "--outtype", "f16", "--outfile", out]
    subprocess.run(command, check=True, capture_output=True)
    return out


def tokens(ids: list[int]) -> llama_cpp.llama_batch:
    """Return ids as a batch of one sequence that asks for the logits of all."""
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    return batch


def logits(path: Path, batch: Batch, vocabulary: int) -> list[np.ndarray]:
    """Return each row's logits from a GGUF file, [length, vocabulary]."""
    assert batch.decoder_input_ids is not None and batch.decoder_attention_mask is not None
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 512
    options.n_threads = options.n_threads_batch = 1  # more spin while they wait for each other
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    found = []
    for ids, mask, decoder_ids, decoder_mask in zip(
        batch.input_ids, batch.attention_mask, batch.decoder_input_ids, batch.decoder_attention_mask, strict=True
    ):
        context = llama_cpp.llama_init_from_model(model, options)
        assert llama_cpp.llama_encode(context, tokens(ids[mask == 1].tolist())) == 0
        target = decoder_ids[decoder_mask == 1].tolist()
        assert llama_cpp.llama_decode(context, tokens(target)) == 0
        row = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), shape=(len(target), vocabulary))
        found.append(row.astype(np.float64))
        llama_cpp.llama_free(context)
    return found


def main() -> None:
    """Print what becomes of each folder."""
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    checkout, *folders = map(Path, sys.argv[1:])
    for folder in folders:
        config = load_config(folder)
        batch = probe.one_batch(config, probe.audit_batches(config, folder, None))
        assert batch.decoder_attention_mask is not None
        with tempfile.TemporaryDirectory() as scratch:
            rows = logits(make_gguf(checkout, folder, Path(scratch)), batch, int(config.vocab_size))
        values = np.concatenate(rows)
        kept = batch.decoder_attention_mask.bool()
        reference, bf16 = (in_torch(folder, d, batch)[kept].double().numpy() for d in (torch.float32, torch.bfloat16))
        scale = np.square(reference).sum()
        wrong = int((~np.isfinite(values)).sum())
        error, yardstick = (np.square(x - reference).sum() / scale for x in (values, bf16))
        print(f"{folder.name}: {wrong:,} of {values.size:,} not finite, error {error:.2e}; bf16 {yardstick:.2e}")


if __name__ == "__main__":
    main()
