"""Killed, interrupted, out of space: the output is whole or absent, a second run succeeds, nothing stays beside it."""

import functools
import itertools
import multiprocessing
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import exhaustive, faults, forked
from support.faults import JOBS

from bf16_to_fp16.checkpoint import staging
from bf16_to_fp16.conversion import convert as converting
from bf16_to_fp16.conversion import planning
from bf16_to_fp16.conversion.convert import convert
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.measuring import batch, probe

KILLS = {"convert": 16, "convert --force": 10, "undo": 12, "convert a pipeline": 12}
"""Moments at which each is killed, some at random; with those of finetune more than 50."""

FEW_KILLS = {"convert": 3, "convert --force": 2, "undo": 2, "convert a pipeline": 2}
"""The last moments of so many kinds, the renames among them, which ``make test`` tries."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the jobs begin with; their audits run few batches, for which no moment waits."""
    gather = probe.audit_batches

    def few(*given: Any, **options: Any) -> list[batch.Batch]:
        return [b for b in gather(*given, **options) if b.kind in (batch.PADDED, batch.GENERATE)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "audit_batches", few)
        yield faults.make_inputs(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def whole(inputs: Path) -> Callable[[str], faults.Whole]:
    return functools.cache(lambda name: faults.undisturbed(JOBS[name], inputs))


def assert_a_second_run_succeeds(name: str, root: Path, wanted: dict[str, str]) -> None:
    if not JOBS[name].prepare and (root / "out").exists():
        shutil.rmtree(root / "out")
    assert faults.run(JOBS[name], root, log=root / "log") in (0, 1), (root / "log").read_text()
    assert faults.content(root / "out") == wanted
    assert not faults.wrong_after(JOBS[name], root, wanted, strays=False)


@pytest.mark.parametrize(("name", "kills"), exhaustive.beyond(FEW_KILLS.items(), [*FEW_KILLS.items(), *KILLS.items()]))
def test_a_kill_leaves_all_or_none(name: str, kills: int, inputs: Path, whole: Callable[[str], faults.Whole]) -> None:
    job, names, wanted = JOBS[name], whole(name).moments, whole(name).content
    # The last of each kind, the renames among them, and the others at random.
    last = sorted({kind: number for number, kind in enumerate(names, 1)}.values())[-kills:]
    moments = sorted({*last, *random.Random(7).sample(range(1, len(names) + 1), kills - len(last))})
    root, left = faults.place(job, inputs), 0
    for number, at in enumerate(moments):
        if not job.prepare and (root / "out").exists():
            shutil.rmtree(root / "out")
        faults.prepare(job, root)
        assert faults.disturbed(job, root, at, faults.kill) == -signal.SIGKILL, names[at - 1]
        assert not faults.wrong_after(job, root, wanted, strays=True), names[at - 1]
        left += bool(faults.wrong_after(job, root, wanted, strays=False))
        if number % 8 == 7:
            assert_a_second_run_succeeds(name, root, wanted)
    assert_a_second_run_succeeds(name, root, wanted)
    assert left > min(3, kills - len(last))  # kills that hit nothing would prove nothing


def test_a_killed_finetune_goes_on_to_the_same_bits(inputs: Path, whole: Callable[[str], faults.Whole]) -> None:
    job, names, chance = JOBS["finetune"], whole("finetune").moments, random.Random(5)
    root = faults.place(job, inputs)
    for at in sorted(chance.sample(range(1, len(names) // 2), 2)):
        assert faults.disturbed(job, root, at, faults.kill) == -signal.SIGKILL
        assert not (root / "out").exists()
    assert faults.run(job, root, log=root / "log") in (0, 1), (root / "log").read_text()
    assert faults.content(root / "out") == whole("finetune").content
    assert not faults.wrong_after(job, root, whole("finetune").content, strays=False)
    states = [path.name for path in (root / "out.run").iterdir()]
    assert not [name for name in states if name.startswith(".")]


@pytest.mark.parametrize(
    ("name", "kind"), exhaustive.beyond([("convert", "EIO"), ("undo", "ENOSPC")], itertools.product(KILLS, faults.DISK))
)
def test_a_failing_disk_leaves_none(name: str, kind: str, inputs: Path, whole: Callable[[str], faults.Whole]) -> None:
    job, names, wanted = JOBS[name], whole(name).moments, whole(name).content
    # A disk that refuses even to remove can be left clean by nobody.
    possible = [at for at, event in enumerate(names, 1) if event not in ("os.rmdir", "os.remove")]
    first = {names[at - 1]: at for at in reversed(possible)}
    root = faults.place(job, inputs)
    refused = 0
    for at in sorted({*first.values(), *random.Random(kind).sample(possible, 2)}):
        faults.prepare(job, root)
        status = faults.disturbed(job, root, at, faults.fail(faults.DISK[kind]), log=root / "log")
        said = (root / "log").read_text()
        assert not faults.wrong_after(job, root, wanted, strays=False), (names[at - 1], said)
        if status == 2:
            assert [line for line in said.splitlines() if "rror" in line] == [said.splitlines()[-1]], said
            assert not (root / "out").exists() or job.prepare
            refused += 1
        else:  # what fails once the result stands, or while an older leftover is removed, is not its fault
            assert status in (0, 1), (names[at - 1], said)
            assert faults.content(root / "out") == wanted
            shutil.rmtree(root / "out")
    assert refused >= 3


@pytest.mark.parametrize("limit", [100, 12_000, 20_000])
def test_a_real_limit_on_files_is_one_line_and_leaves_nothing(limit: int, inputs: Path) -> None:
    job = JOBS["convert"]
    root = faults.place(job, inputs)

    def limited() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        return faults.main(job.words(root))

    read, write = os.pipe()  # a log file would be limited too
    number = forked.child(lambda: os.dup2(write, 2) and limited())
    os.close(write)
    with os.fdopen(read) as stream:
        said = stream.read()
    assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 2, said
    assert said.splitlines()[-1].startswith("error: ") and "File too large" in said and "Traceback" not in said
    assert not (root / "out").exists() and not faults.wrong_after(job, root, {}, strays=False)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("name", ["convert", "undo"])
def test_termination_and_interruption_clean_up(
    name: str, number: int, status: int, inputs: Path, whole: Callable[[str], faults.Whole]
) -> None:
    job, names = JOBS[name], whole(name).moments
    root = faults.place(job, inputs)
    inside = [at for at, kind in enumerate(names, 1) if at < names.index("fsync") + 1]
    for at in sorted(random.Random(number).sample(inside, 3)):
        found = faults.disturbed(job, root, at, faults.interrupt(number), log=root / "log")
        said = (root / "log").read_text()
        assert found == status, said
        assert "Traceback" not in said
        assert not (root / "out").exists() and not faults.wrong_after(job, root, {}, strays=False), said


def test_of_two_conversions_to_one_place_one_wins(inputs: Path, whole: Callable[[str], faults.Whole]) -> None:
    job, wanted = JOBS["convert"], whole("convert").content
    root = faults.place(job, inputs)
    both = multiprocessing.get_context("fork").Barrier(2)

    def raced() -> int:
        real = staging.put_in_place

        def together(work: Path, out: Path, *, force: bool) -> None:
            both.wait(60)  # both have written all, and neither has its place
            real(work, out, force=force)

        staging.put_in_place = together
        return faults.main(job.words(root))

    children = [forked.child(raced, root / f"log {i}") for i in range(2)]
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    logs = [(root / f"log {i}").read_text() for i in range(2)]
    assert sorted(status == 2 for status in ended) == [False, True], logs
    said = f"another program wrote {root / 'out'} meanwhile; choose another output path or give --force"
    assert logs[ended.index(2)].splitlines()[-1] == f"error: {said}"
    assert faults.content(root / "out") == wanted
    assert {path.name for path in root.iterdir()} == {"source", "out", "log 0", "log 1"}


def test_what_another_process_works_in_is_not_taken_for_a_leftover(tmp_path: Path) -> None:
    number = forked.child(lambda: None)
    os.waitpid(number, 0)
    dead = tmp_path / f".out.partial-{staging.MACHINE}-{number}-01234567"
    other = tmp_path / f".out.partial-00000000-{number}-01234567"
    (dead / "deep").mkdir(parents=True)
    other.mkdir()
    with staging.scratch(tmp_path / "out") as mine:
        assert not dead.exists() and other.exists()
        number = forked.child(lambda: staging.sweep(tmp_path / "out"))
        assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 0
        assert mine.is_dir()
    assert not mine.exists()


def rewritten(file: Path) -> None:
    before = file.stat()
    with open(file, "r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x01")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def exchanged(file: Path) -> None:
    copy = file.with_suffix(".other")
    shutil.copy2(file, copy)
    os.rename(copy, file)


@pytest.mark.parametrize(
    ("change", "step", "moment"), [(rewritten, planning, "bound"), (exchanged, converting, "write_fp16")]
)
def test_a_shard_that_changes_while_it_is_read_is_noticed(
    change: Callable[[Path], None], step: ModuleType, moment: str, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = faults.place(JOBS["convert"], inputs)
    real = getattr(step, moment)
    shard = sorted((root / "source").glob("*.safetensors"))[-1]

    def then(*given: object, **options: object) -> object:
        result = real(*given, **options)
        if (root / "source" / "seen").exists():
            return result
        (root / "source" / "seen").touch()
        change(shard)
        return result

    # A change between two passes needs a place to stop between them, which the program does not have.
    monkeypatch.setattr(step, moment, then)
    with pytest.raises(UserError, match=f"{shard.name} changed while it was read"):
        convert(root / "source", root / "out", run_model=False)
    assert not (root / "out").exists() and not list(root.glob(".*"))
