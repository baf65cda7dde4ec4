"""Measure the value ranges of an fp32 model's modules, and of norms' inputs in any dtype."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..families.known import of_model_type
from ..families.places import attention_names
from ..ranges import ChannelRange, ModuleRange, NormRange, Ranges, ScoreRange
from .batch import Batch, run_batch
from .observer import SiteObserver
from .sites import is_linear

_STEPS_IN_A_BINADE = 8


class RangeObserver:
    """Measures the value ranges of an fp32 model's linears, embeddings, norms and attentions. Several runs add up, but
    must not overlap. Padding counts too. Attention scores are measured only with ``attn_implementation="eager"``."""

    def __init__(self) -> None:
        self.meters: dict[str, _Meter] = {}
        self.scores: dict[str, ScoreRange] = {}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        family = of_model_type(getattr(getattr(model, "config", None), "model_type", None))
        ends = () if family is None else attention_names(family)
        attentions = {path for path, _ in model.named_modules() if path.rpartition(".")[2] in ends}
        observer = SiteObserver(model, only=attentions)
        with ExitStack() as hooks:
            for path, module in model.named_modules():
                metered = isinstance(module, nn.Embedding) or is_linear(module) or is_norm(module)
                if metered or path in attentions:
                    meter = self.meters.setdefault(path, _Meter(module))
                    hooks.enter_context(module.register_forward_hook(meter, with_kwargs=True))
            hooks.enter_context(observer)
            yield
        for path, seen in observer.score_ranges().items():
            before = self.scores.get(path, seen)
            self.scores[path] = ScoreRange(max(before.product, seen.product), max(before.biased, seen.biased))

    def ranges(self) -> Ranges:
        return {path: meter.result(self.scores.get(path)) for path, meter in self.meters.items() if meter.output.rows}


NormMeters = dict[str, "NormMeter"]
"""Meters of the norms' inputs, by path."""


@contextmanager
def metering_norms(model: nn.Module, meters: NormMeters) -> Iterator[None]:
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if is_norm(module):
                meter = meters.setdefault(path, NormMeter(module))
                hooks.enter_context(module.register_forward_pre_hook(meter, with_kwargs=True))
        yield


def norms_seen(meters: NormMeters) -> dict[str, NormRange]:
    return {path: meter.result() for path, meter in meters.items() if meter.rows}


def observe_ranges(model: nn.Module, batches: Sequence[Batch]) -> Ranges:
    observer = RangeObserver()
    with torch.no_grad(), observer.watching(model):
        for batch in batches:
            run_batch(model, batch)
    return observer.ranges()


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm) or type(module).__name__.endswith(("LayerNorm", "RMSNorm"))


class _Channels:
    def __init__(self) -> None:
        self.rows = 0
        self.amax = self.squares = torch.zeros(0)

    def add(self, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1]).float()
        # A row shorter than LongT5's block has an empty tensor here.
        amax = torch.maximum(rows.amax(0), -rows.amin(0)) if len(rows) else rows.new_zeros(rows.shape[1])
        squares = rows.square().sum(0)
        if self.rows:
            amax, squares = torch.maximum(amax, self.amax), squares.double() + self.squares.double()
        self.amax, self.squares, self.rows = amax, squares, self.rows + len(rows)

    def result(self) -> ChannelRange:
        mean = (self.squares.double() / max(self.rows, 1)).float()
        return ChannelRange(self.amax.cpu(), mean.cpu(), self.rows)


class NormMeter:
    def __init__(self, module: nn.Module) -> None:
        self.centred = isinstance(module, nn.LayerNorm)
        self.rows = 0
        self.norm_max = 0.0
        self.binades: Counter[int] = Counter()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # These are no operations of the model: the active observer need not see them.
        with torch._C._DisableTorchDispatch():
            self.add(_first(args, kwargs))

    def add(self, x: Tensor) -> None:
        x = x.detach().reshape(-1, x.shape[-1]).float()
        if not len(x):
            return
        length = torch.linalg.vector_norm(x, dim=-1)
        variance = x.var(-1, correction=0).double() if self.centred else length.double().square() / x.shape[-1]
        self.rows += len(x)
        self.norm_max = max(self.norm_max, float(length.max()))
        steps = (variance.nan_to_num(nan=math.inf).clamp(1e-30, 1e300).log2() * _STEPS_IN_A_BINADE).round().int()
        for step, count in zip(*(x.tolist() for x in steps.unique(return_counts=True)), strict=True):
            self.binades[step] += count

    def result(self) -> NormRange:
        shares = [(2.0 ** (k / _STEPS_IN_A_BINADE), n / self.rows) for k, n in sorted(self.binades.items())]
        return NormRange(self.norm_max, torch.tensor(shares, dtype=torch.float64))


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs.get("hidden_states")


class _Meter:
    def __init__(self, module: nn.Module) -> None:
        self.input = _Channels()
        self.output = _Channels()
        self.norm = NormMeter(module) if is_norm(module) else None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        x = _first(args, kwargs)
        y = output[0] if isinstance(output, tuple) else output
        # These are no operations of the model: the active observer need not see them.
        with torch._C._DisableTorchDispatch():
            # An embedding of positions may be given embeddings, of which it takes the shape alone.
            if isinstance(x, Tensor) and x.is_floating_point() and not isinstance(module, nn.Embedding):
                self.input.add(x)
                if self.norm is not None:
                    self.norm.add(x)
            self.output.add(y)

    def result(self, scores: ScoreRange | None) -> ModuleRange:
        norm = None if self.norm is None else self.norm.result()
        return ModuleRange(self.input.result(), self.output.result(), norm, scores)
