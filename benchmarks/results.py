"""Where every figure of RESULTS.md lives: one JSON file for each measurement, from which the page is made.

    python benchmarks/results.py                    writes RESULTS.md from benchmarks/results/*.json
    python benchmarks/results.py saturated peers     runs the commands of these two again first

A record has ``command``, ``what`` (the question, its terms and units), ``where`` (the machine), ``tables`` (as the
command printed them), and ``reading``, which a person writes. A command that runs again replaces tables and machine and
leaves the words: read them again. A new record is a file with ``command`` and ``what``, and its name in ``SECTIONS``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE, RECORDS = HERE / "RESULTS.md", HERE / "results"

OPENING = """# Benchmark results

Where a line names no machine, it is x86-64 with 2 cores, 24 GiB, torch 2.13, transformers 5.23 and no GPU. Ratios are
within one run; a load says that other work ran beside it. `make bench` runs the short ones. This page is made by
`python benchmarks/results.py` from `benchmarks/results/`, one file for each measurement.
"""

SECTIONS: dict[str, list[str]] = {
    "Published checkpoints": ["published", "published-training"],
    "Rewriting weights": ["writing"],
    "A whole conversion": ["whole", "whole-phases"],
    "Edits": ["saturated", "edits-random", "rare"],
    "The certificate": ["tightness"],
    "The demonstration": ["demo"],
    "What people use today": ["peers"],
    "Other runtimes": ["runtimes"],
    "What follows a conversion": ["rates"],
    "Finetuning": ["finetune", "penalty-cost"],
    "The optimizer": ["optimizer"],
    "On a GPU": ["gpu", "gpu-optimizer", "gpu-penalty", "gpu-half"],
}

Record = dict[str, Any]
Table = dict[str, list[Any]]


def read(name: str) -> Record:
    record: Record = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    return record


def page() -> str:
    parts = [OPENING]
    for heading, names in SECTIONS.items():
        parts += [f"## {heading}", *(part for name in names for part in paragraphs(read(name)))]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def paragraphs(record: Record) -> list[str]:
    title = f"**{record['title']}.** " if "title" in record else ""
    where = f" ({record['where']})" if "where" in record else ""
    tables = [markdown(table) for table in record.get("tables", ())]
    images = [f"![{what}]({name})" for what, name in record.get("images", ())]
    reading = [record["reading"]] if "reading" in record else []
    return [f"{title}`{record['command']}`{where}. {record['what']}", *tables, *images, *reading]


def markdown(table: Table) -> str:
    lines = [table["columns"], ["---"] * len(table["columns"]), *table["rows"]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def print_header(*columns: str) -> None:
    """Print the first two lines of a Markdown table."""
    print_row(*columns)
    print(f"|{'---|' * len(columns)}", flush=True)


def print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def tables_in(text: str) -> list[Table]:
    tables: list[Table] = []
    rows: list[list[str]] = []
    for line in [*text.splitlines(), ""]:
        if re.fullmatch(r"\|.*\|", line.strip()):
            rows.append([cell.strip() for cell in line.strip()[1:-1].split("|")])
            continue
        if len(rows) > 1 and set("".join(rows[1])) <= set("-: "):
            tables.append({"columns": rows[0], "rows": rows[2:]})
        rows = []
    return tables


def machine() -> str:
    """Return in words what ran: threads, load, device and versions."""
    import torch
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} cores"
    load = f"load {os.getloadavg()[0]:.0f}" if hasattr(os, "getloadavg") else "load not known"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{device}, {torch.get_num_threads()} threads, {load}, {versions}"


def run(name: str) -> None:
    """Run a record's command in the shell, show what it prints, and keep its tables and the machine."""
    record, printed = read(name), []
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    how: dict[str, Any] = {"cwd": HERE.parent, "env": os.environ | {"PATH": path}, "stdout": subprocess.PIPE}
    with subprocess.Popen(record["command"], shell=True, text=True, **how) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            printed.append(line)
    tables = tables_in("".join(printed))
    if process.returncode or not tables:
        sys.exit(f"{name}: {shlex.quote(record['command'])} ended with {process.returncode} and {len(tables)} tables")
    write(name, record | {"tables": tables, "where": machine()})
    print(f"{RECORDS / name}.json is written anew: read its `reading` again", file=sys.stderr)


def write(name: str, record: Record) -> None:
    """Write a record, a table's row on each line."""
    whole = json.dumps({key: value for key, value in record.items() if key != "tables"}, indent=2, ensure_ascii=False)
    tables = []
    for table in record.get("tables", ()):
        columns, rows = (json.dumps(cells, ensure_ascii=False) for cells in (table["columns"], table["rows"]))
        rows = rows[1:-1].replace("], [", "],\n        [")
        tables.append(f'    {{\n      "columns": {columns},\n      "rows": [\n        {rows}\n      ]\n    }}')
    if tables:
        whole = whole.removesuffix("\n}") + ',\n  "tables": [\n' + ",\n".join(tables) + "\n  ]\n}"
    (RECORDS / f"{name}.json").write_text(whole + "\n", encoding="utf-8")


if __name__ == "__main__":
    for each in sys.argv[1:]:
        run(each)
    PAGE.write_text(page(), encoding="utf-8")
