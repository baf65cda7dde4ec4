"""The program: ``python -m bf16_to_fp16`` and the command ``bf16-to-fp16``.

From the first import until the process ends, Ctrl-C gives status 130 and no traceback, so whatever takes long to
import is imported inside ``main``. An exception that nothing has caught is a bug of this package: status 70, since 1
would say "unsafe", and one line that names the file with the traceback.
"""

import codecs
import io
import os
import sys


def main() -> int:
    """Run the command line on the program's arguments and return its exit status."""
    # At the end of each operation a thread waits for the others. It would keep its core busy with that, and where
    # another program runs on the core of one that is late, all of them would wait a long time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        # A pipe on Windows takes the letters of one language.
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="backslashreplace")
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

        # The work is done; an interrupt while the interpreter shuts down needs no traceback.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def report_bug(error: Exception) -> int:
    """Write an exception's traceback to a temporary file, ask for a report in one line, and return the status."""
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
