"""Running a survey: a process for each checkpoint, several at a time where memory allows, and what is done kept.

Each checkpoint has a folder of its own below ``checkpoints``, with its reports and a small ``result.json``; a survey
that is started again takes what is there, as long as it was made from the same.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import system
from ..checkpoint.formats import read_json
from ..checkpoint.ownership import files_of, strange_file
from ..checkpoint.staging import check_out
from ..errors import UserError, first_line
from ..progress import Progress
from ..run.memory import available
from ..wording import bytes_in_words
from .checkpoints import Listed
from .page import render
from .rows import HEADER, Row, as_csv
from .worker import CONVERTED, REPORTS, RESULT, key_of

PAGE, TABLE, CHECKPOINTS = "survey.html", "survey.csv", "checkpoints"


FIRST = ",".join(HEADER[:4])
"""What the table of a survey begins with."""


OF_A_CHECKPOINT = {RESULT, f"{RESULT}.new", "log.txt", *REPORTS, CONVERTED}
"""What the folder of a checkpoint may hold."""


CORES = 4
"""Cores for a checkpoint, where as many are surveyed at a time as memory allows."""


BASE_BYTES, BYTES_A_PARAMETER = 2_500_000_000, 6
"""Memory that is set aside for a checkpoint: libraries, activations and logits; more than any whole conversion in
benchmarks/RESULTS.md took, and enough for an audit of another class, which loads a model whole in fp32."""


@dataclass(frozen=True)
class Settings:
    """How the checkpoints of a survey are run: options of ``audit`` and ``convert``; whether weights are kept."""

    target: str = "auto"
    data: str | None = None
    seed: int = 0
    device: str = "auto"
    keep: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """What decides the figures."""
        return {"target": self.target, "data": self.data, "seed": self.seed, "device": self.device}


@dataclass
class Room:
    """The memory for all checkpoints that are worked on at a time, in bytes."""

    total: float
    taken: list[float] = field(default_factory=list)
    closed: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def of(self, needed: float) -> Iterator[None]:
        """Wait until there is room for ``needed`` bytes, or nobody else takes any, and take it for the block."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or not self.taken or sum(self.taken) + needed <= self.total)
            self.taken.append(needed)
        try:
            yield
        finally:
            with self.changed:
                self.taken.remove(needed)
                self.changed.notify_all()

    def close(self) -> None:
        """Let nobody wait any longer."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()


def survey(
    listed: Sequence[Listed],
    out: Path,
    settings: Settings,
    *,
    jobs: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> list[Row]:
    """Survey the checkpoints of a list, write page and table to ``out``, and return the rows in the list's order.

    jobs: how many at a time, by default as many as memory and cores allow. force: do again what is done. A checkpoint
    that cannot be done, whatever became of its process, is a row that says why. Raises UserError where ``out`` cannot
    be used, or another survey is at work in it.
    """
    progress = progress or Progress(quiet=True)
    with claimed(out):
        rows = {entry: waiting(entry) for entry in listed}
        if not force:
            rows |= {entry: row for entry in listed if (row := stored(entry, out, settings)) is not None}
        left = [entry for entry in listed if not rows[entry].ended]
        if len(left) < len(listed):
            progress.say(f"{len(listed) - len(left)} of {len(listed)} are done already")
        for entry in left:
            check_ours(folder_of(entry, out))
        for entry in left:  # what a run left that was stopped, or was made from something else
            shutil.rmtree(folder_of(entry, out), ignore_errors=True)
        write(out, rows)
        with ExitStack() as stack:
            advance = stack.enter_context(progress.step(f"Surveying {len(left)} of {len(listed)} checkpoints"))
            each = stack.enter_context(closing(each_surveyed(left, out, settings, jobs)))
            for number, (entry, found) in enumerate(each, 1):
                row = rows[entry] = Row.model_validate({**rows[entry].model_dump(), **found})
                write(out, rows)
                took = "" if row.seconds is None else f", {row.seconds:.0f} s"
                memory = "" if row.peak_bytes is None else f", {bytes_in_words(row.peak_bytes)} of memory"
                progress.say(f"{entry.name}: {row.error or row.verdict or row.status}{took}{memory}")
                advance(number, len(left))
        return list(rows.values())


def each_surveyed(
    left: Sequence[Listed], out: Path, settings: Settings, jobs: int | None
) -> Generator[tuple[Listed, dict[str, Any]], None, None]:
    """Yield each checkpoint with what was found when it is done; where the loop is left before, end the processes."""
    if not left:
        return
    cores = system.cores()
    workers = min(len(left), jobs or max(1, cores // CORES))
    room = Room(available() if jobs is None else float("inf"))
    running: set[subprocess.Popen[str]] = set()
    threads = str(max(1, cores // workers))
    environment = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    pool = ThreadPoolExecutor(workers, thread_name_prefix="survey")
    try:
        work = {pool.submit(surveyed, e, out, settings, room, running, environment): e for e in left}
        for done in as_completed(work):
            try:
                found = done.result()
            except Exception as error:  # such as a full disk: the others may fit
                found = {"status": "failed", "error": f"{type(error).__name__}: {first_line(error)}"}
            yield work[done], found
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        room.close()
        for process in list(running):
            process.kill()
        pool.shutdown()


def surveyed(
    entry: Listed,
    out: Path,
    settings: Settings,
    room: Room,
    running: set[subprocess.Popen[str]],
    environment: dict[str, str],
) -> dict[str, Any]:
    """Return what was found of a checkpoint by a process of its own."""
    folder = folder_of(entry, out)
    folder.mkdir(parents=True)
    job = {**entry.model_dump(), "where": entry.where, "options": settings.options, "keep": settings.keep}
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "bf16_to_fp16.survey.worker", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the survey, which then ends it
        )
    running.add(process)
    if room.closed:
        process.kill()
    try:
        assert process.stdin is not None and process.stdout is not None
        tell(process, json.dumps(job))
        line = process.stdout.readline()  # once it is fetched and opened; nothing where that failed
        opened = json.loads(line) if line.endswith("\n") else {}
        with room.of(BASE_BYTES + BYTES_A_PARAMETER * (opened.get("parameters") or 0) if opened else 0):
            tell(process, "go")
            status = process.wait()
    finally:
        running.discard(process)
        process.kill()
        process.communicate()
    result = folder / RESULT
    if result.is_file():
        return dict(read_json(result, "result")["found"])
    shutil.rmtree(folder / CONVERTED, ignore_errors=True)
    return {**opened, "status": "failed", "error": how_it_ended(status)}


def tell(process: subprocess.Popen[str], line: str) -> None:
    """Write a line to a process; nothing where it has ended."""
    with suppress(BrokenPipeError, ValueError):
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()


def how_it_ended(status: int) -> str:
    """Return what became of a process that left no result, in one line."""
    if status >= 0:
        return f"its process ended with status {status} and left no result; log.txt in its folder has the rest"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"its process was killed ({name})" + (", as the system does where memory runs out" if status == -9 else "")


# --- what is there ---------------------------------------------------------------------------------------------------


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Make the folder of a survey, and keep others out of it; raise UserError where it holds something else."""
    if not is_survey(out):
        if out.is_dir() and any(name != f".{TABLE}.new" for name, _ in files_of(out)):
            raise UserError(f"{out} is not empty and holds no survey; choose another OUTDIR")
        if not (out / CHECKPOINTS).is_dir():
            check_out(out, force=False)
    try:
        (out / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        lock = system.hold(out / CHECKPOINTS)
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}; choose another OUTDIR") from error
    if lock is None:
        raise UserError(
            f"{out}: another survey is at work in it, or its disk has no locks; wait for it, or choose another OUTDIR"
        )
    try:
        yield
    finally:
        os.close(lock)


def is_survey(out: Path) -> bool:
    """Return whether a folder holds a survey: its table is the first file that it has."""
    try:
        with (out / TABLE).open(encoding="utf-8") as table:
            return table.read(len(FIRST)) == FIRST
    except (OSError, UnicodeDecodeError):
        return False


def check_ours(folder: Path) -> None:
    """Raise UserError where the folder of a checkpoint holds what no survey wrote, so that it may not be removed."""
    if not folder.is_dir():
        return
    leftover = re.compile(r"\.converted\.(partial|replaced)-[0-9a-f]{16}")
    strange = [
        p.name for p in sorted(folder.iterdir()) if p.name not in OF_A_CHECKPOINT and not leftover.fullmatch(p.name)
    ]
    converted = folder / CONVERTED
    if not strange and converted.is_dir() and (name := strange_file(converted)) is not None:
        strange = [f"{CONVERTED}/{name}"]
    if strange:
        raise UserError(f"{folder} holds {strange[0]}, which no survey wrote; move it away, or choose another OUTDIR")


def folder_of(entry: Listed, out: Path) -> Path:
    """Return the folder of a checkpoint's reports."""
    return out / CHECKPOINTS / entry.folder


def waiting(entry: Listed) -> Row:
    """Return the row of a checkpoint of which nothing is known yet."""
    name = entry.source if entry.local is None else Path(entry.source).expanduser().absolute().name
    return Row(source=name, subfolder=entry.subfolder, revision=entry.revision)


def stored(entry: Listed, out: Path, settings: Settings) -> Row | None:
    """Return the row of a checkpoint that is done, None where it is not, or was made from something else."""
    result = folder_of(entry, out) / RESULT
    try:
        data = read_json(result, "result") if result.is_file() else {}
        if not data.get("key") or (settings.keep and data["found"]["status"] == "done" and not kept(entry, out)):
            return None
        if data["key"] != key_of(entry.source, entry.revision, entry.subfolder, settings.options):
            return None
        row = Row.model_validate({**waiting(entry).model_dump(), **data["found"]})
    except (UserError, KeyError, TypeError, ValueError):
        return None
    return row if row.ended else None


def kept(entry: Listed, out: Path) -> bool:
    """Return whether the converted weights of a checkpoint are there."""
    return (folder_of(entry, out) / CONVERTED).is_dir()


def write(out: Path, rows: Mapping[Listed, Row]) -> None:
    """Write page and table, each whole or not at all."""
    done = list(rows.values())
    page = render(done, [f"{CHECKPOINTS}/{entry.folder}" for entry in rows])
    for name, text in ((TABLE, as_csv(done)), (PAGE, page)):
        new = out / f".{name}.new"
        try:
            new.write_text(text, encoding="utf-8", newline="\n")
            system.replace_file(new, out / name)
        except OSError as error:
            raise UserError(f"{out / name}: {error.strerror}; free some space or choose another OUTDIR") from error
