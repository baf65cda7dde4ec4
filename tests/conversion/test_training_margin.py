"""The further margin that a plan for training keeps, and where gains that round cannot afford it."""

from importlib.resources import files
from pathlib import Path

import pytest

from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.conversion.options import Options
from bf16_to_fp16.conversion.planning import Opened, decide
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.measuring.fidelity import compared
from bf16_to_fp16.measuring.probe import checkpoint_batches
from bf16_to_fp16.numerics import headroom_bits
from bf16_to_fp16.progress import Progress
from bf16_to_fp16.targets import MARGIN_BITS

DEMOS = Path(str(files("bf16_to_fp16") / "demo_data"))


@pytest.mark.parametrize(("demo", "affordable"), [("t5-gated-bytes", True), ("gemma3-bytes", False)])
def test_gains_that_would_round_further_than_bf16_keep_no_margin_for_training(demo: str, affordable: bool) -> None:
    checkpoint = open_checkpoint(DEMOS / demo)
    layout = resolve(checkpoint)
    opened = Opened(checkpoint, layout, compared(checkpoint_batches(checkpoint, layout, None, 0))[:1])
    decided = decide(opened, Options(target="train"), Progress(quiet=True))
    assert decided.ranges is not None and [("no further margin" in note) for note in decided.notes] == (
        [] if affordable else [True]
    )
    reached = max(float(decided.ranges[path].input.amax.max()) for path in opened.layout.streams_read)
    kept = headroom_bits(reached * 2.0**decided.plan.residual_exponent)
    assert kept >= MARGIN_BITS and (kept >= MARGIN_BITS + 2) == affordable
