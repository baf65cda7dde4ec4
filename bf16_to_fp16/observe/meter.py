"""What every linear, embedding, norm and attention takes in and gives out in fp32, channel by channel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..families.known import of_model_type, roles_of
from ..ranges import ChannelRange, ModuleRange, NormRange, Ranges, ScoreRange
from ..run.probe import Batch, run_batch
from .observer import SiteObserver

_STEPS_IN_A_BINADE = 8


def observe_ranges(model: nn.Module, batches: Iterable[Batch]) -> Ranges:
    """Return what every linear, embedding, norm and attention module of an fp32 ``model`` took in and gave out.

    Every position counts, padding too: the network computes them, and fp16 must hold them. Scores are seen only under
    ``attn_implementation="eager"``. The planner's ranges come from here.
    """
    meters: dict[str, _Meter] = {}
    handles = []
    observer = SiteObserver(model)
    family = of_model_type(getattr(getattr(model, "config", None), "model_type", None))
    attentions = roles_of(family).attentions
    for path, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) or is_norm(module) or path.rpartition(".")[2] in attentions:
            meters[path] = meter = _Meter(module, observer)
            handles.append(module.register_forward_hook(meter, with_kwargs=True))
    try:
        with torch.no_grad(), observer:
            for batch in batches:
                run_batch(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    scores = _scores(observer)
    return {path: meter.result(scores.get(path)) for path, meter in meters.items() if meter.output.rows}


def is_norm(module: nn.Module) -> bool:
    """Whether ``module`` normalises its input: ``nn.LayerNorm`` or a class named ...LayerNorm or ...RMSNorm."""
    return isinstance(module, nn.LayerNorm) or type(module).__name__.endswith(("LayerNorm", "RMSNorm"))


def _scores(observer: SiteObserver) -> dict[str, ScoreRange]:
    found = {}
    for path, amax in observer.largest().items():
        if "scores" in amax:
            after = [amax[name] for name in ("scores", "mul", "add") if name in amax]
            found[path] = ScoreRange(amax["scores"], max(after[1:] or after))
    return found


class _Channels:
    """Running per-channel maximum and sum of squares."""

    def __init__(self) -> None:
        self.rows = 0
        self.amax = torch.zeros(0)
        self.squares = torch.zeros(0, dtype=torch.float64)

    def add(self, x: Tensor) -> None:
        flat = x.reshape(-1, x.shape[-1])
        amax = torch.maximum(flat.amax(0), -flat.amin(0)).float()
        squares = (flat.float() * flat.float()).sum(0, dtype=torch.float64)
        if self.rows:
            amax, squares = torch.maximum(amax, self.amax), squares + self.squares
        self.amax, self.squares, self.rows = amax, squares, self.rows + len(flat)

    def result(self) -> ChannelRange:
        mean = (self.squares / max(self.rows, 1)).float()
        return ChannelRange(self.amax.cpu(), mean.cpu(), self.rows)


class _Meter:
    """The forward hook of one module."""

    def __init__(self, module: nn.Module, observer: SiteObserver) -> None:
        self.observer = observer
        self.input = _Channels()
        self.output = _Channels()
        self.norm = is_norm(module)
        self.centred = isinstance(module, nn.LayerNorm)
        self.norm_max = 0.0
        self.binades: dict[int, int] = {}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        x = args[0] if args else kwargs.get("hidden_states")
        y = output[0] if isinstance(output, tuple) else output
        with self.observer.paused():
            if isinstance(x, Tensor) and x.is_floating_point():
                self.input.add(x.detach())
                if self.norm:
                    self._add_norm(x.detach())
            self.output.add(y.detach())

    def _add_norm(self, x: Tensor) -> None:
        x = x.reshape(-1, x.shape[-1]).double()
        variance = x.var(-1, correction=0) if self.centred else x.square().mean(-1)
        self.norm_max = max(self.norm_max, float(x.norm(dim=-1).max()))
        steps = (variance.clamp(min=1e-30).log2() * _STEPS_IN_A_BINADE).round().int()
        for step, count in zip(*steps.unique(return_counts=True), strict=True):
            self.binades[int(step)] = self.binades.get(int(step), 0) + int(count)

    def result(self, scores: ScoreRange | None) -> ModuleRange:
        norm = None
        if self.norm:
            shares = [(2.0 ** (k / _STEPS_IN_A_BINADE), n / self.input.rows) for k, n in sorted(self.binades.items())]
            norm = NormRange(self.norm_max, torch.tensor(shares, dtype=torch.float64))
        return ModuleRange(self.input.result(), self.output.result(), norm, scores)
