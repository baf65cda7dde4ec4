"""Audit a transformers model that belongs to no known family: where it overflows in fp16, and by how much. There are no
bounds and no conversion, and the probe's token ids are not chosen by the weights."""

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
from ..progress import Progress
from . import probe
from .batch import Batch
from .regime_results import RegimeResult, beside_fp32
from .regimes import DTYPES, audit_each, audit_model
from .sites import Site
from .stock import all_half, any_config, attentions_of, by_signature, from_files


@dataclass(frozen=True)
class AnyModel:
    """A checkpoint whose class belongs to no known family. name: the class's name. config: the text model's config.
    attention: the attention implementations to run. generates: whether beam search is run too."""

    folder: Path
    name: str
    config: Any
    attention: tuple[str, ...]
    generates: bool

    @classmethod
    def open(cls, folder: Path, attention: Sequence[str], progress: Progress) -> AnyModel:
        """Open the folder of a checkpoint without loading weights. attention: the implementations to run; those that
        the class lacks are left out. Raises UserError if none is left, for a class outside transformers, and for a
        model that takes no token ids."""
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
        takes, text = getattr(transformers, names[0]).main_input_name, config.get_text_config()
        if takes != "input_ids" or not isinstance(getattr(text, "vocab_size", None), int):
            other = takes if takes != "input_ids" else "no vocab_size"
            raise UserError(f"{names[0]} takes {other}, and the audit runs token ids; give a text model")
        inputs = copy(text)
        inputs.architectures = names[:1]
        # A decoder beside an encoder needs a start token.
        starts = [getattr(text, key, None) for key in ("decoder_start_token_id", "bos_token_id")]
        begins = not stock.decodes or any(start is not None for start in starts)
        kept = attentions_of(names[0], attention, progress)
        return cls(folder, names[0], inputs, kept, begins and stock.is_language_model)

    def batches(self, data: str | None, seed: int) -> list[Batch]:
        """Return the batches of the probe and, with ``data``, of the user's text. All compute logits. The probe and the
        text each add one batch for beam search if the class can generate. Raises UserError for unusable data."""
        inputs = probe.batches(self.config, None, None, seed=seed)
        if data is not None:
            inputs += probe.batches(self.config, self.folder, data, seed=seed)
        return [replace(batch, head=True) for batch in inputs if self.generates or not batch.generate]

    def load(self, regime: str, device: torch.device) -> Any:
        """Return the model in the dtypes of a regime, such as ``half``, in eval mode. Raises UserError if stock code
        cannot load it or would initialise a missing tensor at random."""
        model, missing = from_files(self.folder, self.name, DTYPES[regime], self.attention[0])
        if missing:
            raise UserError(
                f"{self.folder}: tensor {missing[0]} is missing, and {self.name} would fill it at random; complete the"
                " checkpoint, or write the class of its weights in config.json"
            )
        return (all_half(model) if regime == "half" else model).eval().to(device)

    def audit(
        self, inputs: Sequence[Batch], *, regimes: Sequence[str], device: torch.device, seed: int, **how: Any
    ) -> dict[str, RegimeResult]:
        """Audit the model in each regime, and return results by regime. how: further arguments of ``audit_each``."""

        def load(regime: str) -> Any:
            return self.load(regime, device)

        def in_fp32() -> dict[str, float]:
            loaded = load("fp32")
            run = audit_model(loaded, inputs, regime="fp32", attention=self.attention[:1], seed=seed)
            weights = {
                _site_of(name): float(p.detach().abs().max()) for name, p in loaded.named_parameters() if p.numel()
            }
            return weights | {site.name: site.amax for site in run.sites}

        how |= {"attention": self.attention, "seed": seed, "weights": lost_weights}
        return beside_fp32(audit_each(load, inputs, regimes, **how), in_fp32)


def lost_weights(model: Any) -> list[Site]:
    """Return a site for each weight that has inf or NaN, even in a row of an embedding that the probe does not read."""
    counts = [(name, p.dtype, int((~p.detach().isfinite()).sum())) for name, p in model.named_parameters()]
    return [
        Site(_site_of(n), dtype, FP16_MAX, math.inf, calls=1, nonfinite=count) for n, dtype, count in counts if count
    ]


def _site_of(parameter: str) -> str:
    path, _, name = parameter.rpartition(".")
    return f"{path}:{name}"
