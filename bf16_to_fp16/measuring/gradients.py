"""Measure gradients under fp16 AMP: the largest loss scale that they allow, and the share that becomes 0 at this scale.

A dynamic scaler settles where the largest scaled gradient just fits, and scaled gradients under 2⁻²⁵ become 0. If a
plan multiplies values by 2^r, their gradients are multiplied by 2^-r. So a stream that is scaled down more than needed
lowers the loss scale, and other sites lose their smallest gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..results import GradientsEntry, GradientSiteEntry
from .batch import IGNORED_LABEL, Batch, run_batch, values_of
from .observer import SiteObserver
from .sites import Site
from .stock import config_of, predicts_tokens

FIRST_EXPONENT = 16
"""log2 of the loss scale at which torch's dynamic scaler begins; it doubles after 2,000 steps without an overflow."""

LAST_EXPONENT = -10  # log2 of the smallest loss scale that is tried; under it most gradients become 0

SHOWN = 20  # sites that a report lists


def output_and_loss(model: Any, batch: Batch) -> tuple[Any, Tensor | None]:
    """Run a model on a batch and return its output and loss, or (None, None) without an output. If stock code computes
    no loss from labels, the loss is the output's mean square. Tokens whose embedding is 0 are replaced."""
    rows = model.get_input_embeddings().weight.detach()
    zeros = [token for token in batch.input_ids.unique().tolist() if not bool(rows[token].any())]
    if zeros:
        # Such as an untrained padding token, which training masks: a norm of zeros multiplies gradients by 1/√eps.
        other = next((token for token in range(len(rows)) if bool(rows[token].any())), 0)
        replaced = torch.isin(batch.input_ids, torch.tensor(zeros))
        batch = replace(batch, input_ids=batch.input_ids.masked_fill(replaced, other))
    labelled = batch.head and predicts_tokens(config_of(model))
    # A causal model predicts nothing in rows of one token.
    labelled = labelled and bool((batch.labels() != IGNORED_LABEL).any())
    output = run_batch(model, batch, labels=labelled)
    if output is None:
        return None, None
    return output, output.loss if labelled else values_of(output).float().square().mean()


def measure_gradients(model: nn.Module, batches: Sequence[Batch], *, seed: int = 0) -> GradientsEntry:
    inputs = [batch for batch in batches if not batch.generate]
    fits, fails, sites, broken = LAST_EXPONENT - 1, FIRST_EXPONENT + 1, dict[str, Site](), dict[str, Site]()
    tried = FIRST_EXPONENT
    while fails - fits > 1:
        norms = _backward(model, inputs, 2.0**tried, autocast=True, seed=seed)
        if norms and all(math.isfinite(site.amax) for site in norms.values()):
            fits, sites = tried, norms
        else:
            fails, broken = tried if norms else LAST_EXPONENT, norms  # where the loss is not finite no scale helps
        tried = (fits + fails) // 2
    if not sites:
        past = [name for name, site in broken.items() if not math.isfinite(site.amax)]
        # ``past`` is in the order of the backward pass.
        first = GradientSiteEntry(name=past[0], amax=math.inf, flushed=0.0) if past else None
        return GradientsEntry(loss_scale=None, flushed=0.0, largest=first, sites=[])
    exact = _backward(model, inputs, 1.0, autocast=False, seed=seed)
    lost = {n: max(0.0, _share_of_zeros(site) - _share_of_zeros(exact.get(n))) for n, site in sites.items()}
    every = [GradientSiteEntry(name=name, amax=site.amax, flushed=lost[name]) for name, site in sites.items()]
    elements = sum(site.elements for site in sites.values())
    return GradientsEntry(
        loss_scale=2.0**fits,
        flushed=sum(lost[name] * site.elements for name, site in sites.items()) / elements,
        largest=max(every, key=lambda site: site.amax),
        sites=sorted((site for site in every if site.flushed), key=lambda site: -site.flushed)[:SHOWN],
    )


def _share_of_zeros(site: Site | None) -> float:
    return site.zeros / site.elements if site is not None else 0.0


def _backward(
    model: nn.Module, batches: Sequence[Batch], scale: float, *, autocast: bool, seed: int
) -> dict[str, Site]:
    observer, place = SiteObserver(model), next(model.parameters()).device
    with observer, torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        torch.manual_seed(seed)
        for batch in batches:
            with torch.autocast(place.type, torch.float16, enabled=autocast):
                _, loss = output_and_loss(model, batch)
            if loss is None:
                continue
            if not bool(loss.isfinite()):
                return {}
            (loss * scale).backward()
            model.zero_grad(set_to_none=True)
    dtype = torch.float16 if autocast else torch.float32
    return {site.name: site for site in observer.sites() if site.elements and site.dtype == dtype}
