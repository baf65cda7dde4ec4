"""Converts every checkpoint of a list, each in a process of its own, and makes a page and a CSV of their reports.

``python recipes/survey.py LIST.yaml OUTDIR [--keep] [-- options of convert]``. A list is YAML: ``- source: org/name``
with ``revision`` and ``subfolder`` where needed. A row is what ``bf16-to-fp16 convert --json`` reports, with the time
and the memory of that process. A checkpoint whose report is there is not done again; one that fails is a row with the
reason, and is tried again by the next run. Status 0: all done; 1: at least one failed; 2: a bad list. Linux and macOS.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment

from bf16_to_fp16.numerics import FP16_MAX

KEYS = ("source", "revision", "subfolder")
REPORT, PAGE = "fp16_report.json", "fp16_report.html"
COLUMNS = (
    *("source", "subfolder", "revision", "status", "error", "family", "parameters", "source_largest", "source_site"),
    *("verdict", "proof", "target", "headroom_bits", "bound_bits", "tiers", "fidelity", "error_bf16", "error_fp16"),
    *("seconds", "peak_bytes"),
)

TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8"><meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<title>fp16 survey: {{ sentence }}</title>
<style>body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .8rem; border-bottom: 1px solid #8886; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
.bad { color: #c0392b; }
</style>
<h1>Checkpoints in fp16</h1>
<p>{{ sentence }}</p>
<table style="border-collapse: collapse">
<tr><th>checkpoint<th>largest value as published, and where<th>converted<th>headroom in bits: run, any input
<th>tiers<th>error: bf16, fp16<th>time, memory</tr>
{% for row in rows %}
<tr>
<td>{% if row.page %}<a href="{{ row.page }}">{{ row.name }}</a>{% else %}{{ row.name }}{% endif %}
<br>{{ row.revision or "" }}
{% if row.status == "done" %}
<td class="{{ 'bad' if (row.source_largest or 0) > limit }}">{{ row.source_largest | number }}<br>
{{ row.source_site or "" }}
<td class="{{ 'bad' if row.verdict != 'safe' }}">{{ row.verdict }} ({{ row.proof or "no proof" }})
<br>target {{ row.target }}
<td class="n">{{ row.headroom_bits | number }}<br>{{ row.bound_bits | number }}
<td>{{ row.tiers }}
<td class="n">{{ row.error_bf16 | number }}<br>{{ row.error_fp16 | number }}<br>{{ row.fidelity or "" }}
{% else %}
<td colspan="5" class="{{ 'bad' if row.status == 'failed' }}">{{ row.status }}{{ ": " ~ row.error if row.error }}
{% endif %}
<td class="n">{{ row.seconds | number }} s<br>{{ (row.peak_bytes / 1e9) | number if row.peak_bytes else "?" }} GB
</tr>
{% endfor %}
</table>
</html>
"""


def read_list(path: Path) -> list[dict[str, str]]:
    """Return the checkpoints of a list; raise ValueError for one that is no mapping of ``KEYS`` to text."""
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: a list is made of entries like `- source: org/name`")
    for number, entry in enumerate(entries, 1):
        good = isinstance(entry, dict) and entry.get("source") and set(entry) <= set(KEYS)
        if not good or not all(isinstance(value, str) for value in entry.values()):
            raise ValueError(f"{path}: entry {number} is {entry}; give text for source and, where needed, {KEYS[1:]}")
        if entry in entries[: number - 1]:
            raise ValueError(f"{path}: entry {number} ({entry['source']}) is there twice; remove one of them")
    return entries


def folder_of(entry: dict[str, str], options: Sequence[str], out: Path) -> Path:
    """Return the folder of a checkpoint's reports, which no other entry or options share."""
    described = json.dumps([[entry.get(key) for key in KEYS], list(options)])
    words = re.sub(r"[^\w.-]+", "-", Path(entry["source"]).name).strip("-.")
    return out / "checkpoints" / f"{words}-{hashlib.sha256(described.encode()).hexdigest()[:8]}"


def convert(entry: dict[str, str], options: Sequence[str], folder: Path, keep: bool) -> str | None:
    """Convert one checkpoint in a process; leave report, page and cost in ``folder``; return why it failed, or None."""
    folder.mkdir(parents=True, exist_ok=True)
    converted, source = folder / "converted", "@".join(filter(None, (entry["source"], entry.get("revision"))))
    command = [sys.executable, "-m", "bf16_to_fp16", "convert", source, str(converted), "--force", *options]
    command += ["--subfolder", entry["subfolder"]] if "subfolder" in entry else []
    begun = time.monotonic()
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen([*command, "--json", str(folder / REPORT)], stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    (folder / "cost.json").write_text(json.dumps({"seconds": time.monotonic() - begun, "peak_bytes": peak}))
    if (converted / PAGE).is_file():
        shutil.copy(converted / PAGE, folder / PAGE)
    if not keep:
        shutil.rmtree(converted, ignore_errors=True)
    if (folder / REPORT).is_file():
        return None
    said = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in said if line.startswith(("error: ", "bug: "))]
    return errors[-1] if errors else f"ended with status {process.returncode}; log.txt has the rest"


def row_of(entry: dict[str, str], folder: Path, error: str | None) -> dict[str, Any]:
    """Return the row of a checkpoint, and under ``name`` and ``page`` what the page alone shows."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS) | entry | {"status": "failed" if error else "waiting", "error": error}
    if Path(entry["source"]).exists():
        row["source"] = Path(entry["source"]).resolve().name  # where it lies is nobody else's business
    row["name"] = "/".join(filter(None, (row["source"], row["subfolder"])))
    row["page"] = f"checkpoints/{folder.name}/{PAGE}" if (folder / PAGE).is_file() else None
    if (folder / "cost.json").is_file():
        row |= json.loads((folder / "cost.json").read_text())
    if not (folder / REPORT).is_file():
        return row
    report = json.loads((folder / REPORT).read_text(encoding="utf-8"), parse_float=real)
    largest = max(report["signals"], key=lambda each: each["before"] or 0, default={"before": None, "module": None})
    fidelity = report["fidelity"] or {}
    return row | {
        "status": "done",
        "revision": report["source"]["revision"] or row["revision"],
        **{key: report[key] for key in ("family", "verdict", "proof", "target")},
        "parameters": report["weights"]["elements"],
        "source_largest": largest["before"],
        "source_site": largest["module"],
        "headroom_bits": min((each["headroom_bits"] for each in report["regimes"].values()), default=None),
        "bound_bits": (report["certificate"] or {}).get("headroom_bits"),
        "tiers": " ".join(f"{name}:{tier['proof']}" for name, tier in report["tiers"].items() if tier["holds"]),
        "fidelity": fidelity.get("measure"),
        "error_bf16": fidelity.get("kl_bf16"),
        "error_fp16": fidelity.get("kl_fp16"),
    }


def real(text: str) -> float:
    """Return a number of a report, which has the largest double for infinity."""
    value = float(text)
    return value if abs(value) < sys.float_info.max else value * float("inf")


def write(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write page and table, each whole or not at all."""
    count = {status: sum(row["status"] == status for row in rows) for status in ("done", "failed", "waiting")}
    safe = sum(row["verdict"] == "safe" for row in rows)
    sentence = f"{count['done']} of {len(rows)} converted, {safe} of them safe in fp16, {count['failed']} failed."
    environment = Environment(autoescape=True, trim_blocks=True)
    environment.filters["number"] = lambda value: "?" if value is None else f"{value:.3g}"
    page = environment.from_string(TEMPLATE).render(rows=rows, sentence=sentence, limit=FP16_MAX)
    (out / ".survey.html.new").write_text(page, encoding="utf-8")
    with (out / ".survey.csv.new").open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    for name in ("survey.html", "survey.csv"):
        (out / f".{name}.new").replace(out / name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is left of a list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path)
    parser.add_argument("out", type=Path, help="folder of survey.html, survey.csv and the reports")
    parser.add_argument("--keep", action="store_true", help="keep the converted checkpoints")
    words = list(sys.argv[1:] if arguments is None else arguments)
    border = words.index("--") if "--" in words else len(words)
    asked, options = parser.parse_args(words[:border]), words[border + 1 :]
    try:
        entries = read_list(asked.list)
    except (OSError, ValueError, yaml.YAMLError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    asked.out.mkdir(parents=True, exist_ok=True)
    folders = [folder_of(entry, options, asked.out) for entry in entries]
    errors: dict[int, str | None] = {}
    for place, (entry, folder) in enumerate(zip(entries, folders, strict=True)):
        if not (folder / REPORT).is_file():
            errors[place] = convert(entry, options, folder, asked.keep)
        rows = [row_of(entries[i], folders[i], errors.get(i)) for i in range(len(entries))]
        write(asked.out, rows)
        print(f"{entry['source']}: {errors.get(place) or rows[place]['verdict']}", file=sys.stderr, flush=True)
    return 1 if any(errors.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
