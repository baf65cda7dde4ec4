"""Compare a report with results that are computed again, allowing for another machine's rounding. The check ``replay``
applies the recorded plan to the original checkpoint again and compares the result with the converted one."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bounds.spectral import CARRIED
from ..checkpoint.contents import MODULES
from ..checkpoint.files import sha256_of
from ..checkpoint.folder import TOKENIZER_FILES, carry_over, tokenizer_beside
from ..checkpoint.formats import bytes_of
from ..checkpoint.reader import VIEWS, Checkpoint, open_checkpoint
from ..checkpoint.writer import write_fp16
from ..families.configs import changes, without_value
from ..families.known import stock_class
from ..families.layout import Layout
from ..json_text import write_json
from ..numerics import FP16_MAX
from ..report.build import source_of, weight_counts
from ..report.remedies import RIGHT_REVISION
from ..report.schema import Report
from ..report.steps import Rewritten
from ..rescaling.apply import edited_config, writes
from ..rescaling.plan import Plan
from ..results import dump
from .file_checks import present_files

MAGNITUDES = ("amax", "fp32", "before", "after")
COUNTS = ("nonfinite", "saturated", "nonfinite_logits")
BOUNDS = ("bound", "partial")
DISTANCES = ("kl_bf16", "kl_fp16", "kl_fp32", "squared_error_fp32", "max_logit_error_bf16", "max_logit_error_fp16",
             "error", "error_bf16", "measured", "predicted_kl", "predicted_max_logit_error", "measured_kl",
             "measured_max_logit_error")  # fmt: skip
NAMED_BY = ("name", "module", "side", "kind", "signal", "attention")

UNNAMED_KEYS = ("dtype", "torch_dtype", "_name_or_path", "transformers_version")  # they name no model
OBEYED = (  # files that change what stock code computes
    *TOKENIZER_FILES,
    *(MODULES, "generation_config.json", "added_tokens.json", "merges.txt", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json"),
    "hf_quant_config.json",
)


def other_weights(original: Checkpoint, report: Report) -> Iterator[tuple[str, str, str]]:
    hashes = {original.file_name(file): sha256_of(file) for file in original.weight_files}
    for name in sorted({*hashes, *report.source.sha256}):
        if report.source.sha256.get(name) != hashes.get(name):
            yield name, "is not the file that was converted", RIGHT_REVISION


def replay_differences(
    original: Checkpoint, layout: Layout, plan: Plan, checkpoint: Checkpoint, report: Report
) -> Iterator[tuple[str, str]]:
    """Apply the plan to the original again; yield (name, reason) for each difference from ``checkpoint`` and its
    report. Tensors' bytes, the config, copied files, and the report's entries on weights and source are compared."""
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
    again_of, recorded = dump(source_of(original, layout, plan, rewritten)), dump(report.source)
    for entry in (again_of, recorded):
        entry["dropped"] = sorted(entry.get("dropped", ()))  # releases may word the reasons differently
    whole = original.home not in VIEWS  # one file of weights has no config
    keys = ["dtype", "dtypes", "made", "dropped", "replaced", *["config_changes"] * whole]
    yield from differences({k: recorded.get(k) for k in keys}, {k: again_of.get(k) for k in keys}, "source")
    if whole:
        yield from different_config(edited_config(layout, plan), checkpoint.config)
    yield from different_files(original, checkpoint.folder, report.source.subfolder)


def different_config(wanted: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    keys = ["architectures"] if stock_class(wanted) != stock_class(config) else []
    for key in ("architectures", *UNNAMED_KEYS):
        wanted, config = without_value(wanted, key), without_value(config, key)
    for key in sorted([*keys, *changes(wanted, config)]):
        yield f"config.json, {key}", "is not what the conversion makes of the original's config.json"


def different_files(original: Checkpoint, folder: Path, subfolder: str | None) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) for each file in ``folder`` that is not the original's. A file that only one side has counts
    if transformers reads the file. Weights, the config and the model card are not compared."""
    with tempfile.TemporaryDirectory(prefix="bf16-to-fp16-carried-") as scratch:
        carry_over(original.home, Path(scratch), tokenizer=tokenizer_beside(original.home, subfolder))
        for name in sorted({*present_files(Path(scratch)), *OBEYED} - {"SOURCE_README.md"}):
            ours, theirs = (f.read_bytes() if f.is_file() else None for f in (Path(scratch, name), folder / name))
            alone = ours is None or theirs is None  # counts only for files that transformers reads
            if ours != theirs and (not alone or name in OBEYED or "/" in name):
                yield name, "is not what the conversion carries over from the original"


def near(key: str, recorded: float, again: float) -> bool:
    """Return whether two numbers of a report agree within their key's tolerance, a relative 1e-9 by default."""
    if math.isnan(recorded) or math.isnan(again):
        return math.isnan(recorded) and math.isnan(again)
    recorded, again = (max(-1e300, min(value, 1e300)) for value in (recorded, again))  # JSON has no infinity
    low, high = sorted((recorded, again))
    if key in COUNTS:  # kernels differ in the number of elements that overflow
        return (recorded > 0) == (again > 0)
    if key in BOUNDS:  # reused eigenvalues loosen a bound by CARRIED; rounding the matrix doubles that
        return again * (1 - 1e-3) <= recorded <= again * (1 + 4 * CARRIED + 1e-3)
    if key in MAGNITUDES:  # 2^-6 is 22 bits under the limit
        return low > FP16_MAX or high - low <= abs(high) / 8 or max(abs(low), abs(high)) <= 2.0**-6
    if key == "headroom_bits":
        return high - low <= 0.2 or low >= 20
    if key in DISTANCES:  # 1e-9 is the noise of fp32 logits
        return high <= 1e-9 or high <= 2 * low
    return high - low <= {"top1_bf16": 0.05, "top1_fp16": 0.05}.get(key, 1e-9 * max(abs(low), abs(high)))


def differences(entry: Any, again: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, reason) for each difference between two report entries. Rows of tables are matched by name.
    entry, again: the entry ``key`` as recorded and as computed again."""
    if key.endswith(".observed"):  # by a run, which a certificate computed again has not
        return
    if is_table(entry) and is_table(again):
        entry, again = by_name(entry), by_name(again)
    if isinstance(entry, Mapping) and isinstance(again, Mapping):
        for name in {**again, **entry}:
            yield from differences(entry.get(name), again.get(name), f"{key}.{name}")
        return
    number = all(isinstance(value, (int, float)) and type(value) is not bool for value in (entry, again))
    same = near(key.rpartition(".")[2], entry, again) if number else entry == again and type(entry) is type(again)
    if not same:
        yield key, f"the report says {entry!r}, and {again!r} was computed"


def is_table(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(v, Mapping) for v in value)


def by_name(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for row in rows:
        name = str(row.get("name") or " ".join(str(row[part]) for part in NAMED_BY if row.get(part) is not None))
        named[name if name not in named else f"{name} #{len(named)}"] = row
    return named
