"""Constrain the certified bounds during training, so that no input can overflow the trained model.

Rescaling cannot lower some sites (scores, gate rows, logits). Their bounds must stay under a ceiling, the lid, which
falls during training from the largest bound to fp16's limit. After each optimizer step, Newton steps along the bounds'
gradients bring every bound under the lid."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..bounds.certificate import bound
from ..bounds.differentiable import DifferentiableBounds
from ..bounds.findings import Certificate
from ..bounds.kinds import SiteKind
from ..families.layout import Layout
from ..families.resolve import effective
from ..families.wiring import Attention, outputs_of
from ..numerics import FP16_MAX
from ..results import BoundEntry

MARGIN_BITS = 0.125  # from the final lid to the limit: the bounds used here are a few percent off the certificate's
COMES_DOWN = 0.5  # share of the remaining steps in which the lid comes down
PASSES = 6  # Newton steps after one of the optimizer's at most; as a rule two are enough
SCALINGS = 3  # steps that follow where that was not enough: the weights as a whole are made smaller
TOLERANCE_BITS = 2.0**-8  # what may remain over the lid
ALL_EVERY = 8  # steps: in the others, and after projections, only bounds near the lid are measured
NEAR_BITS = 1.0  # below the lid as it will be when all are measured again
MOST_MOVED = 0.5  # share of its length by which one Newton step may change a row or a head of a weight at most


class BoundConstraint:
    """Keeps the certified bounds of ``model``, a transformers model in training, under a falling ceiling (the lid).

    Call ``begin`` once and ``hold`` after every optimizer step, in all processes. layout: the layout of the whole
    model, even if ``model`` is sharded. engine: whether DeepSpeed takes the optimizer's steps."""

    def __init__(self, layout: Layout, model: nn.Module, *, engine: bool = False) -> None:
        self.layout, self.target = layout, FP16_MAX * 2.0**-MARGIN_BITS
        self.first: int | None = None  # step of ``begin``
        self.start = 0.0  # largest excess at ``begin``, in bits
        self.lowest = math.inf  # last lid; it never rises, even where a resumed run has more steps
        self.weights = WholeWeights(model, engine=engine)
        self.bounds = DifferentiableBounds(layout, self.weights.read)
        self._owners, self._groups = self.bounds.owners(), groups_of(layout)
        self._stream = {
            site
            for stack in layout.stacks()
            for sublayer in stack.sublayers
            for site in (*outputs_of(sublayer), sublayer.add)
        }
        self.near: list[str] | None = None  # sites near the lid when all were measured
        self.headroom: float | None = None  # bits from the largest bound to fp16's limit

    def begin(self, step: int) -> None:
        self.bounds.stream = any(
            s.kind in (SiteKind.RESIDUAL, SiteKind.OUTPUT) and not s.holds for s in self.certificate().sites
        )
        self.first = step
        self.start = max(0.0, *(float(bits.max()) for bits in self.excess().values()))

    def lid(self, step: int, steps: int) -> float:
        """Return by how many bits a bound may exceed its target after ``step`` (counted from 1) of ``steps``."""
        assert self.first is not None
        down = max(1.0, COMES_DOWN * (steps - self.first))
        return self.start * max(0.0, 1 - (step - self.first) / down)

    def hold(self, step: int, steps: int) -> None:
        lid = self.lowest = min(self.lowest, self.lid(step, steps))
        if step % ALL_EVERY == 0 or step == steps:
            self.near = None
        for number in range(PASSES + SCALINGS + 1):
            excess = self.excess(again=number > 0, only=self.near)
            if self.near is None:
                most = {site: float(bits.max()) for site, bits in excess.items()}
                bar = min(lid, self.lid(step + ALL_EVERY, steps)) - NEAR_BITS
                self.near = [site for site, bits in most.items() if bits >= min(bar, max(most.values(), default=bar))]
            over = self._largest_of_each_group({site: (bits - lid).clamp(min=0) for site, bits in excess.items()})
            left = max((float(bits.max()) for bits in over.values()), default=0.0)
            if left <= TOLERANCE_BITS or number == PASSES + SCALINGS:
                break
            for site, bits in over.items():
                if float(bits.max()) > 0:
                    self.project(site, bits, scaled=number >= PASSES)
        if excess:
            self.headroom = MARGIN_BITS - max(float(bits.max()) for bits in excess.values())

    def excess(self, *, again: bool = False, only: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return log2(bound / target) of each site's bounds. only: the sites to measure, None for all."""
        # again: only `project` has changed weights since, so the last means of LayerNorms' inputs still serve.
        measured = self.weights.agreed(self.bounds.measure(again=again, only=only))
        return {site: (x / self.target).clamp(min=2.0**-40).log2() for site, x in measured.items()}

    def project(self, site: str, bits: Tensor, *, scaled: bool = False) -> None:
        """Lower a site's bounds in one Newton step on the weights. bits: by about how many bits to lower each bound.
        scaled: whether to lower the bounds only by making whole rows of weights smaller."""
        index = (bits > 0).nonzero()[:, 0]
        owners = [(name, view) for name, view in self._owners[site] if self.weights.is_trained(name)]
        if not owners:  # what is frozen stays, and the certificate will say so
            return
        wholes = self.weights.leaves(name for name, _ in owners)
        with torch.enable_grad():
            total = self.bounds.at({site: index})[site].log2().sum()
            gradients = torch.autograd.grad(total, wholes, allow_unused=True)
        moves, slope = [], torch.zeros_like(bits)
        for (name, view), whole, slopes in zip(owners, wholes, gradients, strict=True):
            if slopes is None:
                continue
            weight, gradient = view(whole.detach()), view(slopes.contiguous()).float()
            # Norms are of the weights that stock code computes with: a gain of 1 may be stored as 0.
            used = effective(self.layout.tensors[name], weight).float()
            # In units of each tensor's length this is the least change.
            way = gradient * used.square().sum(1, keepdim=True)
            # Rows that write the residual stream keep their direction, so that large terms still cancel in its sums.
            if scaled or site in self._stream:
                way = used * (1.0 if scaled else (gradient * used).sum(1, keepdim=True))
            slope = slope + (gradient * way).sum(1)
            moves.append((weight, norms(used), way))
        # Lowering a bound by n bits removes the share 1 − 2^−n of it.
        step = (1 - torch.exp2(-bits)) / math.log(2) / slope.clamp(min=1e-30)
        for weight, length, way in moves:
            most = MOST_MOVED * length / norms(way).clamp(min=1e-30)
            weight.sub_((torch.minimum(step, most)[:, None] * way).to(weight.dtype))
        self.weights.write()

    def _largest_of_each_group(self, excess: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``excess``, with 0 where another site of the same group has a larger value at the same index."""
        groups: dict[str, list[str]] = {}
        for site in excess:
            groups.setdefault(self._groups.get(site, site), []).append(site)
        kept = {}
        for sites in groups.values():
            most = torch.stack([excess[site] for site in sites]).amax(0)
            taken = torch.zeros_like(most, dtype=torch.bool)
            for site in sites:
                mine = (excess[site] == most) & ~taken  # the first of equal values
                taken |= mine
                kept[site] = torch.where(mine, excess[site], 0.0)
        return kept

    def over(self) -> list[BoundEntry]:
        return [site for site in self.certificate().sites if site.name in self._owners and not site.holds]

    def certificate(self) -> Certificate:
        tensors = self.layout.tensors
        return bound(self.layout, lambda name: effective(tensors[name], self.weights.read(name).detach().cpu().half()))

    def state_dict(self) -> dict[str, Any]:
        return {
            "first": self.first,
            "start": self.start,
            "lowest": self.lowest,
            "stream": self.bounds.stream,
            "near": self.near,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first, self.start, self.bounds.stream = state["first"], float(state["start"]), bool(state["stream"])
        self.lowest, self.near = float(state["lowest"]), state["near"]


def groups_of(layout: Layout) -> dict[str, str]:
    """Return each site's group, named by a module path. Groups are an attention's score sites, the sites on a stack's
    residual stream, and each linear of the head alone; ``model:add`` is with the head. Other sites have no entry."""
    head = layout.head
    groups = {} if head is None else {"model:add": head.at} | {linear.at: linear.at for linear in head.linears}
    for stack in layout.stacks():
        for part in stack.sublayers:
            groups |= dict.fromkeys((*outputs_of(part), part.add), stack.ends.at)
            if isinstance(part, Attention):
                groups |= dict.fromkeys((f"{part.at}:scores", part.joining, f"{part.at}:masked"), part.at)
    return groups


def norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)


class WholeWeights:
    """Gives the parameters and buffers of a transformers model by name, whole even if the model is sharded. All
    processes must ask for them in the same order."""

    def __init__(self, model: nn.Module, *, engine: bool = False) -> None:
        self.engine = engine
        self._named: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
        self._named |= dict(model.named_buffers(remove_duplicate=False))
        self.in_parts = engine or any(isinstance(x, DTensor) for x in self._named.values())
        self._leaves: dict[int, Tensor] = {}

    def is_trained(self, name: str) -> bool:
        return bool(self._named[name].requires_grad)

    def read(self, name: str) -> Tensor:
        weight = self._named[name]
        return self._leaves[id(weight)] if id(weight) in self._leaves else self._gathered(weight)

    def leaves(self, names: Iterable[str]) -> list[Tensor]:
        """Return weights as leaf tensors of autograd, gathered if they are sharded. Until ``write`` is called, ``read``
        returns these leaf tensors too."""
        leaves = []
        for name in names:
            weight = self._named[name]
            if id(weight) not in self._leaves:
                self._leaves[id(weight)] = self._gathered(weight).requires_grad_() if self.in_parts else weight
            leaves.append(self._leaves[id(weight)])
        return leaves

    def write(self) -> None:
        """Copy the tensors from ``leaves``, as the first process has them, into a sharded model; then forget them."""
        leaves, self._leaves = self._leaves, {}
        if self.in_parts:
            for weight in {id(x): x for x in self._named.values()}.values():
                if id(weight) in leaves:
                    self._put(weight, leaves[id(weight)].detach())

    def agreed(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not self.in_parts or not values:
            return dict(values)
        joined = torch.cat([x.flatten() for x in values.values()])
        torch.distributed.broadcast(joined, 0)
        parts = joined.split([x.numel() for x in values.values()])
        return {name: part.view(x.shape) for (name, x), part in zip(values.items(), parts, strict=True)}

    def _gathered(self, weight: Any) -> Tensor:
        if isinstance(weight, DTensor):
            part: Any = weight.detach()
            gathered: Tensor = part.full_tensor()
            return gathered
        if not self.in_parts:
            whole: Tensor = weight
            return whole
        if not hasattr(weight, "ds_id"):
            return weight.detach().clone()
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([weight]):
            return weight.detach().clone()

    def _put(self, weight: Any, value: Tensor) -> None:
        if isinstance(weight, DTensor):
            part = distribute_tensor(value, weight.device_mesh, weight.placements).to_local()
            local: Any = weight.detach()
            local.to_local().copy_(part)
            return
        from deepspeed import utils
        from deepspeed.runtime.zero import GatheredParameters

        if hasattr(weight, "ds_id"):
            with GatheredParameters([weight], modifier_rank=0):
                weight.data.copy_(value)
            # The optimizer's copy, which is the same memory unless it is offloaded.
            utils.safe_set_local_fp32_param(weight, weight.ds_tensor.detach())
        else:
            torch.distributed.broadcast(value, 0)
            weight.data.copy_(value)
            utils.safe_set_full_fp32_param(weight, value)
