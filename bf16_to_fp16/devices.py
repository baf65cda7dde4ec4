"""Find devices by name, and NVIDIA cards by their driver. Work that exhausts a device's memory moves to the CPU."""

from __future__ import annotations

import gc
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from .environment import PACKAGES, installed
from .errors import UserError
from .progress import Progress
from .wording import counted

if TYPE_CHECKING:  # torch is slow to import, so functions import it
    import torch
    from torch import Tensor

T = TypeVar("T")

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
    """Return the NVIDIA cards of this machine that ``CUDA_VISIBLE_DEVICES`` leaves visible; [] without a driver."""
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
    """Return whether a device has bf16 arithmetic. CPUs and MPS devices count as having it."""
    import torch

    # torch's ``is_bf16_supported`` counts emulation too.
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FIRST_WITH_BF16


def how_to_mend(capability: tuple[int, int]) -> str:
    package = f"torch=={LAST_FOR_VOLTA}" if capability < OLDEST_IN_NEW_BUILDS else "torch"
    return f"pip install --force-reinstall {package} (other builds: https://pytorch.org/get-started/locally/)"


def find_device(name: str | torch.device) -> torch.device:
    """Return a device by name: auto (CUDA, else CPU), cpu, cuda, cuda:N, mps. Raises UserError if it is unusable."""
    import torch

    if isinstance(name, torch.device) and name.type not in ("cuda", "mps"):
        return name
    name = str(name)
    if re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?|mps", name, flags=re.ASCII) is None:
        raise UserError(f"device {name!r} is unknown; choose auto, cpu, cuda, cuda:N or mps")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count and has_kernels(torch.device("cuda")) else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= count:
        others = {0: "auto or cpu", 1: "auto, cpu or cuda:0"}.get(count, f"auto, cpu or cuda:0 to cuda:{count - 1}")
        has = f"this machine has {counted(count, 'CUDA device') if count else 'no CUDA device'} that torch can use"
        raise UserError(f"device {name}: {has}; choose {others}")
    if device.type == "cuda" and not has_kernels(device):
        raise UserError(f"device {name}: {without_kernels(device)}, or choose cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("device mps: this machine has no MPS device that torch can use; choose auto or cpu")
    return device


def has_kernels(device: torch.device) -> bool:
    import torch

    try:
        return bool((torch.zeros(1, device=device) + 1).item())
    except torch.OutOfMemoryError:
        return True  # ``Device.run`` handles it later
    except RuntimeError as error:
        if "no kernel image" in str(error):
            return False
        raise


def without_kernels(device: torch.device) -> str:
    import torch

    mend = how_to_mend(torch.cuda.get_device_capability(device))
    return f"torch {torch.__version__} has no kernels for this card; {mend}"


def check_auto_uses_the_card(name: str) -> None:
    """Raise UserError if ``auto`` would choose the CPU because torch cannot use the machine's card."""
    import torch

    if name != "auto":
        return
    if torch.cuda.is_available():
        if not has_kernels(torch.device("cuda")):
            raise UserError(f"{without_kernels(torch.device('cuda'))}, or set device: cpu")
    elif seen := cards():
        build, card = torch.version.cuda, seen[0]
        reason = "is a build without CUDA" if build is None else f"for CUDA {build} cannot use it (an old driver?)"
        mend = how_to_mend(card.capability)
        raise UserError(f"there is a {card.name} and torch {torch.__version__} {reason}; {mend}, or set device: cpu")


def shown(device: torch.device) -> str:
    """Return a device's name for users: "cpu", or "cuda:0 (NVIDIA H200, compute capability 9.0)"."""
    import torch

    if device.type != "cuda":
        return str(device)
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return f"{device} ({torch.cuda.get_device_name(device)}, compute capability {capability})"


class Device:
    """A device, and the CPU for work that it cannot run. ``used``: the devices on which each part of the work ran."""

    def __init__(self, name: str | torch.device = "auto", progress: Progress | None = None) -> None:
        self.progress = progress or Progress(quiet=True)
        self.asked = find_device(name)
        self.name = shown(self.asked)
        self.used: dict[str, list[str]] = {}

    def run(self, part: str, work: Callable[[torch.device], T], *, wide: bool = False) -> T:
        """Return ``work(device)``, or ``work(cpu)`` with a message if the device's memory is full. part: the work's
        name; once moved, it stays on the CPU. wide: whether the work needs fp64, which MPS lacks."""
        import torch

        on_cpu, place = torch.device("cpu"), self.asked
        if not self.used:
            self.progress.say(f"Device: {self.name}")
        if self.used.get(part, [""])[-1] == shown(on_cpu):
            place = on_cpu
        elif wide and self.asked.type == "mps":
            self.progress.say(f"mps has no fp64, so the {part} is computed on the CPU")
            place = on_cpu
        self.note(part, place)
        try:
            return work(place)
        except RuntimeError as error:  # MPS raises no OutOfMemoryError
            full = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
            if place == on_cpu or not full:
                raise
        # Outside the handler, whose traceback keeps the tensors alive.
        gc.collect()
        if self.asked.type == "cuda":
            torch.cuda.empty_cache()
        self.progress.say(f"{self.asked} is out of memory: the {part} continues on the CPU")
        self.note(part, on_cpu)
        return work(on_cpu)

    def note(self, part: str, place: torch.device) -> None:
        ran = self.used.setdefault(part, [])
        if shown(place) not in ran[-1:]:
            ran.append(shown(place))

    def environment(self) -> dict[str, Any]:
        """Return the report's ``environment``: versions, devices and dtype."""
        return {
            "versions": {name: installed(name) for name in PACKAGES},
            "python": platform.python_version(),
            "device": self.name,
            "devices": {part: list(names) for part, names in self.used.items()},
            "dtype": "float16",
        }


_products: ContextVar[Device | None] = ContextVar("products", default=None)


@contextmanager
def products_on(device: Device) -> Iterator[None]:
    token = _products.set(device)
    try:
        yield
    finally:
        _products.reset(token)


def on_device(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a function of CPU tensors run on the device set by ``products_on``, or on the CPU if its memory runs out."""

    @wraps(product)
    def placed(*tensors: Tensor) -> Tensor:
        device = _products.get()
        if device is None:
            return product(*tensors)
        return device.run("certificate", lambda place: product(*(x.to(place) for x in tensors)).cpu(), wide=True)

    return placed
