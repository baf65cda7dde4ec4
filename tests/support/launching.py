"""Starting a finetune in as many processes as a user would, on the CPU, and ending all of them."""

import json
import os
import runpy
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
# CPU only, whatever the machine has, and one thread a process.
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def command(
    python: Path, config: str, processes: int, recipe: Path, out: Path, *options: str, settings: tuple[str, ...] = ()
) -> list[str]:
    """The command line of a user with that interpreter; options are accelerate's, settings the recipe's."""
    accelerate = [python, "-m", "accelerate.commands.accelerate_cli", "launch"]
    head = [*accelerate, "--config_file", f"bf16_to_fp16/launch/accelerate/{config}.yaml"]
    number = ["--num_processes", processes, "--main_process_port", 0]
    run = ["-m", "bf16_to_fp16", "finetune", recipe, "--set", f"out={out}"]
    return [str(part) for part in (*head, *number, *options, *run, *(x for s in settings for x in ("--set", s)))]


def run(arguments: list[str], environment: Mapping[str, str] = ON_CPU, status: int = 0, folder: Path = ROOT) -> str:
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(arguments, cwd=folder, env={**os.environ, **environment}, **streams)
    try:
        said, _ = process.communicate(timeout=400)
    except BaseException:
        kill(process)
        raise
    assert process.returncode == status, said
    return said


WORK = "import sys; from support.launching import work; work(*sys.argv[1:])"


def two_ranks(python: Path, file: str, folder: Path, count: int = 2) -> list[Any]:
    """What ``on_a_rank(rank)`` of a test's file returns in each of two processes, or another count, of one group."""
    given = [str(python), "-c", WORK, file, str(folder), str(count)]
    processes = [subprocess.Popen([*given, str(rank)], stderr=subprocess.PIPE) for rank in range(count)]
    for process in processes:
        _, said = process.communicate(timeout=240)
        assert process.returncode == 0, said.decode()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def work(file: str, folder: str, count: str, number: str) -> None:
    import torch

    torch.set_num_threads(1)
    rank = int(number)
    place = f"file://{folder}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=int(count))
    Path(f"{folder}/{rank}.json").write_text(json.dumps(runpy.run_path(file)["on_a_rank"](rank)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # at an interpreter's end threads of gloo may still run, and crash


def kill(process: subprocess.Popen[Any]) -> None:
    """kill -9 for a launcher and what it launched, whose sessions are their own."""
    every = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for each in every:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
