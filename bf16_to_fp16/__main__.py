"""The program: ``python -m bf16_to_fp16`` and the command ``bf16-to-fp16``.

Ctrl-C ends it with status 130 and without a traceback from its first import to its last breath, so what takes long to
import is imported inside.
"""

import sys


def main() -> int:
    """Run the command line on the program's arguments and return its exit status."""
    try:
        from .cli import main as command_line

        return command_line()
    except KeyboardInterrupt:  # during the imports of the command line, which minds it from there on
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        import signal

        # All is done; what the interpreter still clears away needs no traceback.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
