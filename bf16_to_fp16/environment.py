"""What a figure was made with: versions and machine, for every report."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

SCHEMA = 1
"""Version of the report's keys."""


PACKAGES = ("bf16_to_fp16", "torch", "transformers", "safetensors", "numpy")


def environment() -> dict[str, Any]:
    """Return the versions, the machine and the dtype that the figures were made with."""
    return {
        "versions": {name: installed(name) for name in PACKAGES},
        "python": platform.python_version(),
        "device": device(),
        "dtype": "float16",
    }


def installed(package: str) -> str | None:
    """Return a package's version, None where it is not installed as a distribution."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device() -> str:
    """Return the name of the device that audits run on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
