"""Entry point of ``python -m bf16_to_fp16`` and of the command ``bf16-to-fp16``. An uncaught exception is a bug: its
traceback is written to a file, and the exit status is 70."""

import atexit
import gc
import io
import os
import signal
import sys
from contextlib import suppress


def main() -> int:
    # OpenMP threads spin while they wait for the last one, long where another program has its core. Let them sleep
    # after some microseconds, in which most operations end. GNU's OpenMP counts these in turns of a loop.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    gc.set_threshold(50_000)  # else each import of a large library, and each model, is scanned many times
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # On Windows a pipe's encoding holds the letters of one language only.
        if isinstance(stream, io.TextIOWrapper) and stream.encoding != "utf-8":
            stream.reconfigure(errors="backslashreplace")
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
        with suppress(OSError):
            print(f"bug: {summary}; please report it with the traceback in {path}", file=sys.stderr)
        return 70
    finally:
        # SIGTERM would interrupt the finalizers, which remove temporary files.
        atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # already reported; the interpreter would fail on the rest of the buffer
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def open_closed_streams() -> None:
    """Open each closed standard stream on os.devnull. Otherwise a file opened later would take the stream's number and
    receive what the program prints."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)


if __name__ == "__main__":
    sys.exit(main())
