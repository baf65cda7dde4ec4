"""A penalty that keeps every activation of a model in training under a target, in any training loop.

A smooth maximum of |x| must stay under each site's target; the excess counts in bits (log2). The weight of a site's
excess rises by dual ascent until its constraint holds (Platt and Barr 1987), so there is no coefficient to tune. A site
under its target costs one ``aminmax``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..errors import UserError
from ..measuring.meter import is_norm
from ..measuring.tap import Tap, paths
from ..numerics import FP16_MAX, GELU_CUBE_BACKWARD_LIMIT

SHARPNESS = 4.0  # exponent of the smooth maximum: a token one bit below the largest is pulled 2⁻⁴ as hard
MOST_EXCESS_BITS = 16.0  # largest excess that one step of dual ascent counts; also what a non-finite value counts
MOST_SLACK_BITS = 1.0  # largest slack by which one step of dual ascent lets a weight decay

# What is bounded by what enters it, or by 1; what losses and norms compute, which stock code does in fp32.
_BOUNDED = {"softmax", "relu", "silu", "gelu", "sigmoid", "tanh", "dropout", "native_dropout"}
_LOSSES = {"cross_entropy", "nll_loss", "_log_softmax", "mse_loss", "kl_div"}
_STATISTICS = {"pow", "mean", "var", "add", "rsqrt", "sqrt"}
_FUSED = ("sdpa", "flash", "flex", "paged")
_CUBING = ("NewGELUActivation", "FastGELUActivation")


@dataclass(frozen=True, slots=True)
class Observation:
    """The largest value of one site in the last optimizer step, over all micro-batches and ranks."""

    amax: float  # largest |x|, inf after an inf or NaN
    target: float
    excess_bits: float  # log2(amax / target)
    weight: float  # what the site's excess is multiplied by in the next step


class ActivationPenalty:
    """A penalty on values over their target inside ``model``'s forward.

    ::

        penalty = ActivationPenalty(model).attach()
        loss = loss + penalty()  # after the forward, before the backward

    A call returns an fp32 scalar: the sum of each site's excess in bits times the site's weight. The call covers all
    forwards with gradients since the call before. The scalar has no graph if no site is over its target. All ranks of
    torch's default group share the largest values.

    model: any torch model with eager attention, wrapped (DDP, FSDP) or not. targets: the largest |x| by the audit's
    site names; by default fp16's limit times 2**-headroom_bits at every site that can grow. dual_step: what each step
    adds to a site's weight per bit of excess. weight: a fixed weight for all sites, with which ``dual_step`` has no
    effect; 0 only observes. accumulation: calls per optimizer step, by which the loop divides the loss. train_mode:
    whether to also keep the input of ``gelu_new`` under 147.8, beyond which its backward overflows.

    Raises ``UserError`` for unusable arguments, fused attention whose scores cannot be seen, compiled models and
    reentrant checkpointing."""

    def __init__(
        self,
        model: nn.Module,
        *,
        targets: Mapping[str, float] | None = None,
        headroom_bits: float = 1.0,
        dual_step: float = 0.05,
        weight: float | None = None,
        accumulation: int = 1,
        train_mode: bool = False,
    ) -> None:
        # So many parameters because two lines are to adopt the penalty: a record of them would be a third.
        usable = {
            f"headroom_bits is {headroom_bits}; give a number of bits from 0": 0 <= headroom_bits < math.inf,
            f"dual_step is {dual_step}; give a number above 0": 0 < dual_step < math.inf,
            f"weight is {weight}; give a number from 0": weight is None or 0 <= weight < math.inf,
            f"accumulation is {accumulation}; give the calls per optimizer step, 1 or more": accumulation >= 1,
        }
        for site, target in (targets or {}).items():
            usable[f"the target of {site} is {target}; give a finite number above 0"] = 0 < target < math.inf
        for wrong, is_right in usable.items():
            if not is_right:
                raise UserError(wrong)
        self.model = model
        self.targets = None if targets is None else dict(targets)
        self.headroom_bits = headroom_bits
        self.dual_step = dual_step
        self.weight = weight
        self.accumulation = accumulation
        self.train_mode = train_mode
        self.watches = True  # whether forwards are looked at; not those that only keep ranks in step
        self.skipped = 0  # outputs with a NaN so far, on this rank
        self._tap = Tap(model, self._take, only=self._is_wanted, glance=self._glance)
        self._attached = False
        self._modules: dict[str, nn.Module] = {}
        self._target: dict[str, float] = {}
        self._order: list[str] = []
        self._weights: dict[str, float] = {}
        self._last: dict[str, Observation] = {}
        self._largest: dict[str, float] = {}
        self._calls = 0
        self._seen = False
        self._reached: dict[str, float] = {}
        self._terms: dict[str, list[Tensor]] = {}
        self._world = 1
        self._waiting: list[_Waiting] = []
        # A device whose values cannot be read without waiting for it; a test sets it on the CPU.
        self._waits: Callable[[Tensor], bool] = lambda x: x.device.type != "cpu"

    # -- the loop's side ----------------------------------------------------------------------------------------------

    def attach(self) -> ActivationPenalty:
        """Start to observe ``model``'s forwards, and return self."""
        if self._attached:
            raise UserError("this penalty is attached already; call detach() first")
        if self.targets is None or any(site.endswith((":scores", ":masked")) for site in self.targets):
            _check_attention(self.model)
        self._modules = dict(paths(self.model))
        distributed = torch.distributed
        self._world = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
        self._tap.__enter__()
        self._attached = True
        return self

    def detach(self) -> None:
        """Stop observing the model's forwards and remove the hooks. The sites' weights and observations are kept."""
        if self._attached:
            self._tap.__exit__(None, None, None)
            self._attached = False
        self._forget()

    __enter__ = attach

    def __exit__(self, *error: Any) -> None:
        self.detach()

    def __call__(self) -> Tensor:
        """Return the penalty of the forwards since the last call, an fp32 scalar, and forget these forwards."""
        if not self._seen:
            raise UserError("the penalty saw no forward with gradients; attach() it, run its model, and then call it")
        for entry, amax in zip(self._waiting, _read_amax(self._waiting), strict=True):
            if self._note(entry.site, amax) and entry.term is not None:
                self._terms.setdefault(entry.site, []).append(entry.term)
        together = self._gather()
        for site, (largest, _) in together.items():
            self._largest[site] = max(largest, self._largest.get(site, 0.0))
        total = self._shared_total(together) if self._world > 1 else self._total()
        self._forget()
        self._calls += 1
        if self._calls >= self.accumulation:
            self._close_step()
        return total

    def observations(self) -> dict[str, Observation]:
        """Return each site's observation in the last complete optimizer step."""
        return dict(self._last)

    def worst(self) -> tuple[str, Observation]:
        """Return the site nearest to its target or furthest over it; raise ``UserError`` before the first step."""
        if not self._last:
            raise UserError("the penalty has seen no complete optimizer step; call worst() after the first one")
        return max(self._last.items(), key=lambda item: item[1].excess_bits)

    def drop_step(self) -> None:
        """Forget all forwards of an unfinished optimizer step. Call it on every rank or on none."""
        self._forget()
        self._largest.clear()
        self._calls = 0

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings from which ``load_state_dict`` resumes bit for bit."""
        return {
            "order": list(self._order),
            "weights": dict(self._weights),
            "largest": dict(self._largest),
            "calls": self._calls,
            "skipped": self.skipped,
            "observations": {site: asdict(seen) for site, seen in self._last.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned, even between a step's calls. All ranks must load the same ``state``."""
        self._order = list(state["order"])
        self._weights = dict(state["weights"])
        self._largest = dict(state["largest"])
        self._calls = int(state["calls"])
        self.skipped = int(state["skipped"])
        self._last = {site: Observation(**seen) for site, seen in state["observations"].items()}

    # -- in the forward -----------------------------------------------------------------------------------------------

    def _is_wanted(self, site: str) -> bool:
        if self.targets is not None:
            target = self.targets.get(site)
        else:
            limit = self._limit(site)
            target = None if limit is None else limit * 2.0**-self.headroom_bits
        if target is not None:
            self._target[site] = target
        return target is not None

    def _limit(self, site: str) -> float | None:
        path, _, operation = site.partition(":")
        operation = operation.partition("#")[0]
        module = self._modules.get(path)
        if operation == "cubed":
            return GELU_CUBE_BACKWARD_LIMIT if self.train_mode else None
        attention = type(module).__name__.endswith("Attention")
        bounded = (
            operation in _BOUNDED | _LOSSES
            or operation == "as_strided"  # by which FSDP makes views of the weights that it has gathered
            or isinstance(module, nn.Dropout)
            # Scaled down, masked, or mixed with weights that sum to 1: no larger than the scores or the values were.
            or (attention and (operation in ("mul", "context") or site.startswith(f"{path}:add#")))
            # The cube is harmless in the forward, and the rest of that activation is smaller than what enters it.
            or type(module).__name__ in _CUBING
            # The first product of an RMS norm is the normalised input.
            or (module is not None and is_norm(module) and (operation in _STATISTICS or site == f"{path}:mul"))
        )
        return None if bounded else FP16_MAX

    def _glance(self, site: str, x: Tensor) -> bool:
        """Record a site's largest |x|; return whether ``_take`` must make a term of the penalty from x."""
        self._seen = True
        if not (self.watches and x.numel()):
            return False
        low, high = torch.aminmax(x)
        if self._waits(x):
            self._waiting.append(_Waiting(site, low, high))
            last = self._last.get(site)  # a term must be made before the device has said how large the value is
            return self._weight(site) > 0 and (last is None or last.excess_bits > -MOST_SLACK_BITS)
        return self._note(site, _amax(float(low), float(high))) and self._weight(site) > 0

    def _note(self, site: str, amax: float) -> bool:
        unknown = math.isnan(amax)
        if unknown:
            self.skipped += 1
            amax = math.inf
        self._reached[site] = max(self._reached.get(site, -1.0), amax)
        return not unknown and amax > self._floor(site)

    def _floor(self, site: str) -> float:
        return self._target[site] / 2**MOST_SLACK_BITS  # smaller values get no gradient

    def _weight(self, site: str) -> float:
        return self._weights.get(site, 0.0) if self.weight is None else self.weight

    def _take(self, site: str, x: Tensor) -> None:
        if not x.requires_grad:
            return
        term = _log2_peak(x, self._floor(site))
        if self._waits(x):
            self._waiting[-1].term = term
        else:
            self._terms.setdefault(site, []).append(term)

    # -- after the forward --------------------------------------------------------------------------------------------

    def _joined(self, site: str) -> Tensor:
        """Return log2 of a site's smooth maximum over all forwards since the penalty was last called."""
        terms = self._terms[site]
        if len(terms) == 1:
            return terms[0]
        unit = SHARPNESS * math.log(2)
        return (torch.stack(terms) * unit).logsumexp(0) / unit

    def _total(self) -> Tensor:
        over = [site for site in self._terms if self._reached[site] > self._target[site]]
        if not over:
            return torch.zeros((), device=_device(self.model))
        terms = [self._joined(site) for site in over]
        device = terms[0].device
        constants = [[math.log2(self._target[site]) for site in over], [self._weight(site) for site in over]]
        targets, weights = torch.tensor(constants).to(device, non_blocking=True)
        return ((torch.stack([term.to(device) for term in terms]) - targets) * weights).sum()

    def _shared_total(self, together: Mapping[str, tuple[float, float]]) -> Tensor:
        """Return the penalty over all ranks. Its gradient is this rank's part times the number of ranks, because DDP
        averages gradients. together: the result of ``_gather``."""
        total = torch.zeros((), device=_device(self.model))
        for site, (largest, peak) in together.items():
            wanted = peak > -math.inf and (site in self._target or self._is_wanted(site))
            if not wanted or largest <= self._target[site] or (weight := self._weight(site)) <= 0:
                continue
            total = total + weight * (peak - math.log2(self._target[site]))
            if site in self._terms:
                term = self._joined(site)
                share = torch.exp2(SHARPNESS * (term.detach() - peak)) * (weight * self._world)
                total = total + ((term - term.detach()) * share).to(total.device)
        return total

    def _forget(self) -> None:
        self._reached.clear()
        self._terms.clear()
        self._waiting = []
        self._seen = False

    def _close_step(self) -> None:
        unseen = sorted(set(self.targets or ()) - set(self._order))
        if unseen:
            raise UserError(f"no site of this model is named {', '.join(unseen[:3])}; the audit's report has the names")
        for site in self._order:
            amax = self._largest.get(site)
            if amax is None or (site not in self._target and not self._is_wanted(site)):
                continue
            target = self._target[site]
            excess = math.log2(amax / target) if 0 < amax < math.inf else math.copysign(math.inf, amax - 1)
            if self.weight is None:
                step = min(max(excess, -MOST_SLACK_BITS), MOST_EXCESS_BITS)
                self._weights[site] = max(0.0, self._weights.get(site, 0.0) + self.dual_step * step)
            self._last[site] = Observation(amax, target, excess, self._weight(site))
        self._largest.clear()
        self._calls = 0

    def _gather(self) -> dict[str, tuple[float, float]]:
        """Return, by site, the largest |x| and log2 of the smooth maximum, over all ranks since the last call. The log2
        is -inf for a site without a penalty term on any rank. With one rank, it is always -inf and not used."""
        mine = {site: (largest, -math.inf) for site, largest in self._reached.items()}
        every = [mine]
        if self._world > 1:
            peaks = [self._joined(site).detach() for site in self._terms]
            bits = torch.stack([peak.to(peaks[0].device) for peak in peaks]).tolist() if peaks else []
            mine |= {site: (mine[site][0], peak) for site, peak in zip(self._terms, bits, strict=True)}
            every = [{}] * self._world
            torch.distributed.all_gather_object(every, mine)
        self._order = list(dict.fromkeys(chain(self._order, *every)))
        together: dict[str, tuple[float, float]] = {}
        for reached in every:
            for site in filter(reached.__contains__, self._order):
                largest, peak = reached[site]
                before, joined = together.get(site, (largest, -math.inf))
                # The log-sum-exp over all tokens is that over the parts' own.
                joined = float(np.logaddexp2(SHARPNESS * joined, SHARPNESS * peak)) / SHARPNESS
                together[site] = max(largest, before), joined
        return together


@dataclass(slots=True)
class _Waiting:
    site: str
    low: Tensor
    high: Tensor  # on the device, which may not have computed it yet
    term: Tensor | None = None


def _amax(low: float, high: float) -> float:
    return math.nan if math.isnan(low) or math.isnan(high) else max(high, -low)


def _read_amax(waiting: list[_Waiting]) -> list[float]:
    largest = [0.0] * len(waiting)
    for device in {entry.low.device for entry in waiting}:
        places = [i for i, entry in enumerate(waiting) if entry.low.device == device]
        sides = [torch.stack([getattr(waiting[i], side) for i in places]).float() for side in ("low", "high")]
        for i, low, high in zip(places, *torch.stack(sides).tolist(), strict=True):
            largest[i] = _amax(low, high)
    return largest


class _Peak(torch.autograd.Function):
    """An autograd function that returns ``value``. Its gradient by x is ``slope`` (fp32 [k]) at the elements ``index``
    (int64 [k]) of the flattened x, and 0 elsewhere. The backward does not need x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, index: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(index, slope)
        ctx.shape, ctx.dtype, ctx.device = x.shape, x.dtype, x.device
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        index, slope = ctx.saved_tensors
        pulled = torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device)
        pulled.view(-1)[index] = (gradient * slope).to(ctx.dtype)
        return pulled, None, None, None


def _log2_peak(x: Tensor, floor: float) -> Tensor:
    """Return log2 of the smooth maximum of the tokens' largest |x|, an fp32 scalar, for x [..., channels]. floor:
    tokens whose largest |x| is at most this are left out, except the largest token."""
    # Nothing here is copied from the device, or lowered to 16 bits by autocast.
    channels = x.shape[-1] if x.dim() > 1 else x.numel()
    rows = x.detach().reshape(-1, channels)
    index = rows.abs().max(-1).indices + torch.arange(len(rows), device=x.device) * channels
    largest = rows.reshape(-1)[index].float()
    size = largest.abs().nan_to_num(nan=0.0).clamp(torch.finfo(torch.float32).tiny, torch.finfo(x.dtype).max)
    bits = size.log2()
    peak = bits.amax()
    shares = torch.exp2(SHARPNESS * (bits - peak)) * ((size > floor) | (bits == peak))
    total = shares.sum()
    slope = shares / total * largest.sign().nan_to_num(nan=0.0) / (size * math.log(2))
    value: Tensor = _Peak.apply(x, peak + total.log2() / SHARPNESS, index, slope)
    return value


def _device(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _check_attention(model: nn.Module) -> None:
    for module in model.modules():
        used = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if isinstance(used, str) and any(kind in used for kind in _FUSED):
            raise UserError(
                f"attention {used!r} hides its scores; call model.set_attn_implementation('eager'),"
                " or give targets without ':scores' and ':masked'"
            )
