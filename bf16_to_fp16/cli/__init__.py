"""The command line. Each group of commands has a file, and ``program`` puts them together. Data go to standard output,
progress to standard error. The exit statuses are in docs/index.md."""

from .program import app, main

__all__ = ["app", "main"]
