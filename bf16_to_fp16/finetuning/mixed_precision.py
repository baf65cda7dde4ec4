"""fp16 and bf16 autocast with a loss scale, on a GPU and on a CPU.

On a CPU, 16-bit products are computed in fp32 from the same operands and rounded once, because native kernels are up to
fifty times slower. A step is skipped if the gradient's norm over all processes is not finite; torch's GradScaler checks
only its own process. DeepSpeed has its own autocast and loss scale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ..measuring.products import FastProducts

PRECISION_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

FIRST_LOSS_SCALE = 2.0**16  # of fp16; as torch's, it is found at the cost of a few skipped steps
CALM_STEPS = 2000  # without overflow after which the loss scale doubles
CLIP_NORM = 1.0  # largest norm of the whole gradient


@dataclass
class LossScale:
    """A factor on the loss that keeps gradients above fp16's subnormals (Micikevicius et al., arXiv:1710.03740)."""

    scale: float = FIRST_LOSS_SCALE
    calm: int = 0  # steps since the last change

    MOST = 2.0**24

    def update(self, *, overflowed: bool) -> None:
        self.calm = 0 if overflowed else self.calm + 1
        if overflowed:
            self.scale /= 2
        elif self.calm == CALM_STEPS:
            self.scale, self.calm = min(self.scale * 2, self.MOST), 0


class WidePowers(TorchFunctionMode):
    """Context manager that computes powers of fp16 tensors in fp32, as CUDA's autocast does."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # In the CPU's autocast, the derivative of ``gelu_new``'s cube is inf beyond 147.8, and its gradient NaN.
        if func in _POWER_FUNCTIONS and isinstance(args[0], Tensor) and args[0].dtype == torch.float16:
            args = (args[0].float(), *args[1:])
        return func(*args, **(kwargs or {}))


_POWER_FUNCTIONS = {torch.pow, Tensor.pow, Tensor.__pow__, torch.square, Tensor.square}


class MixedPrecision:
    def __init__(self, precision: str, device: torch.device) -> None:
        self.precision, self.device = precision, device
        self.dtype = PRECISION_DTYPES[precision]
        self.loss_scale = LossScale() if precision == "fp16" else None

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """Return the context for a step. On a CPU, it makes 16-bit products fast and computes powers of fp16 tensors in
        fp32."""
        on_cpu = self.device.type == "cpu"
        fast = FastProducts() if on_cpu and self.dtype != torch.float32 else nullcontext()
        powers = WidePowers() if on_cpu and self.dtype == torch.float16 else nullcontext()
        with fast, powers:
            yield

    def forward(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    @property
    def scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def finish(self, parameters: Iterable[nn.Parameter], units: Sequence[float] | None = None) -> float:
        """Divide the gradients by the loss scale, clip them, and update the loss scale. Return the norm of the divided
        gradients before clipping. If this norm is inf or NaN, the gradients are neither divided nor clipped. units: a
        factor for each parameter (default 1). Clipping limits the norm of gradients times factors to ``CLIP_NORM``."""
        parameters = list(parameters)
        pairs = [(p.grad, u) for p, u in zip(parameters, units or [1.0] * len(parameters), strict=True)]
        gradients = [gradient for gradient, _ in pairs if gradient is not None]
        norms = each_norm(gradients).cpu()
        norm = float(torch.linalg.vector_norm(norms)) / self.scale
        finite = norm < float("inf")  # False for NaN
        if finite:
            counted = norms * torch.tensor([unit for gradient, unit in pairs if gradient is not None])
            counted_norm = float(torch.linalg.vector_norm(counted)) / self.scale
            factor = min(1.0, CLIP_NORM / max(counted_norm, 1e-30)) / self.scale
            if factor != 1.0:
                torch._foreach_mul_(gradients, factor)
        if self.loss_scale is not None:
            self.loss_scale.update(overflowed=not finite)
        return norm

    def state_dict(self) -> dict[str, Any]:
        return {"loss_scale": None if self.loss_scale is None else asdict(self.loss_scale)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.loss_scale is not None:
            self.loss_scale = LossScale(**state["loss_scale"])


def recomputation(device: torch.device) -> dict[str, Any]:
    """Return the arguments of ``torch.utils.checkpoint`` with which recomputed values equal those of the forward."""
    given: dict[str, Any] = {"use_reentrant": False}
    return given | ({"context_fn": lambda: (WidePowers(), WidePowers())} if device.type == "cpu" else {})


def each_norm(tensors: list[Tensor]) -> Tensor:
    if not tensors:
        return torch.zeros(0)
    norms = torch._foreach_norm(tensors, 2.0, dtype=torch.float32)
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return torch.stack([norm.to(whole[0].device) for norm in whole])
