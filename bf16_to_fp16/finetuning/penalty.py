"""A penalty that keeps every activation of a model in training under a target, for anyone's own loop.

Rescaling moves values about; what no rescaling changes (attention scores, what enters a GELU, the logits of a tied
head) only training can bring down. Penalising the mean square of all activations, as Jamba did, pulls at a million
small values to reach one large one, and its coefficient has to be found. Here the penalty is a constraint per site:
its largest |x| under a target, the excess counted in bits (log2), so that 2¹⁷ and 2⁸ over a target weigh alike per
doubling, and its weight raised by dual ascent until the constraint holds (Platt and Barr 1987), so that there is no
coefficient to tune. A site inside its target costs one ``aminmax`` and no graph node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..errors import UserError
from ..numerics import FP16_MAX, GELU_CUBE_BACKWARD_LIMIT
from ..observe.meter import is_norm
from ..observe.tap import Tap, paths

FORMS = ("amax", "smooth-max", "hinge", "mean-square", "lp", "none")
"""What is penalised; docs/finetuning.md has a table of them."""


SHARPNESS = 4.0
"""Exponent of the smooth maximum: a token one bit below the largest is pulled 2⁻⁴ as hard."""


ORDER = 8.0
"""Order p of the form "lp"."""


MOST_EXCESS_BITS = 16.0
"""Largest excess that one step of dual ascent counts; also what a non-finite value counts."""


MOST_SLACK_BITS = 1.0
"""Largest slack by which one step of dual ascent lets a weight decay."""


_WITHOUT_TARGET = ("mean-square", "lp")


_WITH_PEAK = ("amax", "smooth-max")


# What is bounded by what enters it, or by 1.
_BOUNDED = {"softmax", "relu", "silu", "gelu", "sigmoid", "tanh", "dropout", "native_dropout"}


_LOSSES = {"cross_entropy", "nll_loss", "_log_softmax", "mse_loss", "kl_div"}


# Stock code computes a norm's statistics in fp32, whatever the model's dtype.
_STATISTICS = {"pow", "mean", "var", "add", "rsqrt", "sqrt"}


_VIEWS = {"as_strided"}


_FUSED = ("sdpa", "flash", "flex", "paged")


_CUBING = ("NewGELUActivation", "FastGELUActivation")


@dataclass(frozen=True, slots=True)
class Observation:
    """What one site reached in the last optimizer step, over its micro-batches and ranks.

    ``amax``: largest |x|, inf where a value was inf or NaN. ``excess_bits``: log2(amax / target), negative inside.
    ``weight``: the site's weight in the next step.
    """

    amax: float
    target: float
    excess_bits: float
    weight: float


class ActivationPenalty:
    """The penalty on what passes its target inside ``model``'s forward; two lines adopt it.

    ::

        penalty = ActivationPenalty(model).attach()
        loss = loss + penalty()  # after the forward, before the backward

    A call returns an fp32 scalar for the forwards with gradients since the last one; a zero without a graph where
    nothing is over. model: any torch model with eager attention, wrapped (DDP, FSDP) or not. targets: largest |x|
    wanted, by the audit's site names; by default fp16's limit times 2**-headroom_bits at every site that can grow.
    form: one of ``FORMS``. dual_step: growth of a site's weight per step and bit of excess; weight: a fixed weight of
    every site instead. accumulation: calls that make one optimizer step; the loop divides the loss by it.
    process_group: ranks that agree on the largest values, by default the default group. train_mode: hold what enters
    ``gelu_new`` to 147.8, beyond which its backward overflows.

    docs/finetuning.md has what is left out by default, the forms, ranks, and values that are not finite. Raises
    ``UserError`` for unusable arguments, fused attention whose scores cannot be seen, compiled models and
    reentrant checkpointing.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        targets: Mapping[str, float] | None = None,
        headroom_bits: float = 1.0,
        form: str = "amax",
        dual_step: float = 0.1,
        weight: float | None = None,
        accumulation: int = 1,
        process_group: Any = None,
        train_mode: bool = True,
    ) -> None:
        # So many parameters because two lines are to adopt the penalty: a record of them would be a third.
        if form not in FORMS:
            raise UserError(f"form {form!r} is none of {', '.join(FORMS)}")
        if form in _WITHOUT_TARGET and weight is None:
            raise UserError(f"form {form!r} has no target for dual ascent to reach; give a fixed weight")
        if not 0 <= headroom_bits < math.inf:
            raise UserError(f"headroom_bits is {headroom_bits}; give a number of bits from 0")
        if not 0 < dual_step < math.inf:
            raise UserError(f"dual_step is {dual_step}; give a number above 0")
        if weight is not None and not 0 <= weight < math.inf:
            raise UserError(f"weight is {weight}; give a number from 0")
        if accumulation < 1:
            raise UserError(f"accumulation is {accumulation}; give the calls per optimizer step, 1 or more")
        for site, target in (targets or {}).items():
            if not 0 < target < math.inf:
                raise UserError(f"the target of {site} is {target}; give a finite number above 0")
        self.model = model
        self.targets = None if targets is None else dict(targets)
        self.headroom_bits = headroom_bits
        self.form = form
        self.dual_step = dual_step
        self.weight = weight
        self.accumulation = accumulation
        self.process_group = process_group
        self.train_mode = train_mode
        self.skipped = 0
        """Outputs with a NaN so far, on this rank."""
        self._tap = Tap(model, self._take, only=self._is_wanted, glance=self._glance)
        self._attached = False
        self._modules: dict[str, nn.Module] = {}
        self._target: dict[str, float] = {}
        self._order: list[str] = []
        self._agreed = False
        self._weights: dict[str, float] = {}
        self._last: dict[str, Observation] = {}
        self._largest: dict[str, float] = {}
        self._before: dict[str, float] = {}
        self._calls = 0
        self._seen = False
        self._terms: dict[str, list[Tensor]] = {}
        self._runs: dict[str, int] = {}
        self._kept_run: dict[str, int] = {}
        self._shares: dict[str, _Share] | None = None
        self._world = 1
        self._waiting: list[_Waiting] = []
        # A device whose values cannot be read without waiting for it; a test sets it on the CPU.
        self._waits: Callable[[Tensor], bool] = lambda x: x.device.type != "cpu"

    # -- the loop's side ----------------------------------------------------------------------------------------------

    def attach(self) -> ActivationPenalty:
        """Start to look at ``model``'s forwards and return the penalty."""
        if self._attached:
            raise UserError("this penalty is attached already; call detach() first")
        if self.targets is None or any(site.endswith((":scores", ":masked")) for site in self.targets):
            _check_attention(self.model)
        self._modules = dict(paths(self.model))
        distributed = torch.distributed
        joined = distributed.is_available() and distributed.is_initialized()
        self._world = distributed.get_world_size(self.process_group) if joined else 1
        self._tap.__enter__()
        self._attached = True
        return self

    def detach(self) -> None:
        """Leave ``model`` as it was; weights and observations stay."""
        if self._attached:
            self._tap.__exit__(None, None, None)
            self._attached = False
        self._forget()

    def __enter__(self) -> ActivationPenalty:
        return self.attach()

    def __exit__(self, *error: Any) -> None:
        self.detach()

    def __call__(self) -> Tensor:
        """Return the penalty of the forwards since the last call, an fp32 scalar, and forget them."""
        if not self._seen:
            raise UserError(
                "the penalty saw no forward with gradients; attach() it, and call it after the same model's forward"
            )
        self._read()
        self._agree()
        total = self._total()
        self._forget()
        self._before = dict(self._largest)
        self._calls += 1
        if self._calls >= self.accumulation:
            self._close_step()
        return total

    def observations(self) -> dict[str, Observation]:
        """Return what every site reached in the last complete optimizer step."""
        return dict(self._last)

    def worst(self) -> tuple[str, Observation]:
        """Return the site nearest its target, or furthest over it, and what it reached.

        Raises ``UserError`` before the first complete step.
        """
        if not self._last:
            raise UserError("the penalty has seen no complete optimizer step yet")
        return max(self._last.items(), key=lambda item: item[1].excess_bits)

    def drop_step(self) -> None:
        """Forget the calls of an optimizer step that the loop gives up half-way; on every rank, or on none."""
        self._forget()
        self._largest.clear()
        self._before.clear()
        self._calls = 0

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings from which ``load_state_dict`` goes on bit by bit."""
        return {
            "order": list(self._order),
            "weights": dict(self._weights),
            "largest": dict(self._largest),
            "calls": self._calls,
            "skipped": self.skipped,
            "observations": {site: asdict(seen) for site, seen in self._last.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the weights, and a step under way, of ``state_dict``; the same on every rank."""
        missing = {"order", "weights", "largest", "calls", "skipped", "observations"} - set(state)
        if missing:
            raise UserError(f"this is no state of a penalty: {', '.join(sorted(missing))} missing")
        self._order = list(state["order"])
        self._weights = dict(state["weights"])
        self._largest, self._before = dict(state["largest"]), dict(state["largest"])
        self._calls = int(state["calls"])
        self.skipped = int(state["skipped"])
        self._last = {site: Observation(**seen) for site, seen in state["observations"].items()}
        self._agreed = False

    # -- in the forward -----------------------------------------------------------------------------------------------

    def _is_wanted(self, site: str) -> bool:
        limit = self._limit(site) if self.targets is None else None
        target = self.targets.get(site) if self.targets is not None else None
        if limit is not None:
            target = limit * 2.0**-self.headroom_bits
        if target is None:
            return False
        self._target[site] = target
        return True

    def _limit(self, site: str) -> float | None:
        """fp16's limit of a site of the audit, or None where it needs no watching."""
        path, _, operation = site.partition(":")
        operation = operation.partition("#")[0]
        module = self._modules.get(path)
        if operation == "cubed":
            return GELU_CUBE_BACKWARD_LIMIT if self.train_mode else None
        if operation in _BOUNDED | _LOSSES or isinstance(module, nn.Dropout):
            return None
        # FSDP makes the weights that it has gathered into views, between the operations of the model.
        if operation in _VIEWS:
            return None
        # Scaled down, masked, or mixed with weights that sum to 1: no larger than the scores or the values were.
        attention = type(module).__name__.endswith("Attention")
        if attention and (operation in ("mul", "context") or site.startswith(f"{path}:add#")):
            return None
        # The cube is harmless in the forward, and the rest of that activation is smaller than what enters it.
        if type(module).__name__ in _CUBING:
            return None
        # The first product of an RMS norm is the normalised input.
        if module is not None and is_norm(module) and (operation in _STATISTICS or site == f"{path}:mul"):
            return None
        return FP16_MAX

    def _glance(self, site: str, x: Tensor) -> bool:
        """Note what a site holds; whether a term must be made of it."""
        self._seen = True
        if not x.numel():
            return False
        low, high = torch.aminmax(x)
        if self._waits(x):
            self._waiting.append(_Waiting(site, low, high))
            return self.form in _WITHOUT_TARGET or self._is_near(site)
        amax = _amax(float(low), float(high))
        record = self._note(site, amax)
        if self.form in _WITHOUT_TARGET:
            return not math.isnan(amax)
        if self.form == "hinge":
            record = amax > self._target[site]
        return record and self._weight(site) > 0 and not math.isnan(amax)

    def _note(self, site: str, amax: float) -> bool:
        """Note a largest value; whether it passes the target and everything seen before in this step."""
        if math.isnan(amax):
            self.skipped += 1
            amax = math.inf
        self._runs[site] = self._runs.get(site, 0) + 1
        before = self._largest.get(site)
        if before is None or amax > before:
            self._largest[site] = amax
        # Under a smooth maximum these tokens pull as well if another rank's pass the target.
        spread = self.form == "smooth-max" and self._world > 1
        floor = self._target[site] / 2**MOST_SLACK_BITS if spread else self._target[site]
        return amax > max(floor, before or 0.0)

    def _is_near(self, site: str) -> bool:
        last = self._last.get(site)
        return self._weight(site) > 0 and (last is None or last.excess_bits > -MOST_SLACK_BITS)

    def _weight(self, site: str) -> float:
        if self.form == "none":
            return 0.0
        return self._weights.get(site, 0.0) if self.weight is None else self.weight

    def _take(self, site: str, x: Tensor) -> None:
        if not x.requires_grad:
            return
        if self.form == "amax" and not self._waits(x):
            self._keep(site, _log2_largest(x, self._largest[site]))
            return
        # Everything here is fp32, and nothing a product that autocast would lower.
        term = self._term(site, x)
        if self._waits(x):
            self._waiting[-1].term = term
        else:
            self._keep(site, term)

    def _keep(self, site: str, term: Tensor) -> None:
        # A site that runs several times before a call pulls at its largest.
        self._terms[site] = [term] if self.form in _WITH_PEAK else [*self._terms.get(site, ()), term]
        self._kept_run[site] = self._runs[site]

    def _term(self, site: str, x: Tensor) -> Tensor:
        if self.form in _WITH_PEAK:
            return _log2_peak(x, smooth=self.form == "smooth-max")
        wide = x.float()
        if self.form == "mean-square":
            return wide.square().mean()
        magnitude = wide.abs()
        if self.form == "hinge":
            return (magnitude - self._target[site]).relu().square().sum()
        largest = magnitude.detach().amax().clamp(min=torch.finfo(torch.float32).tiny)
        return (magnitude / largest).pow(ORDER).sum().pow(1 / ORDER) * largest

    # -- after the forward --------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read what devices measured, at once, and keep the terms that are over."""
        if not self._waiting:
            return
        waiting = self._waiting
        for entry, amax in zip(waiting, _read_amax(waiting), strict=True):
            record = self._note(entry.site, amax)
            over = record if self.form in _WITH_PEAK else amax > self._target[entry.site]
            wanted = self.form in _WITHOUT_TARGET or over
            if entry.term is not None and wanted and not math.isnan(amax):
                self._keep(entry.site, entry.term)

    def _total(self) -> Tensor:
        if self._shares is not None:
            return self._shared_total(self._shares)
        terms = [(site, term) for site, kept in self._terms.items() for term in kept]
        if not terms:
            return torch.zeros((), device=_device(self.model))
        device = terms[0][1].device
        values = torch.stack([term.to(device) for _, term in terms])
        if self.form in _WITHOUT_TARGET:
            assert self.weight is not None
            return self.weight * values.mean()
        # Of other sums each rank has a part, which the mean over the ranks divides.
        parts = self._world if self.form == "hinge" else 1
        weights = [self._weight(site) * self.accumulation * parts for site, _ in terms]
        targets = [math.log2(self._target[site]) if self.form in _WITH_PEAK else 0.0 for site, _ in terms]
        constant = torch.tensor([weights, targets]).to(device, non_blocking=True)
        return ((values - constant[1]) * constant[0]).sum()

    def _shared_total(self, shares: Mapping[str, _Share]) -> Tensor:
        """The penalty of all ranks, the same on each, with this rank's part of its gradient times their number."""
        total = torch.zeros((), device=_device(self.model))
        for site, share in shares.items():
            weight = self._weight(site) * self.accumulation
            total = total + weight * (share.bits - math.log2(self._target[site]))
            if share.mine:
                (term,) = self._terms[site]
                total = total + (term - term.detach()).to(total.device) * (weight * share.mine * self._world)
        return total

    def _forget(self) -> None:
        self._terms.clear()
        self._runs.clear()
        self._kept_run.clear()
        self._shares = None
        self._waiting = []
        self._seen = False

    def _close_step(self) -> None:
        """Let the weights follow the largest values, on which the ranks have agreed."""
        unseen = sorted(set(self.targets or ()) - set(self._order))
        if unseen:
            raise UserError(f"no site of this model is named {', '.join(unseen[:3])}; the audit's report has the names")
        for site in self._order:
            amax = self._largest.get(site)
            if amax is None or (site not in self._target and not self._is_wanted(site)):
                continue
            target = self._target[site]
            excess = math.log2(amax / target) if 0 < amax < math.inf else math.copysign(math.inf, amax - 1)
            if self.weight is None and self.form != "none":
                step = min(max(excess, -MOST_SLACK_BITS), MOST_EXCESS_BITS)
                self._weights[site] = max(0.0, self._weights.get(site, 0.0) + self.dual_step * step)
            self._last[site] = Observation(amax, target, excess, self._weight(site))
        self._largest.clear()
        self._before.clear()
        self._calls = 0

    def _agree(self) -> None:
        """Make the largest values those of all ranks, and find out which of them pull at a site."""
        known = set(self._order)
        new = [site for site in self._largest if site not in known]
        if self._world == 1:
            self._order += new
            return
        distributed, group = torch.distributed, self.process_group
        device = torch.device("cpu") if "gloo" in distributed.get_backend(group) else _device(self.model)

        def gather(sites: list[str]) -> list[list[float]]:
            """Of every rank: whether it has new sites, and for each site its largest value, its term, and the term's
            run in this call."""
            values = self._values()
            columns = (self._largest, values, self._kept_run)
            row = [float(bool(new)), *(float(column.get(site, _ABSENT)) for column in columns for site in sites)]
            packed = torch.tensor(row, dtype=torch.float64, device=device)
            rows = [torch.empty_like(packed) for _ in range(self._world)]
            distributed.all_gather(rows, packed, group=group)
            found: list[list[float]] = torch.stack(rows).tolist()
            return found

        rows = gather(self._order if self._agreed else [])
        if any(row[0] for row in rows) or not self._agreed:
            # Sites of the first step, and any that a rank sees for the first time: rare, so names may be exchanged.
            names: list[list[str]] = [[] for _ in range(self._world)]
            distributed.all_gather_object(names, self._order + new, group=group)
            self._order = list(dict.fromkeys(site for each in names for site in each))
            self._agreed = True
            rows = gather(self._order)
        number, rank = len(self._order), distributed.get_rank(group)
        self._shares = {} if self.form in _WITH_PEAK else None
        for i, site in enumerate(self._order, 1):
            held = [_Held(row[i], row[i + number], int(row[i + 2 * number])) for row in rows]
            largest = max(each.largest for each in held)
            if largest == _ABSENT:
                continue
            self._largest[site] = largest
            if self._shares is None or (site not in self._target and not self._is_wanted(site)):
                continue
            if largest > max(self._target[site], self._before.get(site, 0.0)):
                share = _gradient_share(held, rank, smooth=self.form == "smooth-max")
                if share is not None:
                    self._shares[site] = share

    def _values(self) -> dict[str, float]:
        """log2 of each kept term, read from its device at once."""
        if self.form not in _WITH_PEAK or not self._terms:
            return {}
        device = next(iter(self._terms.values()))[0].device
        together = torch.stack([term.detach().to(device) for (term,) in self._terms.values()])
        return dict(zip(self._terms, together.tolist(), strict=True))


_ABSENT = -1e300


@dataclass(frozen=True, slots=True)
class _Held:
    """What one rank has of a site: its largest value in this step, log2 of its term, and the term's run."""

    largest: float
    bits: float
    run: int


@dataclass(frozen=True, slots=True)
class _Share:
    """log2 of the peak over all ranks, and this rank's share of its gradient."""

    bits: float
    mine: float


def _gradient_share(held: list[_Held], rank: int, *, smooth: bool) -> _Share | None:
    """Return what ``rank`` has of the peak over all ranks; None where the largest value has no term, being NaN or far
    inside in the step before."""
    largest = max(each.largest for each in held)
    first = next((i for i, each in enumerate(held) if each.largest == largest and each.bits != _ABSENT), None)
    if first is None:
        return None
    if not smooth:
        return _Share(held[first].bits, float(rank == first))
    # The log-sum-exp over all tokens is that over the ranks' own.
    joined = [each.bits if each.run == held[first].run and each.bits != _ABSENT else -math.inf for each in held]
    peak = max(joined)
    parts = [2.0 ** (SHARPNESS * (bits - peak)) for bits in joined]
    return _Share(peak + math.log2(sum(parts)) / SHARPNESS, parts[rank] / sum(parts))


@dataclass(slots=True)
class _Waiting:
    """An output that a device has measured, or will have: its extremes, and its term where one was made."""

    site: str
    low: Tensor
    high: Tensor
    term: Tensor | None = None


def _amax(low: float, high: float) -> float:
    return math.nan if math.isnan(low) or math.isnan(high) else max(high, -low)


def _read_amax(waiting: list[_Waiting]) -> list[float]:
    """Read all extremes with one copy per device."""
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, entry in enumerate(waiting):
        places.setdefault((entry.low.device, entry.low.dtype), []).append(i)
    devices: dict[torch.device, tuple[list[int], list[Tensor]]] = {}
    for (device, _), members in places.items():
        indices, parts = devices.setdefault(device, ([], []))
        indices += members
        lows, highs = ([getattr(waiting[i], side) for i in members] for side in ("low", "high"))
        parts.append(torch.stack([torch.stack(lows), torch.stack(highs)]).float())
    found = [0.0] * len(waiting)
    for indices, parts in devices.values():
        for i, low, high in zip(indices, *torch.cat(parts, 1).tolist(), strict=True):
            found[i] = _amax(low, high)
    return found


class _Peak(torch.autograd.Function):
    """A scalar with a given derivative at a few elements of x, and none elsewhere; keeps nothing of x.

    index and slope: int64 and fp32 tensors [k], or on a CPU an int and a float.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, index: Tensor | int, slope: Tensor | float) -> Tensor:
        ctx.tensors = isinstance(index, Tensor)
        if ctx.tensors:
            ctx.save_for_backward(index, slope)
        else:
            ctx.index, ctx.slope = index, slope
        ctx.shape, ctx.dtype, ctx.device = x.shape, x.dtype, x.device
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        pulled = torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device)
        if ctx.tensors:
            index, slope = ctx.saved_tensors
            pulled.view(-1)[index] = (gradient * slope).to(ctx.dtype)
        else:
            pulled.view(-1)[ctx.index] = float(gradient) * ctx.slope
        return pulled, None, None, None


def _log2_largest(x: Tensor, amax: float) -> Tensor:
    """log2 of the largest |x| of a CPU tensor, which is ``amax``."""
    flat = x.detach().reshape(-1)
    start = 0
    # argmax reads 10 to 30 times slower than aminmax: halves are compared first.
    while len(flat) > _BISECT_TO:
        half = len(flat) // 2
        low, high = torch.aminmax(flat[:half])
        found = _amax(float(low), float(high)) == amax
        start, flat = (start, flat[:half]) if found else (start + half, flat[half:])
    index = int(flat.float().abs().argmax())
    size = min(amax, torch.finfo(x.dtype).max)
    slope = math.copysign(1 / (size * math.log(2)), float(flat[index]))
    value: Tensor = _Peak.apply(x, torch.tensor(math.log2(size)), start + index, slope)
    return value


_BISECT_TO = 8192


def _log2_peak(x: Tensor, *, smooth: bool) -> Tensor:
    """log2 of the largest |x|, or of the smooth maximum of the tokens' largest, [..., channels] to a scalar.

    Nothing is read back from the device.
    """
    channels = x.shape[-1] if smooth and x.dim() > 1 else x.numel()
    rows = x.detach().reshape(-1, channels)
    index = _where_largest(rows) + torch.arange(len(rows), device=x.device) * channels
    largest = rows.reshape(-1)[index].float()
    size = largest.abs().nan_to_num(nan=0.0).clamp(torch.finfo(torch.float32).tiny, torch.finfo(x.dtype).max)
    bits = size.log2()
    peak = bits.amax()
    shares = torch.exp2(SHARPNESS * (bits - peak))
    total = shares.sum()
    slope = shares / total * largest.sign().nan_to_num(nan=0.0) / (size * math.log(2))
    value: Tensor = _Peak.apply(x, peak + total.log2() / SHARPNESS, index, slope)
    return value


def _where_largest(rows: Tensor) -> Tensor:
    """Where the largest |x| of each row is; of a NaN if there is one: int64 [rows].

    Without their sign the bits of floats sort as integers do, NaNs last. Beside 16 of them there is room for the
    column; 32 are compared with the row's largest, and the column of what equals it is kept. A maximum then has the
    place, up to three times sooner than a search for it.
    """
    count, size = rows.shape
    if rows.dtype not in _BITS or size > 1 << 16:
        return rows.abs().max(-1).indices
    integer, positive = _BITS[rows.dtype]
    column = torch.arange(size, dtype=torch.int32, device=rows.device)
    # A processor's caches hold so much at a time.
    step = max(1, _AT_A_TIME // max(size, 1)) if rows.device.type == "cpu" else max(count, 1)
    found = []
    for part in rows.split(step):
        bits = part.contiguous().view(integer) & positive
        if integer == torch.int32:
            places = bits.eq_(bits.amax(-1, keepdim=True)).mul_(column)
        else:
            places = bits.int().mul_(1 << 16).add_(column)
        found.append(places.amax(-1).bitwise_and_(0xFFFF))
    return torch.cat(found).long()


_AT_A_TIME = 1 << 18


_BITS = {
    torch.float32: (torch.int32, 0x7FFFFFFF),
    torch.bfloat16: (torch.int16, 0x7FFF),
    torch.float16: (torch.int16, 0x7FFF),
}


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
