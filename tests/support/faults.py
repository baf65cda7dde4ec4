"""Commands that are killed, interrupted or failed by the disk at a chosen moment, each in a child of this process.
A moment is the n-th time that the command opens, makes, renames, writes or flushes something at its place."""

import errno
import hashlib
import importlib
import itertools
import json
import os
import pkgutil
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from support import forked, pipelines, tiny
from support.learner import recipe_tree
from transformers import ByT5Tokenizer

import bf16_to_fp16
from bf16_to_fp16 import cli, convert

WRAPPED = ("write", "fsync")  # calls of the os module that no audit event announces

AUDITED = ("open", "os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "shutil.copyfile")


@dataclass(frozen=True)
class Job:
    """A command: its words, its input files, and ``kept``: files besides ``out`` that it may leave."""

    command: str
    inputs: tuple[str, ...] = ("source",)
    kept: tuple[str, ...] = ()
    prepare: Callable[[Path], None] | None = None

    def words(self, root: Path) -> list[str]:
        return [word.format(root=root) for word in self.command.split()]


def replaced(root: Path) -> None:
    (root / "out").mkdir()
    (root / "out" / "older").write_text("older")
    digest = hashlib.sha256(b"older").hexdigest()
    listed = {"output": {"files": [{"name": "older", "nbytes": 5, "sha256": digest}]}}
    (root / "out" / "fp16_report.json").write_text(json.dumps(listed))


JOBS = {
    "convert": Job("convert {root}/source {root}/out --no-audit --target half"),
    "convert --force": Job(  # with a plan, so that what it writes is all that it does
        "convert {root}/source {root}/out --no-audit --force --plan {root}/converted",
        ("source", "converted"),
        prepare=replaced,
    ),
    "undo": Job("undo {root}/converted {root}/out", ("converted",)),
    "convert a pipeline": Job("convert {root}/pipeline {root}/out --no-audit", ("pipeline",)),
    "finetune": Job(
        "finetune {root}/recipe.yaml --set source={root}/source --set out={root}/out",
        ("source", "recipe.yaml", "text.txt"),
        ("out.run",),
    ),
}
"""Every command that writes a folder at a place of the user's."""


def make_inputs(root: Path) -> Path:
    """Make what the jobs begin with in ``root`` and return it; what they import is imported here, before any fork."""
    for module in pkgutil.walk_packages(bf16_to_fp16.__path__, "bf16_to_fp16."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    small: dict[str, Any] = {"num_layers": 1, "num_decoder_layers": 1, "vocab_size": 384, "dropout_rate": 0.0}
    tiny.save(tiny.build("t5", factor=4.0, **small), root / "source", max_shard_size="20KB")
    ByT5Tokenizer(extra_ids=125).save_pretrained(root / "source")
    convert(root / "source", root / "converted", run_model=False)
    pipelines.make(root / "pipeline", {"text_encoder_2": pipelines.encoder(num_layers=1)})
    (root / "text.txt").write_text("".join(f"some text of line {i}, long enough to mask\n" for i in range(40)))
    recipe = recipe_tree(root, root / "out") | {"precision": "fp32", "device": "cpu", "penalty": {"form": "none"}}
    recipe |= {"schedule": {"steps": 4}, "checkpointing": {"every": 1}, "evaluation": {"every": 100}}
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return root


def place(job: Job, inputs: Path) -> Path:
    root = Path(tempfile.mkdtemp(dir=inputs))
    for name in job.inputs:
        copy: Callable[[Path, Path], object] = shutil.copytree if (inputs / name).is_dir() else shutil.copyfile
        copy(inputs / name, root / name)
    return root


def run(job: Job, root: Path, *, log: Path | None = None) -> int:
    return forked.in_a_fork(lambda: main(job.words(root)), log)[0]


def main(words: list[str]) -> int:
    torch.set_num_threads(1)
    return cli.main(words)


def watch(root: Path, act: Callable[[int, str], None]) -> None:
    """Call ``act`` with number and name of every moment from now on; for a child only, as it cannot be undone."""
    numbers = itertools.count(1)
    inside = f"{root}/"

    def moment(name: str) -> None:
        act(next(numbers), name)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in AUDITED:
            return
        path = arguments[0]
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path).startswith(inside):
            return
        if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        moment(event)

    def wrapped(name: str) -> None:
        call = getattr(os, name)

        def announced(descriptor: int, *given: Any) -> Any:
            if name != "write" or os.readlink(f"/proc/self/fd/{descriptor}").startswith(inside):
                moment(name)
            return call(descriptor, *given)

        setattr(os, name, announced)

    for name in WRAPPED:
        wrapped(name)
    sys.addaudithook(hook)


@dataclass(frozen=True)
class Whole:
    """An undisturbed run: the names of all its moments in order, and the ``content`` of its output."""

    moments: Sequence[str]
    content: dict[str, str]


def undisturbed(job: Job, inputs: Path) -> Whole:
    root = place(job, inputs)
    prepare(job, root)
    read, write = os.pipe()

    def tell(_: int, name: str) -> None:
        os.write(write, f"{name}\n".encode())

    def counted() -> int:
        watch(root, tell)
        return main(job.words(root))

    number = forked.child(counted)
    os.close(write)
    with os.fdopen(read) as names:
        found = names.read().split("\n")[:-1]
    assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) in (0, 1)
    made = content(root / "out")
    assert not wrong_after(job, root, made, strays=False)
    shutil.rmtree(root)
    return Whole(found, made)


def prepare(job: Job, root: Path) -> None:
    if job.prepare is not None and not (root / "out").exists():
        job.prepare(root)


def disturbed(job: Job, root: Path, at: int, what: Callable[[], None], log: Path | None = None) -> int:
    """Run a job in a child that does ``what`` at its moment ``at``; return its exit status, −9 where it was killed."""

    def spoilt() -> int:
        watch(root, lambda number, _: what() if number == at else None)
        return main(job.words(root))

    return forked.in_a_fork(spoilt, log)[0]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def fail(number: int) -> Callable[[], None]:

    def raising() -> None:
        raise OSError(number, os.strerror(number))

    return raising


DISK = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO}


def content(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder; of the report and its renderings the name: they hold times."""
    made = ("fp16_report.json", "fp16_report.html", "README.md")
    return {
        path.relative_to(folder).as_posix(): "" if path.name in made else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def wrong_after(job: Job, root: Path, whole: dict[str, str], *, strays: bool) -> str:
    """Return what is wrong in a folder: an output neither whole nor absent, or strays; "" for nothing."""
    out = root / "out"
    if out.exists() and content(out) != whole and not (job.prepare and (out / "older").exists()):
        return f"half an output: {sorted(content(out))}"
    names = {path.name for path in root.iterdir()} - {*job.inputs, *job.kept, "out", "log"}
    if names and not strays:
        return f"strays: {sorted(names)}"
    return ""
