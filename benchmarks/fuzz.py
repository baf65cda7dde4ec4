"""Mutate every kind of input for as long as asked and print what was accepted, what refused, and every failure.

    python benchmarks/fuzz.py --minutes 10 [--only config] [--thorough]
    python benchmarks/fuzz.py --config-edits 50000 [--only t5]

The mutations are those of ``tests/support/fuzzing.py``, with other seeds each time. A failure is any exception but an
``error:`` line, a run of more than a minute, or a peak of memory that grew by more than ``--megabytes``; those with the
same exception from the same line of the package are one. Exits with 1 where there is any.

The second form edits, for so many times over all families, one or two keys of a config.json that stock code knows, as
``tests/support/config_edits.py`` does: what is certified then must stay under its bounds in stock code.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from support import config_edits, fuzzing

EXAMPLES = 50
"""Runs between two looks at the clock."""

KINDS = ("t5", "gated", "t5-encoder", "mt5", "umt5", "pegasus")
"""Models whose configs are edited."""


def place_of(error: BaseException) -> str:
    """Return where in the package, else where at all, an exception came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/bf16_to_fp16/" in f.filename] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} {type(error).__name__}"


@dataclass
class Tally:
    """What came of every case: outcomes by kind of input, failures by where they come from, the peak of memory (KB)."""

    good: fuzzing.Originals
    thorough: bool
    megabytes: float
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    peak: int = field(default_factory=lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    def run(self, kind: str, case: fuzzing.Case) -> None:
        """Run a case and count what came of it."""
        shown = f"{case[:2]} {case[2][:400]!r}"
        try:
            outcome = fuzzing.run(self.good, case, thorough=self.thorough)
        except Exception as error:
            outcome = "failed"
            self.failures.setdefault(f"{kind}: {place_of(error)}", f"{str(error)[:300]}\n      {shown}")
        self.outcomes.setdefault(kind, Counter())[outcome] += 1
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if peak - self.peak > self.megabytes * 1024:
            self.failures[f"{kind}: memory grew by {(peak - self.peak) >> 10} MB"] = shown
        self.peak = peak


def fuzz(tally: Tally, kind: str, cases: st.SearchStrategy[fuzzing.Case], number: int) -> None:
    """Run some cases of one kind, those that ``number`` gives."""

    @seed(number)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def mutate(case: fuzzing.Case) -> None:
        tally.run(kind, case)

    mutate()


def edit_configs(number: int, seed: int, kinds: Sequence[str]) -> int:
    """Judge so many edits of configs, of which ``KINDS`` have equal parts, print what came of those of ``kinds``, and
    return 1 where any failed."""
    failures = []
    print(f"seed {seed}\n\n| model | refused | not certified | agrees | failed | seconds |\n|---|---|---|---|---|---|")
    for kind in kinds:
        start = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            found = config_edits.run(config_edits.original(kind, Path(folder)), -(-number // len(KINDS)), seed)
        columns = [found.counts[name] for name in ("refused", "uncertified", "agrees", "failed")]
        print(f"| {kind} | {' | '.join(map(str, columns))} | {time.process_time() - start:.0f} |", flush=True)
        failures += found.failures
    print(*failures, sep="\n")
    return 1 if failures else 0


def main() -> int:
    """Fuzz and print the table."""
    parser = argparse.ArgumentParser(description="fuzz everything that is read")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", action="append", help="a kind of input, or model; repeatable")
    parser.add_argument("--thorough", action="store_true", help="convert with the audit whatever opens")
    parser.add_argument("--megabytes", type=float, default=1024.0, help="most that memory may grow by in one case")
    parser.add_argument("--seed", type=int, default=random.randrange(10**9))
    parser.add_argument("--config-edits", type=int, metavar="N", help="edit configs so many times, and nothing else")
    chosen = parser.parse_args()
    if chosen.config_edits is not None:
        return edit_configs(chosen.config_edits, chosen.seed, chosen.only or KINDS)
    with tempfile.TemporaryDirectory() as folder:
        tally = Tally(fuzzing.originals(Path(folder)), chosen.thorough, chosen.megabytes)
        strategies = fuzzing.cases(tally.good)
        end, number = time.monotonic() + 60 * chosen.minutes, chosen.seed
        while time.monotonic() < end:
            for kind in chosen.only or strategies:
                number += 1
                fuzz(tally, kind, strategies[kind], number)
    print(
        f"seed {chosen.seed}, {chosen.minutes:g} minutes\n\n| input | accepted | refused | failed |\n|---|---|---|---|"
    )
    for kind, found in tally.outcomes.items():
        print(f"| {kind} | {found['accepted']} | {found['refused']} | {found['failed']} |")
    for where, what in tally.failures.items():
        print(f"\n{where}\n      {what}")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
