"""Audit a transformers model of an unknown family: where it overflows in fp16, and by how much.

Bounds, conversion, chosen ids and the walk over files need a family. Here each regime's model is loaded whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from ..families.known import architectures
from ..numerics import FP16_MAX
from ..progress import Advance, Progress
from . import probe
from .batch import CAUSAL, Batch
from .regime_results import RegimeResult, beside_fp32
from .regimes import DTYPES, audit_each, audit_model
from .sites import Site
from .stock import all_half, any_config, attentions_of, by_signature, from_files


@dataclass(frozen=True)
class AnyModel:
    """A checkpoint whose class belongs to no family. ``config``: the text model's config. ``attention``: the attention
    implementations to run."""

    folder: Path
    name: str
    config: Any
    attention: tuple[str, ...]
    generates: bool

    def load(self, dtype: torch.dtype, *, half: bool = False) -> Any:
        """Return the model in eval mode on the CPU. half: cast every weight to fp16. Raises UserError where stock code
        cannot load it or would initialise a missing tensor at random."""
        model, missing = from_files(self.folder, self.name, dtype, self.attention[0])
        if missing:
            raise UserError(
                f"{self.folder}: tensor {missing[0]} is missing, and {self.name} would fill it at random;"
                " complete the checkpoint, or name the class that it was saved from in config.json"
            )
        return all_half(model).eval() if half else model.eval()


def open_any(folder: Path, attention: Sequence[str], progress: Progress) -> AnyModel:
    """Return a checkpoint ready to audit, with those implementations in ``attention`` that its class has. Raises
    UserError for a class outside transformers, whose code is never run, for a model without token ids as input, and
    where no implementation is left."""
    import transformers

    config = any_config(folder)
    names = architectures({"architectures": config.architectures})
    if not names:
        raise UserError(f'{folder}/config.json names no class; add "architectures" with the name of one')
    stock = by_signature(names[0])
    if stock is None:
        raise UserError(
            f"{folder}/config.json: {names[0]} is no model of transformers {transformers.__version__}, and a"
            " checkpoint's own code is never run; install a version that has it"
        )
    kind: Any = getattr(transformers, names[0])
    if kind.main_input_name != "input_ids":
        raise UserError(f"{names[0]} takes {kind.main_input_name}, and the audit runs token ids; give a text model")
    text = config.get_text_config()
    if not isinstance(getattr(text, "vocab_size", None), int):
        raise UserError(f"{folder}/config.json: no vocab_size, and the audit runs token ids; give a text model")
    inputs = copy(text)
    inputs.architectures = names[:1]
    with torch.device("meta"):
        modules = kind._from_config(copy(config)).modules()
    setattr(inputs, CAUSAL, any(getattr(module, "is_causal", False) for module in modules))
    kept = attentions_of(names[0], attention, progress)
    # A decoder beside an encoder needs a start token.
    starts = [getattr(text, key, None) for key in ("decoder_start_token_id", "bos_token_id")]
    begins = not stock.decodes or any(start is not None for start in starts)
    return AnyModel(folder, names[0], inputs, kept, begins and stock.is_language_model)


def batches_of(model: AnyModel, data: str | None, seed: int) -> list[Batch]:
    """Return the batches of the probe and of the user's text. All compute logits; a generation is added if the class
    can generate. Raises UserError for unusable data."""
    inputs = probe.batches(model.config, None, None, seed=seed)
    if data is not None:
        inputs += probe.batches(model.config, model.folder, data, seed=seed)
    return [replace(batch, head=True) for batch in inputs if model.generates or not batch.generate]


def audit_any(
    model: AnyModel,
    inputs: Sequence[Batch],
    *,
    regimes: Sequence[str],
    train_mode: bool = False,
    device: torch.device | None = None,
    advance: Advance | None = None,
    seed: int = 0,
) -> dict[str, RegimeResult]:
    place = device or torch.device("cpu")

    def load(regime: str) -> Any:
        return model.load(DTYPES[regime], half=regime == "half").to(place)

    how: dict[str, Any] = {"attention": model.attention, "advance": advance, "seed": seed}
    results = audit_each(load, inputs, regimes, train_mode=train_mode, weights=lost_weights, **how)

    def in_fp32() -> dict[str, float]:
        loaded = model.load(torch.float32).to(place)
        run = audit_model(loaded, inputs, regime="fp32", attention=model.attention[:1], seed=seed)
        weights = {_site_of(name): float(p.detach().abs().max()) for name, p in loaded.named_parameters() if p.numel()}
        return weights | {site.name: site.amax for site in run.sites}

    return beside_fp32(results, in_fp32)


def lost_weights(model: Any) -> list[Site]:
    """Return a site for each weight with inf or NaN, which the probe may not look up."""
    counts = [(name, p.dtype, int((~p.detach().isfinite()).sum())) for name, p in model.named_parameters()]
    lost = [(_site_of(name), dtype, count) for name, dtype, count in counts if count]
    return [Site(name, dtype, FP16_MAX, amax=math.inf, calls=1, nonfinite=count) for name, dtype, count in lost]


def _site_of(parameter: str) -> str:
    path, _, name = parameter.rpartition(".")
    return f"{path}:{name}"
