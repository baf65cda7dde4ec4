"""Tiny models as observers are shown them, and what they see."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bf16_to_fp16.measuring.batch import PADDED, Batch, run_batch
from bf16_to_fp16.measuring.observer import SiteObserver
from bf16_to_fp16.measuring.probe import batches
from bf16_to_fp16.measuring.sites import Site

from . import tiny


def model_of(kind: str, attention: str = "eager", seed: int = 0, **changes: Any) -> Any:
    """Return a random fp32 model in eval mode, as it is drawn."""
    torch.manual_seed(seed)
    model = tiny.KINDS[kind](**changes).eval()
    model.config.architectures = [type(model).__name__]
    model.set_attn_implementation(attention)
    return model


def padded(model: Any) -> Batch:
    return next(batch for batch in batches(model.config, None, None) if batch.kind == PADDED)


def sites_of(model: Any, batch: Batch, **options: Any) -> dict[str, Site]:
    with torch.no_grad(), SiteObserver(model, **options) as observer:
        run_batch(model, batch)
    return {site.name: site for site in observer.sites()}


def sites_in(module: nn.Module | Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Site]:
    made = module if isinstance(module, nn.Module) else nn.Module()
    if made is not module:
        made.forward = module
    with SiteObserver(made) as observer:
        made(x)
    return {site.name: site for site in observer.sites()}
