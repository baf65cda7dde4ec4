"""The command line. Each group of commands has a file, and ``program`` puts them together.

Data go to standard output, progress to standard error. Exit status: 0 done (and safe, if there is a verdict), 1 done
and unsafe, 2 bad input or usage, 130 interrupted, 141 output pipe closed by its reader."""

from .program import app, main

__all__ = ["app", "main"]
