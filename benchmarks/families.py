"""What a conversion makes of a small random model of each family with one stack, whose stream passes 65504.

    python benchmarks/families.py [KIND ...]

The models are those of the tests (``tests/support/tiny.py``). Prints a Markdown table: the exponent of the stream, the
proof, how far fp32 logits from the files are from the source's, as a share of the largest, on text and on an image
where one is read (what fp16 rounds of the weights shows there), the KL to fp32 in nats of the source in bf16 and of the
output in fp16, and whether it is safe where norms and where sums compute in fp16 too, else why not.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support import tiny  # noqa: E402

from bf16_to_fp16 import convert  # noqa: E402
from bf16_to_fp16.families.known import of_model_type  # noqa: E402
from bf16_to_fp16.run.batch import run_batch  # noqa: E402
from bf16_to_fp16.run.probe import few_rows, images  # noqa: E402
from bf16_to_fp16.run.stock import load  # noqa: E402

KINDS = ("olmo2", "olmo3", "qwen2_5_vl", "qwen3_vl", "mistral3", "mixtral", "qwen3_moe", "olmoe", "glm4_moe")
STRICTER = ("norm-fp16", "fp16-accumulate")  # the tiers beside PyTorch's own


def row(kind: str, folder: Path) -> str:
    """Convert one model and return its row."""
    model = tiny.build(kind)
    family = of_model_type(model.config.model_type)
    assert family is not None
    source = tiny.save(model, folder / "source")
    report = convert(source, folder / "out").report
    with torch.no_grad():
        before, after = (load(folder / name, torch.float32) for name in ("source", "out"))
        inputs = [few_rows(before.config), *images(before.config)]
        logits = [(run_batch(before, x).logits, run_batch(after, x).logits) for x in inputs]
        off = [float((one - other).abs().max() / one.abs().max()) for one, other in logits]
    plan, close = report["plan"], report["fidelity"]
    apart = ", ".join(f"{each:.0e}" if each else "equal" for each in off)
    figures = f"{close['kl_bf16']:.1e} | {close['kl_fp16']:.1e}"
    tiers = (report["tiers"][name] for name in STRICTER)
    stricter = " | ".join(tier["proof"] if tier["holds"] else f"no: {tier['reason']}" for tier in tiers)
    stream = f"2^{plan['residual_exponent']}"
    return f"| {family.title} | {stream} | {report['proof']} | {apart} | {figures} | {stricter} |"


def main() -> int:
    """Print the table."""
    torch.set_num_threads(1)
    rows = []
    for kind in sys.argv[1:] or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(kind, Path(folder)))
    print("| family | stream | safe | fp32: text, image | KL in bf16 | in fp16 | norms in fp16 | sums in fp16 |")
    print("|---|--:|---|---|--:|--:|---|---|")
    print("\n".join(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
