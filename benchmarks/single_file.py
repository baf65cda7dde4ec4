"""What one file of weights costs beside a folder of the same: time and peak memory of ``convert``.

    python benchmarks/single_file.py --layers 4

makes random weights at the shape of t5-v1_1-xl's encoder, cut to a few layers, as a folder and as
``t5xl_bf16.safetensors``, and converts each in a process of its own: to a folder, and the file to ComfyUI's layout too,
whose target is stricter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5EncoderModel

SHAPE = {
    "d_model": 2048,
    "d_ff": 5120,
    "d_kv": 64,
    "num_heads": 32,
    "vocab_size": 32_128,
    "feed_forward_proj": "gated-gelu",
}


def make(folder: Path, layers: int) -> Path:
    """Write the encoder as a folder and as a file beside it; return the file."""
    torch.manual_seed(0)
    model = T5EncoderModel(T5Config(**SHAPE, num_layers=layers)).to(torch.bfloat16)
    model.save_pretrained(folder)
    tensors = {n: t for n, t in load_file(folder / "model.safetensors").items() if "embed_tokens" not in n}
    save_file(tensors, folder.parent / "t5xl_bf16.safetensors")
    return folder.parent / "t5xl_bf16.safetensors"


def measured(*arguments: str) -> tuple[float, float, float]:
    """Return seconds, the processor's seconds and the peak memory in GB of a command of this program in a process."""
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "bf16_to_fp16", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) not in (0, 1):
        raise SystemExit(f"{' '.join(arguments)} failed")
    return time.monotonic() - begun, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9


def main() -> None:
    """Make the weights, convert them in each way and print one line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--no-audit", action="store_true")
    options = parser.parse_args()
    rest = ["--no-audit"] if options.no_audit else []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "folder"
        file = make(folder, options.layers)
        runs = {
            "folder": (folder, Path(place) / "a", []),
            "file": (file, Path(place) / "b", []),
            "file to comfy": (file, Path(place) / "c.safetensors", ["--layout", "comfy"]),
        }
        size = file.stat().st_size / 1e9
        for name, (source, out, layout) in runs.items():
            seconds, processor, memory = measured("convert", str(source), str(out), *layout, *rest)
            figures = {"seconds": round(seconds, 1), "processor": round(processor, 1), "memory_gb": round(memory, 2)}
            print(json.dumps({"run": name, "source_gb": round(size, 2), **figures}), flush=True)


if __name__ == "__main__":
    main()
