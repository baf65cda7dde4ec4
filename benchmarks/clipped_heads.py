"""Two ways to bring a head's scores down: a power of two on its queries, and clipping the product's singular values.

    python benchmarks/clipped_heads.py [--kinds scores ...] [--made FOLDER]

The checkpoints are those of ``tests/support/saturated.py`` with saturated scores. ``convert`` chooses the power of two;
the other output clips the singular values of the same heads to the same share of the largest, which is the least change
of QᵀK that has this norm. Both are judged in fp32 by ``tests/support/judge.py``, so that nothing but the edit counts.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from saturated import SEED, texts  # finds the tests' helpers as well
from support.judge import judge
from support.saturated import KINDS, saturated
from torch import Tensor

from bf16_to_fp16 import convert

KINDS_WITH_SCORES = [name for name, kind in KINDS.items() if [site.what for site in kind.sites] == ["scores"]]


def clip(queries: Tensor, keys: Tensor, share: float) -> Tensor:
    """Return queries [channels, width] whose product with the keys, queriesᵀ·keys, has its singular values clipped to a
    share of the largest; fp64. Gains of the norms before them are part of both."""
    u, values, v = torch.linalg.svd(queries.t() @ keys, full_matrices=False)
    least = torch.minimum(values, share * values[0])
    return torch.linalg.lstsq(keys.t(), ((u * least) @ v).t()).solution


def clipped(source: Path, site: Any, exponent: int, out: Path) -> None:
    """Write a checkpoint with the heads of a site clipped to 2^exponent of their largest singular value."""
    config = transformers.AutoConfig.from_pretrained(source)
    model = getattr(transformers, config.architectures[0]).from_pretrained(source, dtype=torch.float32)
    attention = model.get_submodule(site.module)
    stack = model.get_submodule(site.module.rpartition(".")[0])
    gain = stack.layer_norm.weight.double()
    crossed = "EncDec" in site.module
    read = model.encoder.final_layer_norm.weight.double() if crossed else gain
    size = attention.key_value_proj_dim
    with torch.no_grad():
        for head in site.units:
            rows = slice(head * size, (head + 1) * size)
            queries, keys = attention.q.weight[rows].double() * gain, attention.k.weight[rows].double() * read
            attention.q.weight[rows] = (clip(queries, keys, 2.0**exponent) / gain).float()
    model.save_pretrained(out)
    for file in source.iterdir():
        if "token" in file.name:
            (out / file.name).write_bytes(file.read_bytes())


def main() -> None:
    """Print one row of a table for each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS_WITH_SCORES, default=KINDS_WITH_SCORES)
    parser.add_argument("--made", type=Path, default=Path(tempfile.gettempdir()) / "saturated")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| kind | exponent | bf16: text, random | power of two: text, random | clipped: text, random |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.kinds:
            source, out = saturated(kind, options.made / kind), Path(folder) / kind
            (edit,) = convert(source, out / "edited").report["inexact"]
            clipped(source, KINDS[kind].sites[0], edit["exponent"], out / "clipped")
            two, least = (judge(source, out / name, texts(), SEED) for name in ("edited", "clipped"))
            print(
                f"| {kind} | {edit['exponent']} | {two.kl_bf16_text:.1e}, {two.kl_bf16_random:.1e} | "
                f"{two.kl_fp32_text:.1e}, {two.kl_fp32_random:.1e} | "
                f"{least.kl_fp32_text:.1e}, {least.kl_fp32_random:.1e} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
