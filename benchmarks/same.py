"""Whether conversions still give what they gave, for two targets each: verdict, proof, plan, certificate and bytes.

    python benchmarks/same.py            compares with benchmarks/same.json; exit status 1 where something differs
    python benchmarks/same.py --record   writes it anew, for a change that is meant to be one

Numbers may differ by 1e-12 of themselves, the certificate's among them; all else must be equal.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from models import DEMO, HARD
from support import tiny

from bf16_to_fp16 import convert

RECORD = Path(__file__).with_name("same.json")
NAMES = (
    *("t5-gated-bytes", "pegasus-bytes", "gemma3-bytes", "t5-hard-bytes"),
    *("llama", "qwen3", "glm4", "longt5", "mbart", "t5gemma"),
)
"""Shipped checkpoints, and small random ones of other families."""

CASES = [f"{name}, {target}" for name in NAMES for target in ("auto", "norm-safe")]


def source_of(name: str, folder: Path) -> Path:
    """Return the folder of a checkpoint, made in ``folder`` where it is not shipped."""
    if name.endswith("-bytes"):
        return HARD if name == HARD.name else DEMO / name
    return tiny.save(tiny.small(name), folder / name)


def result_of(case: str) -> dict[str, Any]:
    """Convert a checkpoint for a target, and return what must stay the same of it."""
    name, target = case.split(", ")
    with tempfile.TemporaryDirectory() as place:
        report = convert(source_of(name, Path(place)), Path(place) / "out", target=target, progress=False).report
    plan = {key: value for key, value in report["plan"].items() if key != "drift"}
    sites = {site["name"]: [site["bound"], site["partial"], site["limit"]] for site in report["certificate"]["sites"]}
    files = {f["name"]: f["sha256"] for f in report["output"]["files"] if f["name"].endswith(".safetensors")}
    known = {"target": target, "verdict": report["verdict"], "proof": report["proof"]}
    tiers = {tier: entry["proof"] for tier, entry in report["tiers"].items()}
    return {**known, "tiers": tiers, "plan": plan, "certificate": sites, "weights": files}


def differences(said: Any, now: Any, key: str = "") -> Iterator[str]:
    """Yield what differs between a recorded result and this one."""
    if isinstance(said, Mapping) and isinstance(now, Mapping):
        for name in {**said, **now}:
            yield from differences(said.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif isinstance(said, list) and isinstance(now, list) and len(said) == len(now):
        for i, pair in enumerate(zip(said, now, strict=True)):
            yield from differences(*pair, f"{key}[{i}]")
    elif not (
        math.isclose(said, now, rel_tol=1e-12)
        if isinstance(said, float) and isinstance(now, float)
        else said == now and type(said) is type(now)
    ):
        yield f"{key}: {said!r} before, {now!r} now"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the record anew")
    parser.add_argument("names", nargs="*", help="these cases alone, such as 'llama, auto'")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    failed = False
    for name in options.names or CASES:
        now = json.loads(json.dumps(result_of(name)))
        if options.record:
            record[name] = now
            continue
        found = list(differences(record.get(name), now))
        failed = failed or bool(found)
        print(f"{name}: {f'{len(found)} differences' if found else 'the same'}", *found[:10], sep="\n  ", flush=True)
    if options.record:
        lines = (f"{json.dumps(name)}: {json.dumps(record[name])}" for name in CASES if name in record)
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8", newline="\n")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
