"""An adversary that moves what every norm reads freely: the strongest input that the bounds of a sublayer allow.

The certificate claims nothing about which vectors can reach a norm, so any may: here those that the weights behind it
like most. Stock modules compute everything else, in fp32 or in real fp16 arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bf16_to_fp16.certificate import stacks
from bf16_to_fp16.families.types import Attention, FeedForward, Layout
from bf16_to_fp16.observe import SiteObserver

DECODER, ENCODER = 7, 9
"""Positions of the two sides."""


def readers(layout: Layout) -> Iterator[tuple[str, Attention | FeedForward | None, bool]]:
    """Yield every norm with the sublayer behind it (None: a stack's final norm), and whether it is an encoder's."""
    for i, (ends, sublayers) in enumerate(stacks(layout)):
        for wiring in sublayers:
            yield wiring.norm, wiring, i == 0
        yield ends.norm, None, i == 0


def liked(state: Mapping[str, Tensor], wiring: Any, gain: Tensor, memory: list[Attention]) -> Tensor:
    """Return directions of a norm's input that the weights behind it answer to most: [n, d], fp32."""

    def rows(path: str) -> Tensor:
        return state[f"{path}.weight"] * gain

    found = [torch.randn(8, gain.numel()), torch.eye(gain.numel())]
    if isinstance(wiring, FeedForward):
        out = state[f"{wiring.output}.weight"]
        linear = rows(wiring.linear)
        found.append(linear)
        tallest = out.norm(dim=1).argsort(descending=True)[:3]
        if wiring.gate:
            gate = rows(wiring.gate)
            u, w = (torch.nn.functional.normalize(x, dim=1) for x in (gate, linear))
            found += [gate, u + w, u - w]
            size = gate.norm(dim=1) * linear.norm(dim=1)
            for sign in (1, -1):
                for r in tallest:
                    z = u + sign * out[r].sign()[:, None] * w
                    found.append(top(z * (out[r].abs() * size).sqrt()[:, None]))
        else:
            found += [
                linear.clamp(min=0).sum(0, keepdim=True),
                out[tallest] @ linear,
                out[tallest].clamp(min=0) @ linear,
            ]
    if isinstance(wiring, Attention):
        paths = [wiring.query] if wiring.memory else [wiring.query, wiring.key, wiring.value]
        found += [rows(p) for p in paths]
        if not wiring.memory:
            found.append(state[f"{wiring.output}.weight"] @ rows(wiring.value))
    for cross in memory:
        found += [rows(cross.key), rows(cross.value), state[f"{cross.output}.weight"] @ rows(cross.value)]
    return torch.cat([f for f in found if f.numel()])


def top(matrix: Tensor) -> Tensor:
    """Return the leading right singular vector as a row."""
    return torch.linalg.svd(matrix, full_matrices=False).Vh[:1]


@contextmanager
def free_norms(model: Any, layout: Layout, inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """Let every norm read ``inputs`` instead of the residual stream."""

    def replace(path: str) -> Any:
        return lambda module, args: (inputs[path].to(next(module.parameters()).dtype),)

    handles = [model.get_submodule(path).register_forward_pre_hook(replace(path)) for path in inputs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def adverse_inputs(model: Any, layout: Layout, batch: int, seed: int, size: float = 300.0) -> dict[str, Tensor]:
    """Return for every norm what it shall read: fp32 [batch, positions, d], directions that the weights like."""
    generator = torch.Generator().manual_seed(seed)
    state = model.state_dict()
    cross = [w for w in layout.wiring if isinstance(w, Attention) and w.memory]
    inputs = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for path, wiring, encoder in readers(layout):
            last = wiring is None and encoder
            gain = state[f"{path}.weight"].float()
            choices = liked(state, wiring, gain, cross if last else [])
            if wiring is None and not encoder:
                head = state.get("lm_head.weight")
                choices = torch.cat([choices, (head if head is not None else state["shared.weight"]) * gain])
            length = ENCODER if encoder else DECODER
            chosen = choices[torch.randint(len(choices), (batch, length), generator=generator)].clone()
            chosen *= torch.randint(0, 2, (batch, length, 1), generator=generator) * 2 - 1
            inputs[path] = size * torch.nn.functional.normalize(chosen, dim=-1)
    return inputs


def observe(model: Any, layout: Layout, inputs: Mapping[str, Tensor], *, attention: str = "eager") -> dict[str, float]:
    """Return the largest |x| at every site of a model whose norms read ``inputs``."""
    batch = next(iter(inputs.values())).shape[0]
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.vocab_size
    ids = torch.randint(vocabulary, (batch, ENCODER), generator=generator)
    model.set_attn_implementation(attention)
    observer = SiteObserver(model)
    with torch.no_grad(), free_norms(model, layout, inputs), observer:
        if layout.encoder_only:
            model(input_ids=ids)
        else:
            decoder = torch.randint(vocabulary, (batch, DECODER), generator=generator)
            model(input_ids=ids, decoder_input_ids=decoder, use_cache=False)
    return {site.name: site.amax for site in observer.sites() if "constant" not in site.name}
