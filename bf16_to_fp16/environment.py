"""The version of the report's schema, and versions of installed packages."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

SCHEMA = 1  # version of the report's keys

PACKAGES = ("bf16_to_fp16", "torch", "transformers", "safetensors", "numpy", "matplotlib")

HOW_TO_TRAIN = "in a clone of the repository pip install '.[train]'"


@cache
def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
