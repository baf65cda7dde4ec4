"""Programs that begin at once: forks of a process that has imported torch, transformers and this package.

``interpreter`` is a file that is called as Python is and lends its arguments, environment, working folder and standard
streams to such a fork. ``python -m support.warm FOLDER OWNER`` serves it until the process OWNER ends. The workers of
pytest-xdist are such forks as well.
"""

import atexit
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import huggingface_hub
import numpy
import torch

INTERPRETER = """#!{python} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
lent = json.dumps([sys.argv, dict(os.environ), os.getcwd()]).encode()
socket.send_fds(server, [len(lent).to_bytes(8, "little")], [0, 1, 2])
server.sendall(lent)
number = int.from_bytes(server.recv(8), "little")
for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, lambda received, frame: os.kill(number, received))
ended = os.waitstatus_to_exitcode(int.from_bytes(server.recv(8), "little"))
if ended < 0:
    if -ended != signal.SIGKILL:
        signal.signal(-ended, signal.SIG_DFL)
    os.kill(os.getpid(), -ended)
sys.exit(ended)
"""

WORKER = "WORKER_OF_TESTS"
"""The variable by which a worker of pytest is told from a program that it runs."""

COMPARED = ("T5", "MT5", "UMT5", "Pegasus", "MBart")
IMPORTED = (
    *("accelerate.commands.accelerate_cli", "torch.distributed.run", "transformers.trainer_seq2seq"),
    "deepspeed.runtime.zero.muon.original_muon",  # which its engine imports late, and a compiler with it
)
"""What programs here import besides this package and its families' modules."""


def interpreter(shared: Path, owner: int, python: str | Path = sys.executable) -> Path:
    """Return the interpreter that all workers of a run share in ``shared``, starting it for the first."""
    shared.mkdir(exist_ok=True)
    with open(shared / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = shared / "python"
        if not path.exists():
            with open(shared / "log", "w") as log:
                command = [str(python), "-m", "support.warm", str(shared), str(owner)]
                root, tests = Path(__file__).parents[2], Path(__file__).parents[1]
                paths = f"{root}{os.pathsep}{tests}" if python == sys.executable else str(tests)
                environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
                server = subprocess.Popen(
                    command, cwd=shared, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            while not path.exists():
                assert server.poll() is None, (shared / "log").read_text()
                time.sleep(0.05)
        return path


def import_all() -> None:
    """Import what programs here use, all that this package is made of included."""
    import transformers

    if find_spec("bf16_to_fp16") is None:
        torch.set_num_threads(1)
        for name in COMPARED:
            getattr(transformers, f"{name}ForConditionalGeneration")
        return
    import bf16_to_fp16
    from bf16_to_fp16.families.known import FAMILIES

    for module in pkgutil.walk_packages(bf16_to_fp16.__path__, "bf16_to_fp16."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for family in FAMILIES:
        getattr(transformers, family.classes[0].names[0])  # imports its module
    for name in IMPORTED:
        importlib.import_module(name)


def start(connection: socket.socket) -> int | None:
    """Fork for what a caller has lent and return the child's id; None for a caller that was killed before."""
    head, streams, _, _ = socket.recv_fds(connection, 8, 3)
    left, parts = int.from_bytes(head, "little"), b""
    while left and (part := connection.recv(left)):
        parts, left = parts + part, left - len(part)
    if left or not parts:
        for stream in streams:
            os.close(stream)
        return None
    arguments, environment, folder = json.loads(parts)
    number = os.fork()
    if number:
        with suppress(OSError):  # of a caller that has gone meanwhile ``serve`` kills the fork
            connection.sendall(number.to_bytes(8, "little"))
    else:
        for stream, place in zip(streams, (0, 1, 2), strict=True):
            os.dup2(stream, place)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
    for stream in streams:
        os.close(stream)
    if not number:
        end(partial(run, *arguments))
    return number


def end(action: Callable[[], None]) -> NoReturn:
    """Run ``action`` and end this process without taking apart its imports, which would copy shared memory."""
    status = 0
    try:
        action()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exc()
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run(program: str, *arguments: str) -> None:
    """Do what Python does with a command line."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # What a process of its own begins with by chance.
    random.seed()
    numpy.random.seed()
    torch.manual_seed(random.getrandbits(32))
    importlib.reload(huggingface_hub.constants)  # the Hub and the caches that its own environment names
    if os.environ.pop(WORKER, None) is None:
        if "WHOLE_RUNS" not in os.environ and find_spec("bf16_to_fp16"):
            from support import brief

            brief.all_runs()
        sys.executable = os.environ["PYTHON_EXEC"] = program  # torch's launcher starts its processes by the latter
    kind, *words = (word for word in arguments if word not in ("-u", "-I"))
    if kind == "-m":
        sys.argv, sys.path[0] = words, os.getcwd()
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv, sys.path[0] = ["-c", *words[1:]], os.getcwd()
        exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = [kind, *words], str(Path(kind).parent)
        runpy.run_path(kind, run_name="__main__")


def serve(listener: socket.socket, owner: int) -> None:
    """Start a fork for every caller, tell each how its own ended, and kill that of a caller that has gone."""
    running: dict[socket.socket, int] = {}
    while Path(f"/proc/{owner}").exists():
        ready, _, _ = select.select([listener, *running], [], [], 0.02 if running else 0.5)
        for each in ready:
            if each is listener:
                connection, _ = listener.accept()
                if (number := start(connection)) is None:
                    connection.close()
                else:
                    running[connection] = number
            else:
                kill(running[each])
        for connection, number in list(running.items()):
            ended, status = os.waitpid(number, os.WNOHANG)
            if ended:
                with suppress(OSError):  # where it has gone
                    connection.sendall(status.to_bytes(8, "little"))
                connection.close()
                del running[connection]
    for child in running.values():
        kill(child)


def kill(number: int) -> None:
    import psutil  # which the second environment has not

    process = psutil.Process(number)  # ours still, even where it has ended
    for each in (*process.children(recursive=True), process):
        with suppress(psutil.NoSuchProcess):
            each.kill()


def main(folder: Path, owner: int) -> None:
    """Import, then serve the interpreter in ``folder``, which appears there once it can be called."""
    import_all()
    gc.freeze()  # the memory that all share is not written to when one collects its garbage
    address = str(folder / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        being_made = folder / "python.new"
        being_made.write_text(INTERPRETER.format(python=sys.executable, address=address))
        being_made.chmod(0o755)
        being_made.rename(folder / "python")
        serve(listener, owner)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
