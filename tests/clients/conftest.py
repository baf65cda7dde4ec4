"""Tests that load a converted folder as its users do; mlx-lm is in the environment of ``make clients`` alone."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("mlx_lm") else ["test_mlx.py"]
