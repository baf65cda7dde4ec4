"""The report's ``environment``: versions and devices of the run."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

SCHEMA = 1  # version of the report's keys

PACKAGES = ("bf16_to_fp16", "torch", "transformers", "safetensors", "numpy", "matplotlib")


def environment(device: str, used: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return versions, devices and dtype. device: as requested. used: the devices of each part of the work."""
    return {
        "versions": {name: installed(name) for name in PACKAGES},
        "python": platform.python_version(),
        "device": device,
        "devices": {part: list(names) for part, names in used.items()},
        "dtype": "float16",
    }


@cache
def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def how_to_install(extra: str) -> str:
    return f"in a clone of the repository pip install '.[{extra}]'"
