"""What every family promises of signals whose exponents have a price: they move what they say and nothing else.

Activations are replaced by ReLU, a classifier's tanh by the sign, attention weights by equal ones, a router's by one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.contract import layout_of, outputs
from torch import Tensor

from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.families.signals import LOGITS, Kind, carried_by
from bf16_to_fp16.families.wiring import Attention, Experts
from bf16_to_fp16.measuring.attack import watched
from bf16_to_fp16.rescaling.apply import apply
from bf16_to_fp16.rescaling.plan import OfChannels, Plan, inverse

Values = dict[str, Tensor]
Check = Callable[[Any, Layout, Values], None]


def exponents(size: int, generator: torch.Generator) -> list[int]:
    drawn = torch.randint(1, 4, (size,), generator=generator) * (torch.randint(2, (size,), generator=generator) * 2 - 1)
    found: list[int] = drawn.tolist()
    return found


def asymptotic_plan(layout: Layout, seed: int = 0) -> Plan:
    """Return a plan that moves every channel of what an activation, a softmax of scores or a tanh reads."""
    generator, made = torch.Generator().manual_seed(seed), dict[str, OfChannels]()
    heads = {f"{w.at}.scores": 1 if w.query_norm else layout.heads(w) for w in attentions(layout)}
    heads |= {f"{w.classifier}.routing": 1 for w in layout.topology if isinstance(w, Experts)}  # whose order must stay
    for name, signal in layout.signals.items():
        if signal.kind is Kind.ASYMPTOTIC:
            count = heads.get(name, signal.size)
            made[name] = [e for e in exponents(count, generator) for _ in range(signal.size // count)]
    return Plan(family=layout.family.name, exponents=made)


def attentions(layout: Layout) -> list[Attention]:
    return [w for w in layout.topology if isinstance(w, Attention)]


def moved_sites(layout: Layout, plan: Plan) -> Values:
    """Return by site what a plan of asymptotic signals must add to the exponents of its values."""

    def of(name: str, before: int = 0, after: int = 0) -> Tensor:
        return torch.nn.functional.pad(torch.tensor(plan.exponents[name]), (before, after))

    found: Values = {}
    for w in layout.feed_forwards:
        if w.gate:
            found |= {w.gate: of(f"{w.at}.gate", 0, w.fused[1] if w.fused else 0), f"{w.at}:mul": of(f"{w.at}.gate")}
        elif f"{w.at}.neuron" in plan.exponents:
            found[w.linear] = of(f"{w.at}.neuron")
    for a in attentions(layout):
        name = f"{a.at}.scores"
        per_head = of(name)[:1] if a.query_norm else of(name)[:: layout.head_size(a)]
        found[f"{a.at}:scores"] = per_head.view(-1, 1, 1)
        if a.query_norm:
            found[f"{a.query_norm}:{layout.family.norm_site}"] = of(name)
        else:
            found[a.query] = of(name, 0, sum(a.fused[1:]))
    found |= {w.classifier: of(f"{w.classifier}.routing") for w in layout.topology if isinstance(w, Experts)}
    for linear in layout.head.linears if layout.head is not None else ():
        if linear.tanh:
            found[linear.at] = of(f"{linear.at}.tanh")
    return found


@contextmanager
def homogeneous(model: Any, layout: Layout) -> Iterator[None]:
    """Let nothing that a priced signal enters change its shape: ReLU, the sign, and weights that no score moves."""

    def equal(x: Tensor, *given: Any, **options: Any) -> Tensor:
        if x.dim() > 3:
            return torch.full_like(x, 1 / x.shape[-1])
        # A router's has three dimensions.
        return torch.nn.functional.one_hot(x.argmax(-1), x.shape[-1]).to(x)

    with pytest.MonkeyPatch.context() as patch:
        for w in layout.feed_forwards:
            parent, _, name = w.act.rpartition(".")
            patch.setitem(model.get_submodule(parent)._modules, name, torch.nn.ReLU())
        patch.setattr(torch.nn.functional, "softmax", equal)
        patch.setattr(torch.Tensor, "sigmoid", lambda x: (x > 0).to(x))
        if layout.head is not None and any(linear.tanh for linear in layout.head.linears):
            patch.setattr(torch, "tanh", torch.sign)
        yield


def values_at_sites(model: Any, layout: Layout) -> Values:
    """Return what flows at every site and what comes out, under ``homogeneous``."""
    with homogeneous(model, layout), watched(model, layout) as values:
        given = outputs(model, gradients=True)  # else local attention is not seen
    return {**values, **{f"output {i}": x for i, x in enumerate(given)}}


def check_asymptotic(model: Any, layout: Layout, before: Values) -> None:
    """Exponents of all asymptotic signals multiply what they say and nothing else, to the bit."""
    plan = asymptotic_plan(layout)
    moved = moved_sites(layout_of(model), plan)
    apply(model, layout, plan)
    after = values_at_sites(model, layout)
    apply(model, layout, inverse(plan))
    assert moved.keys() <= before.keys() == after.keys()
    for name, value in before.items():
        wanted = value if name not in moved else torch.ldexp(value, moved[name])
        assert torch.equal(after[name], wanted), name


def logits_of(model: Any, layout: Layout) -> Values:
    """Return a model's outputs by name, of a soft-capped head what it reads."""
    assert layout.head is not None
    found: Values = {}
    hook = lambda _, inputs, output: found.update(capped=output.clone())  # noqa: E731
    handle = model.get_submodule(layout.head.linears[-1].at).register_forward_hook(hook)
    given = outputs(model)
    handle.remove()
    return found if layout.cap(layout.head) is not None else dict(zip(layout.stock.gives, given, strict=False))


def check_logits(model: Any, layout: Layout, before: Values) -> None:
    """Exponents of logits, one or one for each choice, multiply these to the bit; before: what ``logits_of`` gave."""
    size = layout.signals[LOGITS].size
    each = [3] if layout.tied else exponents(size, torch.Generator().manual_seed(1))
    plan = Plan(family=layout.family.name, exponents={LOGITS: each[0] if layout.tied else each})
    apply(model, layout, plan)
    after = logits_of(model, layout)
    apply(model, layout, inverse(plan))
    for number, (name, value) in enumerate(before.items()):
        # A position's score of being the beginning is one choice, that of being the end another.
        own = each[number : number + 1] if len(before) > 1 else each
        assert torch.equal(after[name], torch.ldexp(value, torch.tensor(own))), name


def left_out(layout: Layout, kind: Kind) -> Iterator[tuple[str, Layout]]:
    """Yield a layout without each axis that carries a signal of a kind, once for all layers, with what is left out."""
    seen = set()
    for name, tensor in layout.tensors.items():
        for position, axis in enumerate(tensor.axes):
            for each in carried_by(axis):
                place = ".".join("#" if part.isdigit() else part for part in name.split(".")), position, each.sign
                if layout.signals[each.signal].kind is kind and place not in seen:
                    seen.add(place)
                    kept = [other for other in carried_by(axis) if other != each]
                    rest = kept[0].with_others(*kept[1:]) if kept else None
                    axes = tuple(rest if p == position else a for p, a in enumerate(tensor.axes))
                    tensors = {**layout.tensors, name: replace(tensor, axes=axes)}
                    yield f"{name} {position} {each.signal}", replace(layout, tensors=tensors)
