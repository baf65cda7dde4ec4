"""Running a function in a child of this process, which has its imports already: killed, limited and measured."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path


def child(action: Callable[[], int | None], log: Path | None = None, errors: Path | None = None) -> int:
    """Run ``action`` in a child, return its id at once; it ends with what that returns, 70 after an exception."""
    sys.stdout.flush()
    sys.stderr.flush()
    number = os.fork()
    if number:
        return number
    status = 70
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(log or os.devnull, flags, 0o600), 1)
        os.dup2(os.open(errors, flags, 0o600) if errors else 1, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        status = action() or 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def in_a_fork(action: Callable[[], int | None], log: Path | None = None, errors: Path | None = None) -> tuple[int, int]:
    """Run ``action`` in a child to its end; return its exit status (negative: the signal) and peak memory in bytes."""
    _, status, usage = os.wait4(child(action, log, errors), 0)
    return os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024
