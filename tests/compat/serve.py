"""Runs scripts of this folder, each in a fork of a process that has imported torch and transformers once.

Usage: ``python -I serve.py``; a line of JSON on standard input, [script, arguments], is answered by one on standard
output, [exit status, standard output, standard error].
"""

import json
import os
import runpy
import signal
import sys
import tempfile
from pathlib import Path

import torch
import transformers

sys.path.append(str(Path(__file__).parents[1]))  # which -I leaves out, as it does everything of the caller's

from support.forked import in_a_fork

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 300
USED = ("T5", "MT5", "UMT5", "Pegasus", "MBart")


def run(script: str, arguments: list[str]) -> tuple[int, str, str]:
    def started() -> None:
        signal.alarm(TIMEOUT_SECONDS)
        sys.argv = [script, *arguments]
        runpy.run_path(str(HERE / script), run_name="__main__")

    with tempfile.TemporaryDirectory() as folder:
        printed = [Path(folder, "out"), Path(folder, "errors")]
        status, _ = in_a_fork(started, *printed)
        out, errors = (path.read_text(errors="replace") for path in printed)
        return status, out, errors


def main() -> None:
    """Answer until standard input ends."""
    torch.set_num_threads(1)
    for name in USED:
        getattr(transformers, f"{name}ForConditionalGeneration")
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        script, arguments = json.loads(line)
        answers.write(json.dumps(run(script, arguments)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
