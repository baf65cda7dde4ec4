"""Entry point of ``python -m bf16_to_fp16`` and ``bf16-to-fp16``. Slow imports are inside ``main``, so that Ctrl-C
gives status 130 and no traceback. An uncaught exception is a bug: status 70, traceback in a file."""

import codecs
import gc
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast


def main() -> int:
    # OpenMP threads spin while they wait for the last one, long where another program has its core. Let them sleep
    # after some microseconds, in which most operations end. GNU's OpenMP counts these in turns of a loop.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    gc.set_threshold(50_000)  # else each import of a large library, and each model, is scanned many times
    closed = open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # On Windows a pipe's encoding holds the letters of one language only.
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="backslashreplace")
    sys.stderr = cast(TextIO, _Talk(sys.stderr))
    if closed:
        print("error: standard output is closed; give it a place, if only /dev/null", file=sys.stderr)
        return 2
    try:
        from .cli import main as command_line

        return command_line()
    except KeyboardInterrupt:  # during the imports; later the command line handles it
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        import tempfile
        import traceback

        descriptor, path = tempfile.mkstemp(prefix="bf16-to-fp16-bug-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{sys.argv}\n" + "".join(traceback.format_exception(error)))
        summary = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        print(f"bug: {summary}; please report it with the traceback in {path}", file=sys.stderr)
        return 70
    finally:
        import signal

        try:
            sys.stdout.flush()
        except Exception:  # already reported; the interpreter would fail on the rest of the buffer
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

        # The work is done; an interrupt while the interpreter shuts down needs no traceback, and a second SIGTERM is
        # ignored since the first.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if callable(signal.getsignal(signal.SIGTERM)):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Talk:
    """Standard error, as a stream that ignores failed writes, as on a full disk: work goes on without messages."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with heard():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with heard():
            self.stream.flush()


@contextmanager
def heard() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError:
        pass


def open_closed_streams() -> bool:
    """Open closed standard streams on os.devnull, so no file takes their place; return whether stdout was closed."""
    closed = sys.stdout is None
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)
    return closed


if __name__ == "__main__":
    sys.exit(main())
