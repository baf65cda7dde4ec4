"""The check ``replay``: the original under the recorded plan has the checkpoint's bytes, config and other files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.contents import MODULES
from ..checkpoint.folder import TOKENIZER_FILES, carry_over, tokenizer_beside
from ..checkpoint.formats import bytes_of
from ..checkpoint.reader import VIEWS, Checkpoint, open_checkpoint
from ..checkpoint.writer import write_fp16
from ..families.configs import changes, without_value
from ..families.known import stock_class
from ..families.layout import Layout
from ..json_text import write_json
from ..report.build import source_of, weight_counts
from ..report.remedies import RIGHT_REVISION
from ..report.schema import Report
from ..report.steps import Rewritten
from ..rescaling.apply import edited_config, writes
from ..rescaling.plan import Plan
from ..results import dump
from .comparison import differences
from .file_checks import present_files

UNNAMED_KEYS = ("dtype", "torch_dtype", "_name_or_path", "transformers_version")  # they name no model
OBEYED = (  # files that change what stock code computes
    *(
        "generation_config.json",
        MODULES,
        *TOKENIZER_FILES,
        "added_tokens.json",
        "merges.txt",
        "special_tokens_map.json",
    ),
    *("chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json"),
    "hf_quant_config.json",
)


def other_weights(original: Checkpoint, report: Report) -> Iterator[tuple[str, str, str]]:
    hashes = {original.file_name(file): original.sha256(file) for file in original.weight_files}
    for name in sorted({*hashes, *report.source.sha256}):
        if report.source.sha256.get(name) != hashes.get(name):
            yield name, "is not the file that was converted", RIGHT_REVISION


def replayed(
    original: Checkpoint, layout: Layout, plan: Plan, checkpoint: Checkpoint, report: Report
) -> Iterator[tuple[str, str]]:
    """Apply the plan to the original; yield what of bytes, config and carried files is not the checkpoint's."""
    with tempfile.TemporaryDirectory(prefix="bf16-to-fp16-replay-") as scratch:
        written = write_fp16(original, writes(original, layout, plan), Path(scratch), hashes=False)
        write_json(Path(scratch, "config.json"), checkpoint.config)
        again = open_checkpoint(scratch)
        for name in sorted({*again.tensors, *checkpoint.tensors}):
            if name in again.tensors and name in checkpoint.tensors:
                ours, theirs = again.read(name), checkpoint.read(name)
                if (ours.dtype, ours.shape, bytes_of(ours)) == (theirs.dtype, theirs.shape, bytes_of(theirs)):
                    continue
            yield name, "is not what the plan makes of the original"
    counts = dump(weight_counts(layout, plan, written))
    yield from differences(report.weights and dump(report.weights), counts, "weights")
    rewritten = Rewritten(written, report.source.carried_over, report.source.left_out)
    again_of, said = dump(source_of(original, layout, plan, rewritten)), dump(report.source)
    whole = original.home not in VIEWS  # one file of weights has no config
    keys = ["dtype", "dtypes", "made", "dropped", "replaced", *["config_changes"] * whole]
    yield from differences({k: said.get(k) for k in keys}, {k: again_of.get(k) for k in keys}, "source")
    if whole:
        yield from different_config(edited_config(layout, plan), checkpoint.config)
    if checkpoint.folder not in VIEWS:
        yield from different_files(original, checkpoint.folder, report.source.subfolder)


def different_config(wanted: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    keys = ["architectures"] if stock_class(wanted) != stock_class(config) else []
    for key in ("architectures", *UNNAMED_KEYS):
        wanted, config = without_value(wanted, key), without_value(config, key)
    for key in sorted([*keys, *changes(wanted, config)]):
        yield f"config.json, {key}", "is not what the conversion makes of the original's config.json"


def different_files(original: Checkpoint, folder: Path, subfolder: str | None) -> Iterator[tuple[str, str]]:
    """Yield carried files that differ from the original's. One on one side only counts where stock code reads it."""
    with tempfile.TemporaryDirectory(prefix="bf16-to-fp16-carried-") as scratch:
        carry_over(original.home, Path(scratch), tokenizer=tokenizer_beside(original.home, subfolder))
        for name in sorted({*present_files(Path(scratch)), *OBEYED} - {"SOURCE_README.md"}):
            ours, theirs = (f.read_bytes() if f.is_file() else None for f in (Path(scratch, name), folder / name))
            alone = ours is None or theirs is None
            if ours != theirs and (not alone or name in OBEYED or "/" in name):
                yield name, "is not what the conversion carries over from the original"
