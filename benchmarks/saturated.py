"""What ``convert`` makes of checkpoints with a site past 65504 that no exact exponent moves, as stock classes judge it.

    python benchmarks/saturated.py [--kinds gate scores ...] [--made FOLDER] [--exact]

The checkpoints are those of ``tests/support/saturated.py``, trained on the first call, half a minute each, and kept in
``--made``. The judge is ``tests/support/judge.py``: source and output on 24 held-out texts and 8 rows of random ids,
against the source in fp32. Prints one row of a Markdown table for each kind.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
from support.judge import judge  # noqa: E402
from support.saturated import KINDS, saturated  # noqa: E402

from bf16_to_fp16 import convert  # noqa: E402

TEXTS, SEED = 24, 7


def texts() -> list[str]:
    """Return the texts on which checkpoints are judged."""
    return (ROOT / "bf16_to_fp16/demo_data/held_out.txt").read_text(encoding="utf-8").split("\n\n")[:TEXTS]


def row_of(kind: str, made: Path, out: Path, exact: bool) -> str:
    """Return the row of one kind."""
    source = saturated(kind, made / kind)
    report = convert(source, out / kind, exact=exact).report
    judged = judge(source, out / kind, texts(), SEED)
    edits = [f"`{edit['site']}` 2^{edit['exponent']}" for edit in report.get("inexact", [])]
    edits += [f"`{path}` centred keys" for path in report["plan"].get("centred_keys", [])]
    return (
        f"| {kind} | {judged.kl_bf16_text:.1e}, {judged.kl_bf16_random:.1e}"
        f" | {judged.kl_fp16_text:.1e}, {judged.kl_fp16_random:.1e}"
        f" | {report['verdict']}, {report['proof']} | {'; '.join(edits) or 'none'} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--made", type=Path, default=Path(tempfile.gettempdir()) / "saturated")
    parser.add_argument("--exact", action="store_true", help="convert without edits")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| kind | bf16: text, random | fp16: text, random | verdict, proof | edits |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as out:
        for kind in options.kinds:
            print(row_of(kind, options.made, Path(out), options.exact), flush=True)


if __name__ == "__main__":
    main()
