"""Runtimes that compute in fp16 throughout, emulated: norms that square in fp16, and sums made one term after another.

What stands in for an operation works on the memory of its result, so that an observer sees the operation and no other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from support.contract import layout_of
from torch import Tensor

from bf16_to_fp16.families.resolve import eps_attribute
from bf16_to_fp16.measuring import observer
from bf16_to_fp16.measuring.meter import is_norm


def one_by_one(terms: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, float]:
    """Return the sum of fp16 ``terms`` over the last axis in any order, each addition rounded, and the largest partial
    sum."""
    total, most = np.zeros(terms.shape[:-1], np.float16), 0.0
    for i in generator.permutation(terms.shape[-1]):
        total = total + terms[..., i]
        most = max(most, float(np.abs(total).max(initial=0)))
    return total, most


@contextmanager
def fp16_runtime(model: Any, *, sums: bool) -> Iterator[list[float]]:
    """Let a model's RMS norms compute in fp16, and with ``sums`` its products and softmax as well; yield the largest
    partial sum of each product."""
    tensors = layout_of(model).tensors
    generator, partials, softmax = np.random.default_rng(0), [], torch.nn.functional.softmax

    def product(func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
        made = func(*(a.float() if isinstance(a, Tensor) else a for a in args), **(kwargs or {})).half()
        a, b = (x.numpy() for x in args[-2:])
        total, most = one_by_one(a[..., :, None, :] * np.swapaxes(b, -1, -2)[..., None, :, :], generator)
        made.numpy()[...] = total if len(args) == 2 else total + args[0].numpy()
        partials.append(most)
        return made

    def weights(x: Tensor, **options: Any) -> Tensor:
        made = softmax(x, **options)
        powers = np.exp(x.numpy() - x.numpy().max(-1, keepdims=True))
        made.numpy()[...] = powers / one_by_one(powers, generator)[0][..., None]
        return made

    def norm(path: str, module: Any) -> Any:
        stock, eps = type(module).forward, np.float16(getattr(module, eps_attribute(module)))
        gain = module.weight.detach().numpy() + np.float16(tensors[f"{path}.weight"].offset)

        def forward(x: Tensor) -> Tensor:
            made, seen = stock(module, x), x.numpy()
            mean = one_by_one(seen * seen, generator)[0] / np.float16(seen.shape[-1])
            root = np.float16(1) / np.sqrt(mean + eps)
            made.numpy()[...] = seen * root[..., None] * gain
            return made

        return forward

    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        for path, module in model.named_modules():
            if is_norm(module):
                patch.setattr(module, "forward", norm(path, module), raising=False)
        if sums:
            patch.setattr(observer, "product_in_fp32", product)
            patch.setattr(torch.nn.functional, "softmax", weights)
        yield partials
