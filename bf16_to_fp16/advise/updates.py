"""Which weights would not move: updates below half the gap of a 16-bit weight vanish when it is rounded to nearest.

The gap between neighbouring values is a power of two, so one histogram of exponents says for every learning rate at
once which share of a tensor moves. How large updates are is either stated (Adam's are about the learning rate, whatever
the gradient is; Adafactor's about the learning rate times the tensor's root mean square) or measured: a few steps with
real gradients, in fp32, of which the last one is looked at.

The remedies in the order in which they cost least: round stochastically, so that the mean of many lost updates arrives
(Gupta et al., arXiv:1502.02551; Zamirai et al., arXiv:2010.06192); keep an fp32 copy of the weights; or raise the
learning rate, and with it, linearly (Goyal et al., arXiv:1706.02677), the batch size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.reader import Checkpoint
from ..errors import UserError
from ..families.declared import in_folder
from ..families.known import stock_class
from ..families.roles import layer_of
from ..finetuning.corpus import Corpus
from ..finetuning.recipe import Data
from ..optim import rounding
from ..optim.formats import FORMATS, Format, half_gaps
from ..optim.stalls import DEFAULT_SHARE, Layer
from ..progress import Advance, Progress, shown_by
from ..quiet import quiet
from ..run.interface import predicts_tokens
from ..run.stock import attentions_of, load
from ..wording import rounded_up
from .formats import chosen, open_weights, tensor_pieces

OPTIMIZERS = ("adamw", "adam", "adafactor", "lion", "sgd")
DEFAULT_BATCH = 8

SMALLEST_SCALE = 1e-3
"""Adafactor takes a tensor's root mean square for at least this (Shazeer and Stern, arXiv:1804.04235)."""


@dataclass(frozen=True)
class Settings:
    """Whose updates are looked at, on which format.

    rate: the learning rate. optimizer: one of ``OPTIMIZERS``. dtype: of the weights, "bf16" or "fp16". relative_update:
    root mean square of a tensor's update over that of the tensor, at ``rate``, instead of what the optimizer does by
    itself. data: text for real gradients of ``steps`` steps of ``batch_size`` examples (default 8), of which the last
    is looked at; this loads the model, everything else streams. share: of the elements, that should move.
    """

    rate: float = 1e-4
    optimizer: str = "adamw"
    dtype: str = "bf16"
    relative_update: float | None = None
    data: str | None = None
    steps: int = 8
    batch_size: int | None = None
    share: float = DEFAULT_SHARE
    seed: int = 0

    @property
    def format(self) -> Format:
        """The format of the weights."""
        return FORMATS[self.dtype]

    @property
    def examples(self) -> int:
        """Examples of a step with real gradients."""
        return self.batch_size or DEFAULT_BATCH

    def check(self) -> None:
        """Raise UserError for settings that make no sense, alone or together."""
        if self.optimizer not in OPTIMIZERS:
            raise UserError(f"optimizer {self.optimizer!r} is not known; choose from {', '.join(OPTIMIZERS)}")
        if self.dtype not in FORMATS:
            raise UserError(f"dtype {self.dtype!r} is not a 16-bit format; choose from {', '.join(FORMATS)}")
        for what, given in (("learning rate", self.rate), ("relative update", self.relative_update)):
            if given is not None and not 0 < given < math.inf:
                raise UserError(f"the {what} is {given:g}; give a positive number")
        if not 0 < self.share <= 1:
            raise UserError(f"the share is {self.share:g}; give one above 0, up to 1")
        if self.steps < 1 or (self.batch_size is not None and self.batch_size < 1):
            raise UserError("steps and batch size must be at least 1")
        if self.relative_update is not None and self.data is not None:
            raise UserError("the updates are either stated or measured; leave out --relative-update or --data")
        if self.optimizer == "sgd" and self.relative_update is None and self.data is None:
            raise UserError(
                "sgd's updates are as large as its gradients; give --data FILE to measure them, or --relative-update"
            )


@quiet()
def advise_updates(
    source: str | Path,
    *,
    tensors: Sequence[str] = (),
    subfolder: str | None = None,
    progress: Progress | bool | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return which share of a checkpoint's weights an optimizer's update would not move, and what to do about it.

    tensors: names with wildcards, of those to look at. options: the fields of ``Settings``, by name.

    The result has ``layers`` and ``tensors`` (name, elements, ``no_update`` for those whose update is 0, ``stalled``
    ones of the others and their fraction, ``rate_for_share``), the same for all as ``total``, and ``advice``. Raises
    UserError for settings, a source or data that cannot be used.
    """
    settings = Settings(**options)
    settings.check()
    data, share = settings.data, settings.share
    progress = shown_by(progress)
    checkpoint = open_weights(source, subfolder)
    names = chosen(checkpoint, tensors)
    with progress.step("Looking at the weights" if data is None else "Taking steps") as advance:
        if data is None:
            tensor_rows = stated(checkpoint, names, settings, advance)
        else:
            tensor_rows = measured(checkpoint, set(names) if tensors else None, data, settings, advance)
    total = Layer("all")
    layers: dict[str, Layer] = {}
    for row in tensor_rows:
        layer = layers.setdefault(layer_of(row.name), Layer(layer_of(row.name)))
        for sums in (layer, total):
            sums.join(row)
    result = {
        "mode": "updates",
        "source": checkpoint.source,
        "optimizer": settings.optimizer,
        "dtype": settings.dtype,
        "learning_rate": settings.rate,
        "relative_update": settings.relative_update,
        "gradients": None
        if data is None
        else {"data": Path(data).name, "steps": settings.steps, "batch_size": settings.examples},
        "share": share,
        "batch_size": settings.batch_size,
        "total": total.to_json(share),
        "layers": [layer.to_json(share) for layer in layers.values()],
        "tensors": [row.to_json(share) for row in tensor_rows],
    }
    return result | {"advice": advice_for(result)}


# ---- stated updates -------------------------------------------------------------------------------------------------


def stated(checkpoint: Checkpoint, names: Sequence[str], settings: Settings, advance: Advance) -> list[Layer]:
    """Return the elements of each tensor by the learning rate from which they move, every update being of one size.

    adamw, adam, lion: the learning rate; adafactor: times the tensor's root mean square.
    """
    target, rate = settings.format, settings.rate
    rows = []
    for place, name in enumerate(names):
        row = Layer(name)
        exponents = torch.zeros(512, dtype=torch.float64)
        square = 0.0
        for part in tensor_pieces(checkpoint, name):
            narrow = part.to(target.dtype)
            finite = narrow[narrow.isfinite()].float()
            row.overflow += part.numel() - finite.numel()
            square += float(finite.double().square().sum())
            exponents += torch.bincount(half_gaps(finite, target).log2().to(torch.int64) + 200, minlength=512)
        elements = float(exponents.sum())
        rms = math.sqrt(square / elements) if elements else 0.0
        size = 1.0  # of an update, in units of the learning rate
        if settings.relative_update is not None:
            size = settings.relative_update * rms / rate
        elif settings.optimizer == "adafactor":
            size = max(SMALLEST_SCALE, rms)
        row.elements = row.overflow + int(elements)
        row.still = row.overflow
        for bin_ in exponents.nonzero().flatten().tolist():
            # Where updates are 0, as in a tensor of zeros with a relative update, nothing moves.
            moves_from = math.ldexp(1.0, bin_ - 200) / size if size else math.inf
            many = Layer(name)
            many.add(torch.tensor([moves_from], dtype=torch.float64), rate)
            count = int(exponents[bin_])
            row.lost += count * many.lost
            row.still += count * many.still
            row.moves += many.moves * count
        rows.append(row)
        advance(place + 1, len(names))
    return rows


# ---- measured updates -----------------------------------------------------------------------------------------------


def measured(
    checkpoint: Checkpoint, names: set[str] | None, data: str, settings: Settings, advance: Advance
) -> list[Layer]:
    """Return the elements of each parameter by the learning rate from which the last of the steps moves them.

    The model runs in fp32 from weights of the format, which move by the exact updates; the elements that have had no
    gradient count as without an update.
    """
    with in_folder(checkpoint.folder):
        attention, *_ = attentions_of(stock_class(checkpoint.config), ("sdpa", "eager"))
    model = load(checkpoint.folder, torch.float32, attention=attention)
    if not predicts_tokens(model.config):
        raise UserError(f"{checkpoint.source}: only a language model has a loss of its own; leave out --data")
    wanted = Data(path=data, batch_size=settings.examples, held_out=0.0)
    corpus = Corpus(wanted, checkpoint.folder, model.config, seed=settings.seed)
    parameters = {n: p for n, p in model.named_parameters() if names is None or n in names}
    target, rate, steps = settings.format, settings.rate, settings.steps
    rule = Rule(settings.optimizer)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.copy_(rounding.nearest(parameter, target.dtype))
    training_batches = corpus.training_batches()
    rows: list[Layer] = []
    for step in range(1, steps + 1):
        model.zero_grad()
        model(**next(training_batches).inputs()).loss.backward()
        with torch.no_grad():
            for name, parameter in parameters.items():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                update = rule.update(name, parameter, gradient, step)
                if step == steps:
                    rows.append(moving(name, parameter, update, target, rate))
                parameter.sub_(update, alpha=rate)
        advance(step, steps)
    return rows


def moving(name: str, value: Tensor, update: Tensor, target: Format, rate: float) -> Layer:
    """Return a parameter's elements by the learning rate from which ``update``, which is taken away, moves them."""
    row = Layer(name)
    stored = rounding.nearest(value, target.dtype).flatten()
    update = update.flatten()
    gap = half_gaps(stored, target, towards_zero=update.sign() == stored.sign())
    row.add(torch.where(update == 0, math.inf, gap.double() / update.double().abs()), rate)
    return row


class Rule:
    """The updates of an optimizer at a learning rate of 1, from gradients alone, without weight decay.

    adamw and adam: betas 0.9 and 0.999; adafactor: as in T5, no first moment, updates clipped to a root mean square of
    1 and multiplied by the tensor's; lion: betas 0.9 and 0.99; sgd: the gradient.
    """

    def __init__(self, optimizer: str) -> None:
        """Start without moments."""
        self.optimizer = optimizer
        self.moments: dict[str, list[Tensor]] = {}

    def update(self, name: str, parameter: Tensor, gradient: Tensor, step: int) -> Tensor:
        """Return the update, which is subtracted from the parameter times the learning rate; ``step`` counts from 1."""
        if self.optimizer == "sgd":
            return gradient
        if self.optimizer == "adafactor":
            return self._adafactor(name, parameter, gradient, step)
        first, second = self.moments.setdefault(name, [torch.zeros_like(gradient) for _ in range(2)])
        if self.optimizer == "lion":
            update = (0.9 * first + 0.1 * gradient).sign()
            first.mul_(0.99).add_(gradient, alpha=0.01)
            return update
        first.mul_(0.9).add_(gradient, alpha=0.1)
        second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        return first / (1 - 0.9**step) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)

    def _adafactor(self, name: str, parameter: Tensor, gradient: Tensor, step: int) -> Tensor:
        decay = 1 - step**-0.8
        square = gradient.square() + 1e-30
        if gradient.ndim < 2:
            (second,) = self.moments.setdefault(name, [torch.zeros_like(gradient)])
            second.mul_(decay).add_(square, alpha=1 - decay)
        else:
            rows, columns = self.moments.setdefault(name, [torch.zeros_like(square.mean(d)) for d in (-1, -2)])
            rows.mul_(decay).add_(square.mean(-1), alpha=1 - decay)
            columns.mul_(decay).add_(square.mean(-2), alpha=1 - decay)
            second = (rows / rows.mean(-1, keepdim=True))[..., None] * columns[..., None, :]
        update = gradient / second.sqrt()
        scale = max(SMALLEST_SCALE, float(parameter.square().mean().sqrt()))
        return update * (scale / max(1.0, float(update.square().mean().sqrt())))


# ---- advice ---------------------------------------------------------------------------------------------------------


def advice_for(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what to do, best first: ``what`` is stochastic-rounding, fp32-master or learning-rate, ``why`` a sentence.

    Empty where at least the share that was asked for moves already.
    """
    total, share = result["total"], result["share"]
    if 1 - total["stalled_fraction"] >= share:
        return []
    dtype = result["dtype"]
    remedies: list[dict[str, Any]] = [
        {
            "what": "stochastic-rounding",
            "why": 'bf16_to_fp16.AdamW(..., rounding="stochastic") moves every weight as far as it should on average,'
            f" with weights in {dtype} and no copy",
        },
        {
            "what": "fp32-master",
            "why": f"an fp32 copy of the weights keeps what {dtype} loses, for 4 bytes more a weight",
        },
    ]
    needed = total["rate_for_share"]
    if needed is not None:
        needed = rounded_up(needed, 3)
        factor = needed / result["learning_rate"]
        batch = result["batch_size"] and math.ceil(result["batch_size"] * factor)
        bigger = f"the batch size to {batch:,}" if batch else "the batch size by the same factor"
        remedies.append(
            {
                "what": "learning-rate",
                "learning_rate": needed,
                "factor": factor,
                "batch_size": batch,
                "why": f"a learning rate of {needed:.3g} ({factor:.3g} times as much) moves {share:.0%} of the weights;"
                f" scale {bigger}; it may still be too high to train with",
            }
        )
    return remedies
