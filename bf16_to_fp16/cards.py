"""NVIDIA cards, from the driver: a torch without CUDA sees no card, and its ``is_bf16_supported`` counts emulation."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from typing import Any

from .errors import UserError

FIRST_WITH_BF16 = (8, 0)  # compute capability, of Ampere; Volta (V100) and Turing (T4) have none
OLDEST_IN_NEW_BUILDS = (7, 5)  # compute capability; torch for CUDA 12.8 and newer has no kernels for Volta
LAST_FOR_VOLTA = "2.7.1"  # the last torch whose plain wheel is for CUDA 12.6, with kernels for Volta and older cards


@dataclass(frozen=True)
class Card:
    name: str
    capability: tuple[int, int]
    memory: int  # bytes

    @property
    def has_bf16(self) -> bool:
        return self.capability >= FIRST_WITH_BF16


def cards() -> list[Card]:
    """Return the driver's cards that ``CUDA_VISIBLE_DEVICES`` leaves visible; none without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    asked = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    every: list[Card] = []
    for line in lines:
        name, capability, mebibytes = (part.strip() for part in line.rsplit(",", 2))
        major, _, minor = capability.partition(".")
        every.append(Card(name, (int(major), int(minor or 0)), int(mebibytes) << 20))
    if visible is None:
        return every
    numbers = [part.strip() for part in visible.split(",")]
    if all(number.isdigit() for number in numbers):
        return [every[int(number)] for number in numbers if int(number) < len(every)]
    return [] if numbers[0] in ("", "-1") else every  # UUIDs, which are not looked up here


def computes_in_bf16(device: Any) -> bool:
    """Return whether a device has bf16 arithmetic; a CPU and an MPS device have."""
    import torch

    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FIRST_WITH_BF16


def how_to_mend(capability: tuple[int, int]) -> str:
    which = f"torch=={LAST_FOR_VOLTA}" if capability < OLDEST_IN_NEW_BUILDS else "torch"
    return f"pip install --force-reinstall {which} (other builds: https://pytorch.org/get-started/locally/)"


def check_torch_uses_cards() -> None:
    """Raise UserError where the driver shows a card that the installed torch cannot compute on."""
    import torch

    if torch.cuda.is_available() or not (seen := cards()):
        return
    build, card = torch.version.cuda, seen[0]
    if build is None:
        reason = f"torch {torch.__version__} is a build without CUDA"
    else:
        reason = f"torch {torch.__version__}, built for CUDA {build}, cannot use it (is the driver too old?)"
    raise UserError(f"there is a {card.name} and {reason}; {how_to_mend(card.capability)}, or set device: cpu")
