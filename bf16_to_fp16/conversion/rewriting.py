"""The writing step of ``convert``: weights in a stream of pieces, config, and the files beside them."""

from __future__ import annotations

import sys
from pathlib import Path

from ..checkpoint.folder import carry_over, tokenizer_beside
from ..checkpoint.layouts import FOLDER_LAYOUT
from ..checkpoint.reader import Checkpoint
from ..checkpoint.writer import Written, write_fp16
from ..errors import UserError
from ..families.layout import Layout
from ..json_text import write_json
from ..measuring.tokenizer import has_tokenizer
from ..numerics import FP16_MAX
from ..progress import Progress
from ..report.steps import Decided, Rewritten
from ..rescaling.apply import edited_config, writes
from .options import Options
from .planning import Opened


def rewrite(
    opened: Opened, decided: Decided, work: Path, options: Options, progress: Progress, *, moved: bool = False
) -> Rewritten:
    checkpoint, layout = opened.checkpoint, decided.layout
    with progress.step(f"Writing {len(layout.tensors)} tensors") as advance:
        written = write_fp16(
            checkpoint,
            writes(checkpoint, layout, decided.plan),
            work,
            max_shard_size=options.max_shard_size if options.layout == FOLDER_LAYOUT else sys.maxsize,
            advance=advance,
        )
    check_finite(written, checkpoint, layout)
    write_json(work / "config.json", edited_config(layout, decided.plan, moved=moved))
    carried, left_out = carry_over(
        checkpoint.home, work, tokenizer=tokenizer_beside(checkpoint.home, options.subfolder)
    )
    if options.layout == FOLDER_LAYOUT and not has_tokenizer(work):
        progress.say(
            f"{checkpoint.name} has no tokenizer, so the output has none; put one beside the source and convert again"
        )
    return Rewritten(written, carried, left_out)


def check_finite(written: Written, checkpoint: Checkpoint, layout: Layout) -> None:
    for name, stats in written.stats.items():
        if not stats.nonfinite:
            continue
        source = layout.tensors[name].source
        if source is not None and float(checkpoint.read(source).abs().max()) <= FP16_MAX:
            raise UserError(
                f"tensor {name}: the plan takes {stats.nonfinite} of {stats.elements} weights past 65504; give the plan"
                " of this very checkpoint, or leave out --plan"
            )
        raise UserError(
            f"tensor {name}: {stats.nonfinite} of {stats.elements} weights are inf, NaN or so large that no"
            " exponent brings them under 65504; use another revision of the checkpoint or repair the tensor"
        )
