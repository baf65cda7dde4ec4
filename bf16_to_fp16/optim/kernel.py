"""The optimizer's step as one loop of machine code for this processor, compiled from ``adamw.c`` when first needed.

torch.compile makes a kernel of the same arithmetic on an accelerator. On a CPU its vectors pass through memory where a
float is looked at as an integer, which takes twice the time of this loop; and a C compiler needs half a second.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError

FORMAT_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


ROUNDING_CODES = {"nearest": 0, "stochastic": 1, "kahan": 2}


# No contraction into fused operations: the eager step rounds every one. The other two change no result; errno and
# floating-point traps would forbid vector code.
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")


NATIVE = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ())
"""What fits the processor; the first that the compiler knows."""


ELEMENTS_PER_THREAD = 1 << 16
"""Elements that are worth a thread."""


def check_compiler() -> str:
    """Return the C compiler: ``$CC``, or the first of gcc, clang and cc; raise UserError where there is none."""
    for name in (os.environ.get("CC"), "gcc", "clang", "cc"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise UserError("AdamW: compile=True needs a C compiler; install gcc, set CC to one, or leave it to compile=None")


def knows(kind: tuple[torch.dtype | None, ...]) -> bool:
    """Return whether there is a step for these dtypes: of parameter, gradient, both moments, and the compensation."""
    _, _, first, second, lost = kind
    formats = all(dtype in FORMAT_CODES for dtype in kind[:2])
    return formats and first == second and first in (torch.float32, torch.bfloat16) and lost in (None, torch.bfloat16)


@functools.cache
def compiled(parameter: torch.dtype, gradient: torch.dtype, moment: torch.dtype, how: str) -> Callable[..., None]:
    """Return ``step`` of adamw.c for these formats; raise UserError without a compiler or where it fails."""
    program = check_compiler()
    definitions = [
        f"-DPARAMETER={FORMAT_CODES[parameter]}",
        f"-DGRADIENT={FORMAT_CODES[gradient]}",
        f"-DMOMENT={FORMAT_CODES[moment]}",
        f"-DHOW={ROUNDING_CODES[how]}",
    ]
    try:
        step = _make(program, definitions)
    except (OSError, AttributeError) as error:  # no program, a full disk, a folder from which nothing may be run
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"AdamW: {program} makes no step that loads here ({reason}); set compile=False") from error
    step.argtypes, step.restype = [*[ctypes.c_void_p] * 7, ctypes.c_int64], None
    return step


def _make(program: str, definitions: list[str]) -> Any:
    """Compile adamw.c and load its ``step``; raise UserError where the compiler refuses it."""
    with tempfile.TemporaryDirectory(prefix="bf16_to_fp16-") as work:
        source, library = Path(work) / "adamw.c", Path(work) / "adamw.so"
        source.write_bytes((files("bf16_to_fp16.optim") / "adamw.c").read_bytes())
        for native in NATIVE:
            command = [program, *FLAGS, *native, *definitions, str(source), "-o", str(library), "-lm"]
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode == 0:
                return ctypes.CDLL(str(library)).step
    reason = (made.stderr.strip() or "no message").splitlines()[-1]
    raise UserError(f"AdamW: {program} cannot compile the step ({reason}); set compile=False")


@functools.cache
def works(kind: tuple[torch.dtype | None, ...], how: str) -> bool:
    """Return whether there is a step for these dtypes and it can be compiled here."""
    if not knows(kind):
        return False
    try:
        _compiled_for(kind, how)
    except UserError:
        return False
    return True


def _compiled_for(kind: tuple[torch.dtype | None, ...], how: str) -> Callable[..., None]:
    parameter, gradient, first, _, lost = kind
    assert parameter is not None and gradient is not None and first is not None
    # Of fp32, which loses nothing, there is no compensation.
    return compiled(parameter, gradient, first, "nearest" if how == "kahan" and lost is None else how)


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="adamw")


def run_step(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    keys: Callable[[int], tuple[int, int, int]],
    coefficients: Tensor,
    how: str,
) -> None:
    """Step flat, contiguous tensors of one length on a CPU, in as many threads as torch uses.

    tensors: parameter, gradient, both moments and Kahan's compensation or None. keys: gives the three words for the
    elements from an offset on. coefficients: ``adamw.Coefficients`` in fp32.
    """
    step = _compiled_for(tuple(None if t is None else t.dtype for t in tensors), how)
    length = len(tensors[0])

    def part(start: int, stop: int) -> None:
        at = [None if t is None else t.data_ptr() + start * t.element_size() for t in tensors]
        words = (ctypes.c_int32 * 3)(*keys(start))
        step(*at, coefficients.data_ptr(), words, stop - start)  # without the GIL

    # Autograd sees that they change, as it would with torch's own operations.
    torch.autograd.graph.increment_version([t for i, t in enumerate(tensors) if t is not None and i != 1])
    threads = min(torch.get_num_threads(), max(1, length // ELEMENTS_PER_THREAD))
    if threads == 1:
        return part(0, length)
    borders = [length * i // threads for i in range(threads + 1)]
    for done in [_pool(threads).submit(part, a, b) for a, b in itertools.pairwise(borders)]:
        done.result()
