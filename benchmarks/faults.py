"""Kill, fail and interrupt every command that writes a folder or publishes one, many times, and print what was left.

    python benchmarks/faults.py --kills 1000 [--only convert]

The moments and the checks are those of ``tests/support/faults.py``: a kill at a random moment or, every fourth time, at
a random time; then errors of the disk and signals at every moment there is. Output whole or absent, a second run that
succeeds, no strays after it. ``publish`` is killed on a request to a server of its own, before it is carried out or
after, or at a random time: the repository has all or nothing. Exits with 1 where anything was wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import faults
from support.hub_server import HubServer

AGAIN = 10
"""Kills between two undisturbed runs."""


def killed(job: faults.Job, inputs: Path, kills: int, chance: random.Random) -> tuple[Counter[str], list[str]]:
    """Kill a job so many times and return what was seen and what was wrong."""
    root = faults.place(job, inputs)
    began = time.monotonic()
    undisturbed = faults.undisturbed(job, inputs)
    took, names, whole = time.monotonic() - began, undisturbed.moments, undisturbed.content
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    for number in range(kills):
        for name in ("out", *job.kept) if not job.prepare else ():
            shutil.rmtree(root / name, ignore_errors=True)
        faults.prepare(job, root)
        if number % 4 == 3:
            at, status = "time", faults.killed_after(job, root, chance.uniform(0, took))
        else:
            moment = chance.randrange(1, len(names) + 1)
            at, status = names[moment - 1], faults.disturbed(job, root, moment, faults.kill)
        seen["killed"] += status == -signal.SIGKILL
        seen["whole"] += (root / "out").exists()
        seen["left something"] += bool(faults.wrong_after(job, root, whole, strays=False))
        problem = "" if job.name == "finetune" else faults.wrong_after(job, root, whole, strays=True)
        if not problem and number % AGAIN == AGAIN - 1:
            if not job.prepare:
                shutil.rmtree(root / "out", ignore_errors=True)
            if faults.run(job, root) not in (0, 1):
                problem = "the second run failed"
            else:
                problem = faults.wrong_after(job, root, whole, strays=False)
            seen["run again"] += 1
        if problem:
            wrong.append(f"{job.name}, killed at {at}: {problem}")
    return seen, wrong


def publishing(inputs: Path, kills: int, chance: random.Random) -> tuple[Counter[str], list[str]]:
    """Kill ``publish`` so many times and return what was seen and what was wrong."""
    root = faults.place(faults.JOBS["undo"], inputs)
    before = faults.content(root / "converted")
    server = HubServer().start()
    began = time.monotonic()
    faults.published(server, root)
    took, requests, wanted = time.monotonic() - began, len(server.seen), server.files(faults.PUBLISHED)
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    for number in range(kills):
        server.clear()
        if number % 4 == 3:
            at, status = "a time", faults.published(server, root, seconds=chance.uniform(0, took))
        else:
            place = chance.choice([*range(1, requests + 1), *range(-requests, 0)])
            at, status = f"request {place}", faults.published(server, root, at=place)
        seen["killed"] += status == -signal.SIGKILL
        seen["whole"] += faults.PUBLISHED in server.repos and server.files(faults.PUBLISHED) == wanted
        seen["left something"] += bool(server.objects or server.repos)
        problem = faults.wrong_on_hub(server, root, before, wanted)
        if not problem and number % AGAIN == AGAIN - 1:
            if faults.published(server, root) != 0 or server.files(faults.PUBLISHED) != wanted:
                problem = "the second run failed"
            seen["run again"] += 1
        if problem:
            wrong.append(f"publish, killed at {at}: {problem}")
    server.stop()
    return seen, wrong


def failed(job: faults.Job, inputs: Path) -> tuple[Counter[str], list[str]]:
    """Fail the disk and interrupt a job at every moment, and return what was seen and what was wrong."""
    undisturbed = faults.undisturbed(job, inputs)
    names, whole = undisturbed.moments, undisturbed.content
    root = faults.place(job, inputs)
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    ways = {name: faults.fail(number) for name, number in faults.DISK.items()}
    ways |= {"SIGTERM": faults.interrupt(signal.SIGTERM), "SIGINT": faults.interrupt(signal.SIGINT)}
    for moment, name in enumerate(names, 1):
        for way, what in ways.items():
            if way in faults.DISK and name in ("os.rmdir", "os.remove"):
                continue
            shutil.rmtree(root / "out", ignore_errors=True)
            faults.prepare(job, root)
            status = faults.disturbed(job, root, moment, what, root / "log")
            problem = faults.wrong_after(job, root, whole, strays=False)
            said = (root / "log").read_text()
            if status not in (0, 1, 2, 130, 143) or "Traceback" in said:
                problem = f"status {status}: {said[-300:]}"
            seen[way] += 1
            if problem:
                wrong.append(f"{job.name}, {way} at {name} ({moment}): {problem}")
    return seen, wrong


def main() -> int:
    """Disturb and print the tables."""
    parser = argparse.ArgumentParser(description="disturb every command that writes a folder")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--only", action="append", choices=[*faults.JOBS, "publish"], help="a command; repeatable")
    parser.add_argument("--seed", type=int, default=random.randrange(10**9))
    chosen = parser.parse_args()
    chance = random.Random(chosen.seed)
    names = chosen.only or [*faults.JOBS, "publish"]
    # A finetune takes many times as long as the others.
    weights = {name: 1 if name in ("finetune", "convert, audited") else 8 for name in names}
    wrong: list[str] = []
    print(f"seed {chosen.seed}\n\n| command | kills | output whole | something left | run again | faults | wrong |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        inputs = faults.make_inputs(Path(folder))
        for name in names:
            share = max(1, round(chosen.kills * weights[name] / sum(weights.values())))
            others: Counter[str] = Counter()
            if name == "publish":
                seen, found = publishing(inputs, share, chance)
            else:
                seen, found = killed(faults.JOBS[name], inputs, share, chance)
            if weights[name] > 1 and name != "publish":
                others, more = failed(faults.JOBS[name], inputs)
                found += more
            shown = ", ".join(f"{count} {way}" for way, count in others.items()) or "none"
            print(
                f"| {name} | {seen['killed']} | {seen['whole']} | {seen['left something']} | {seen['run again']}"
                f" | {shown} | {len(found)} |",
                flush=True,
            )
            wrong += found
    print("\n".join(["", *wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
