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
import traceback
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 300
USED = ("T5", "MT5", "UMT5", "Pegasus")


def run(script: str, arguments: list[str]) -> tuple[int, str, str]:
    """Run a script in a fork, as if it had been started, and return its exit status and what it printed."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        number = os.fork()
        if number == 0:
            status = 1
            try:
                signal.alarm(TIMEOUT_SECONDS)
                os.dup2(out.fileno(), 1)
                os.dup2(error.fileno(), 2)
                sys.argv = [script, *arguments]
                runpy.run_path(str(HERE / script), run_name="__main__")
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
                if isinstance(end.code, str):
                    print(end.code, file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        ended = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
        texts = []
        for stream in (out, error):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
        return ended, texts[0], texts[1]


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
