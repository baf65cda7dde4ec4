"""Tests that load a converted folder as its users do, in `.venv-clients` (`make clients`).

Where diffusers is not installed, pytest ignores the folder: `.venv` has none of these packages.
"""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("diffusers") else ["test_*.py"]
