"""The tools that come nearest, run on the T5 demo against its conversion: ModelOpt's AutoCast, and nai-t5.

python benchmarks/rivals.py    (needs: pip install "nvidia-modelopt[onnx]" nai-t5)

AutoCast leaves those nodes of an ONNX file in fp32 whose values pass a limit on calibration inputs. Its files, and ours
with every node in fp16, are computed node by node by onnx's reference, products accumulated in fp32 and rounded once.
nai-t5 is an encoder of its own with a power of two for each layer's outputs, which its users search by hand: here the
first feed-forward is halved until the last states are finite, 24 times at most. The third, t5-fp16-surgery, is what
``peers.py`` calls halving.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from models import DEMO
from nai_t5 import T5EncoderStack, hf_to_based_t5_enc_state, to_based_config
from results import print_header, print_row
from runtimes import all_in_fp16, arrays_of, as_function, export, in_numpy, inputs_of
from torch import Tensor

from bf16_to_fp16 import convert
from bf16_to_fp16.run.batch import Batch
from bf16_to_fp16.run.stock import load, load_config

SOURCE = DEMO / "t5-gated-bytes"
ROWS, LENGTH, TARGET = 8, 160, 48  # of the batches, in bytes


def batch_of(lines: list[bytes]) -> Batch:
    ids = torch.tensor([[byte + 3 for byte in line[:LENGTH]] for line in lines])
    decoder = torch.tensor([[0, *(byte + 3 for byte in line[: TARGET - 1])] for line in lines])
    return Batch("", ids, torch.ones_like(ids), decoder, torch.ones_like(decoder))


def inputs() -> dict[str, Batch]:
    """Return two batches of held-out text, and one of spaces."""
    lines = [line for line in (DEMO / "held_out.txt").read_bytes().splitlines() if len(line) >= LENGTH][: 2 * ROWS]
    return {"text": batch_of(lines[:ROWS]), "other": batch_of(lines[ROWS:]), "spaces": batch_of([b" " * LENGTH] * ROWS)}


def kl(model: Any, batch: Batch, wanted: Tensor) -> str:
    said = torch.from_numpy(in_numpy(model, batch)["output"]).double().log_softmax(-1)
    true = wanted.double().log_softmax(-1)
    found = float((true.exp() * (true - said)).sum(-1).mean())
    return f"{found:.1e}" if np.isfinite(found) else "not finite"


def with_autocast(batches: dict[str, Batch], out: Path, place: Path) -> None:
    from modelopt.onnx.autocast import convert_to_mixed_precision

    with torch.no_grad():
        wanted = {name: as_function(SOURCE, torch.float32)(*inputs_of(b).values()) for name, b in batches.items()}
    path = export(SOURCE, batches["text"], str(place), torch.float32)
    print_header("ONNX file", "seconds", "casts to fp32", "KL on other text", "on spaces")
    for what in ("text", "spaces"):
        np.savez(place / what, **arrays_of(batches[what]))
        begun = time.perf_counter()
        model = convert_to_mixed_precision(path, data_max=65504, calibration_data=str(place / f"{what}.npz"))
        row(f"AutoCast, calibrated on {what}", model, batches, wanted, f"{time.perf_counter() - begun:.1f}")
    for what, folder in (("source, every node in fp16", SOURCE), ("`convert --target norm-safe`, the same", out)):
        model = onnx.load(export(folder, batches["text"], str(place), torch.float32))
        all_in_fp16(model)
        row(what, model, batches, wanted, "")


def row(what: str, model: Any, batches: dict[str, Batch], wanted: dict[str, Tensor], seconds: str) -> None:
    widened = sum(
        node.op_type == "Cast" and any(a.name == "to" and a.i == onnx.TensorProto.FLOAT for a in node.attribute)
        for node in model.graph.node
    )
    print_row(what, seconds, widened, *(kl(model, batches[name], wanted[name]) for name in ("other", "spaces")))


def nai(folder: Path, dtype: torch.dtype, halvings: int = 0) -> Any:
    """Return nai-t5's encoder of a folder, with its scale of the first feed-forward: as its loader applies it."""
    config = to_based_config(load_config(folder))
    model, scale = T5EncoderStack(config), 2.0**-halvings
    model.load_state_dict(hf_to_based_t5_enc_state(load(folder, torch.float32).state_dict(), config))
    with torch.no_grad():
        for i, layer in enumerate(model.layers):
            layer.ffn.ff_out.weight.mul_(scale)
            layer.attn.o_proj.weight.mul_(scale if i else 1)
            layer.ln1.eps, layer.ln2.eps = (eps * (scale if i else 1) for eps in (layer.ln1.eps, layer.ln2.eps))
        model.layers[0].ln2.residual_scale = scale
        model.ln.eps *= scale
    return model.to(dtype).eval()


def in_nai(batches: dict[str, Batch], out: Path) -> None:
    ids = batches["text"].input_ids
    with torch.no_grad():
        wanted = nai(SOURCE, torch.float32)(ids).double()

        def error(model: Any) -> float:
            return float((model(ids).double() - wanted).square().sum() / wanted.square().sum())

        halvings = next((n for n in range(24) if np.isfinite(error(nai(SOURCE, torch.float16, n)))), 24)
        rows = (
            ("source", nai(SOURCE, torch.float16)),
            (f"source, first feed-forward halved {halvings} times", nai(SOURCE, torch.float16, halvings)),
            ("source in bf16", nai(SOURCE, torch.bfloat16)),
            ("converted", nai(out, torch.float16)),
        )
        print()
        print_header("nai-t5's encoder in fp16", "relative squared error of last states")
        for what, model in rows:
            found = error(model)
            print_row(what, f"{found:.1e}" if np.isfinite(found) else "not finite")


def main() -> None:
    batches = inputs()
    with tempfile.TemporaryDirectory() as beside:
        place = Path(beside)
        convert(SOURCE, place / "onnx", target="norm-safe")
        with_autocast(batches, place / "onnx", place)
        in_nai(batches, place / "onnx")


if __name__ == "__main__":
    main()
