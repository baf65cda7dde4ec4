"""``python -m bf16_to_fp16``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
