"""Computes a folder's logits by stock code alone, in whichever environment runs it.

``python logits.py [--dtype float32|float16] FOLDER INPUTS.npz OUT.npz [FOLDER ...]``: INPUTS has the ids and masks that
the model takes; OUT gets ``output`` (fp32 logits, a span's start or last states), ``missing``, ``unexpected``,
``version``.
"""

import argparse
import inspect
import json
from pathlib import Path

import numpy as np
import torch
import transformers


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("jobs", nargs="+")
    parser.add_argument("--dtype", choices=["float32", "float16"], default="float32")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    jobs = [Path(job) for job in arguments.jobs]
    for folder, inputs, out in zip(jobs[::3], jobs[1::3], jobs[2::3], strict=True):
        compute(folder, inputs, out, getattr(torch, arguments.dtype))


def compute(folder: Path, inputs: Path, out: Path, dtype: torch.dtype) -> None:
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model, loading = getattr(transformers, name).from_pretrained(folder, dtype=dtype, output_loading_info=True)
    arrays = {name: torch.from_numpy(array) for name, array in np.load(inputs).items()}
    takes = "decoder_input_ids" in inspect.signature(model.forward).parameters
    if not takes or name.endswith(("Classification", "Answering")):  # which make their own
        arrays.pop("decoder_input_ids", None)
    with torch.no_grad():
        result = model.eval()(**arrays)
    output = next(iter(result.values())).float().numpy()
    missing, unexpected = (np.array(sorted(loading[f"{kind}_keys"]), dtype=str) for kind in ("missing", "unexpected"))
    version = np.array(transformers.__version__)
    np.savez(out, output=output, missing=missing, unexpected=unexpected, version=version)


if __name__ == "__main__":
    main()
