"""What is lost where a tool reads a converted encoder with an eps of its own, in that tool's own arithmetic.

    python benchmarks/own_eps.py comfy:t5-wide wan:umt5-deep

makes random bf16 weights with neurons that stand out, converts them by ``--layout``, loads the file into the tool's
class (``tests/support/tools.py``: its published names, eps 1e-6), and compares its last states in fp16 on tokens of
another seed with those of the source in fp32; the source in bf16 beside it. ``--target`` is passed on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import tools

from bf16_to_fp16 import convert

SHAPES = {"wide": (1024, 2816, 16, 6), "deep": (256, 640, 4, 24), "xxl": (4096, 10_240, 64, 3)}
"""Widths of stream and feed-forward, heads and layers; the last is T5-XXL's but for its layers."""

FACTORS = {"wide": (32.0, 1024.0, 300.0), "deep": (32.0, 2048.0, 1000.0), "xxl": (32.0, 1024.0, 300.0)}
"""Of the weights into and out of the neurons that stand out, and of the embedding: so that fp16 overflows."""

OUTLIERS = 3  # neurons that stand out in a feed-forward
EVERY = {"wide": 1, "deep": 24, "xxl": 1}  # blocks of which the last has such
LENGTH, ROWS = 48, 4  # tokens that are compared


def encoder(kind: str, shape: str, embedded: float | None) -> Any:
    """Return a stock encoder in bf16 as its class draws it, with neurons that stand out; embedded: the standard
    deviation of its embedding, where it is not the shape's."""
    (width, hidden, heads, layers), (enter, leave, usual) = SHAPES[shape], FACTORS[shape]
    config: Any = getattr(transformers, f"{kind.upper()}Config")(
        vocab_size=512, d_model=width, d_ff=hidden, d_kv=64, num_heads=heads, num_layers=layers,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind.upper()}EncoderModel")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            block = int(name.split(".")[2]) if ".block." in name else 0
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
            elif (block + 1) % EVERY[shape]:
                continue
            elif "wi_" in name:
                weight[:OUTLIERS] *= enter
            elif "wo" in name:
                weight[:, :OUTLIERS] *= leave
        model.shared.weight.mul_(usual if embedded is None else embedded)
    return model.to(torch.bfloat16)


@torch.no_grad()
def states(model: Any, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the last states of a model in a dtype, in float64."""
    return model.to(dtype)(ids)[0 if isinstance(model, transformers.PreTrainedModel) else ...].double()


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return a relative squared error, infinite where something is not finite."""
    error = float((found - wanted).square().sum() / wanted.square().sum())
    return error if bool(found.isfinite().all()) else float("inf")


def measured(tool: str, name: str, target: str, embedded: float | None) -> dict[str, object]:
    """Return what one conversion loses in the tool it is for."""
    kind, _, shape = name.partition("-")
    model = encoder(kind, shape, embedded)
    make = (
        (lambda: tools.Wan(model.config)) if tool == "wan" else lambda: tools.Comfy(model.config, umt5=kind == "umt5")
    )
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "source"), Path(folder, "out.safetensors")
        model.save_pretrained(source)
        done = convert(source, out, layout=tool, target=target)
        inside = load_file(out)
    ids = torch.randint(2, 512, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    bf16, fp16, wanted = (states(model, ids, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32))
    reader = make()
    reader.load_state_dict(inside)
    wide, half = (states(reader, ids, dtype) for dtype in (torch.float32, torch.float16))
    plan, close = done.report["plan"], done.report["fidelity"]
    return {
        "tool": tool, "encoder": name, "embedded": embedded, "verdict": done.report["verdict"],
        "target": done.report["target"], "proof": done.report["proof"],
        "residual_exponent": plan["residual_exponent"], "corrected": len(plan["gain_correction"]),
        "source_in_stock_fp16": apart(fp16, wanted), "bf16": apart(bf16, wanted),
        "tool_fp32": apart(wide, wanted), "tool_fp16": apart(half, wanted),
        "reported": {key: close[key] for key in ("kl_bf16", "kl_fp16", "kl_fp32")},
    }  # fmt: skip


def main() -> None:
    """Print one line of JSON for each encoder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", metavar="TOOL:ENCODER")
    parser.add_argument("--target", default="auto")
    parser.add_argument("--embedded", type=float, help="standard deviation of the embedding")
    given = parser.parse_args()
    for each in given.what:
        tool, _, name = each.partition(":")
        print(json.dumps(measured(tool, name, given.target, given.embedded)), flush=True)


if __name__ == "__main__":
    main()
