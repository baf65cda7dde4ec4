"""Tests that load a converted folder as its users do.

diffusers and sentence-transformers are among the packages of `make test`; mlx-lm and the quantisers are in the
environment of `make clients` alone, so pytest ignores the file that needs it elsewhere.
"""

from importlib.util import find_spec

collect_ignore = [] if find_spec("mlx_lm") else ["test_mlx.py"]
