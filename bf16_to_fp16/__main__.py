"""The program: ``python -m bf16_to_fp16`` and the command ``bf16-to-fp16``. Ctrl-C gives status 130 without a
traceback, so slow imports stand inside ``main``. An uncaught exception is a bug: status 70, since 1 would say "unsafe",
and the traceback in a file."""

import codecs
import gc
import io
import os
import sys
from typing import Any, TextIO, cast


def main() -> int:
    # At the end of each operation a thread waits for the others. It would keep its core busy with that, and where
    # another program runs on the core of one that is late, all of them would wait a long time. So it sleeps after some
    # microseconds (GNU's OpenMP counts them in turns of a loop), in which most operations end.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    gc.set_threshold(50_000)  # every import of a large library, and every model, would be looked through many times
    closed = open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # A pipe on Windows takes the letters of one language.
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = cast(TextIO, _Data(sys.stdout)), cast(TextIO, _Talk(sys.stderr))
    if closed:
        print("error: standard output is closed; give it a place, if only /dev/null", file=sys.stderr)
        return 2
    try:
        from .cli import main as command_line

        return command_line()
    except KeyboardInterrupt:  # during the imports of the command line, which handles it itself from then on
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return report_bug(error)
    finally:
        import signal

        try:
            sys.stdout.flush()
        except Exception:  # which was said already; the interpreter would fail on what is left
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

        # The work is done; an interrupt while the interpreter shuts down needs no traceback, and a second SIGTERM is
        # ignored since the first.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if callable(signal.getsignal(signal.SIGTERM)):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Data:
    """Standard output, without which the work is lost: a full disk is the user's to mend."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError as error:
            self.refused(error)
            return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self.refused(error)

    def refused(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            raise error
        from .errors import UserError

        raise UserError(f"standard output cannot be written ({error.strerror}); choose another place for it") from error


class _Talk(_Data):
    """Standard error, without which the work goes on."""

    def refused(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            raise error


def open_closed_streams() -> bool:
    """Open closed standard streams on nothing, and return whether standard output was: the next opened files would
    otherwise take their places."""
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


def report_bug(error: Exception) -> int:
    """Write an exception's traceback to a temporary file, ask for a report, and return the status."""
    import tempfile
    import traceback

    descriptor, path = tempfile.mkstemp(prefix="bf16-to-fp16-bug-", suffix=".txt")
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{sys.argv}\n" + "".join(traceback.format_exception(error)))
    said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    print(f"bug: {said}; please report it with the traceback in {path}", file=sys.stderr)
    return 70


if __name__ == "__main__":
    sys.exit(main())
