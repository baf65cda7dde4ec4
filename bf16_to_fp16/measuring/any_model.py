"""Audit a model of a transformers class without a family: where its fp16 breaks, and by how much. Bounds, conversion,
chosen ids and the walk over files need a family; here each regime's model is loaded whole."""

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
from ..families.places import places_by_name
from ..numerics import FP16_MAX
from ..progress import Advance, Progress
from ..results import SiteEntry
from . import probe
from .batch import Batch
from .padding import CAUSAL
from .regimes import DTYPES, RegimeResult, audit_each, audit_model, beside_fp32, check_names, finite
from .stock import all_half, any_config, attentions_of, described, from_files


@dataclass(frozen=True)
class AnyModel:
    """A checkpoint whose class belongs to no family. ``config``: the text config, which makes the inputs.
    ``attention``: the implementations to run."""

    folder: Path
    name: str
    config: Any
    attention: tuple[str, ...]
    generates: bool

    def load(self, dtype: torch.dtype, *, half: bool = False) -> Any:
        """Return the model in eval mode on the CPU; half: every weight in fp16. Raises UserError where stock code
        cannot load it or would draw a missing tensor at random."""
        model, missing = from_files(self.folder, self.name, dtype, self.attention[0])
        if missing:
            raise UserError(
                f"{self.folder}: tensor {missing[0]} is missing, and {self.name} would fill it at random;"
                " complete the checkpoint, or name the class that it was saved from in config.json"
            )
        return all_half(model).eval() if half else model.eval()


def open_any(folder: Path, attention: Sequence[str], progress: Progress) -> AnyModel:
    """Return a checkpoint ready to audit, without attentions that its class lacks. Raises UserError for a class outside
    transformers (its code is never run), for a model that takes no token ids, and where no attention is left."""
    import transformers

    config = any_config(folder)
    names = architectures({"architectures": config.architectures})
    if not names:
        raise UserError(f'{folder}/config.json names no class; add "architectures" with the name of one')
    stock = described(names[0])
    if stock is None:
        raise UserError(
            f"{folder}/config.json: {names[0]} is no model of transformers {transformers.__version__}, and code of a"
            " checkpoint is not run; install the version that has it"
        )
    kind: Any = getattr(transformers, names[0])
    if kind.main_input_name != "input_ids":
        raise UserError(f"{names[0]} takes {kind.main_input_name}, and the audit runs token ids; give a model of text")
    text = config.get_text_config()
    if not isinstance(getattr(text, "vocab_size", None), int):
        raise UserError(f"{folder}/config.json: no vocab_size, and the audit runs token ids; give a model of text")
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


def batches_of(model: AnyModel, data: str | None, seed: int, *, sweep: bool = False) -> list[Batch]:
    """Return the batches of the probe and of the user's text, all with logits, and generations where the class can.
    Raises UserError for unusable data."""
    made = probe.batches(model.config, None, None, seed=seed, sweep=sweep)
    if data is not None:
        made += probe.batches(model.config, model.folder, data, seed=seed)
    return [replace(batch, head=True) for batch in made if model.generates or not batch.generate]


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
    check_names(regimes, model.attention)
    place = device or torch.device("cpu")
    lost: dict[str, list[SiteEntry]] = {}

    def load(regime: str) -> Any:
        loaded = model.load(DTYPES[regime], half=regime == "half").to(place)
        lost[regime] = lost_weights(loaded)
        return loaded

    shown = audit_each(
        load, inputs, regimes, attention=model.attention, train_mode=train_mode, advance=advance, seed=seed
    )
    results = {regime: with_lost_weights(result, lost[regime]) for regime, result in shown.items()}

    def in_fp32() -> dict[str, float]:
        loaded = model.load(torch.float32).to(place)
        found = audit_model(loaded, inputs, regime="fp32", attention=model.attention[:1], seed=seed)
        weights = {_site_of(name): float(p.detach().abs().max()) for name, p in loaded.named_parameters() if p.numel()}
        return weights | {site.name: site.amax for site in found.sites}

    return beside_fp32(results, frozenset(), in_fp32)


def lost_weights(model: Any) -> list[SiteEntry]:
    counts = {name: int((~p.detach().isfinite()).sum()) for name, p in model.named_parameters()}
    lost = {_site_of(name): (model.get_parameter(name).dtype, count) for name, count in counts.items() if count}
    places = places_by_name(lost)
    return [
        SiteEntry(
            name=name,
            dtype=str(dtype).removeprefix("torch."),
            limit=FP16_MAX,
            benign=None,
            nonfinite=count,
            saturated=0,
            **finite(math.inf, -math.inf, FP16_MAX),
            **places[name].to_json(),
        )
        for name, (dtype, count) in lost.items()
    ]


def with_lost_weights(result: RegimeResult, weights: Sequence[SiteEntry]) -> RegimeResult:
    """Return the result with non-finite weights as its first sites; the probe runs few rows of a large embedding."""
    seen = {site.name for site in result.sites}
    lost = [site for site in weights if site.name not in seen]
    if not lost:
        return result
    first = {key: getattr(lost[0], key) for key in ("amax", "headroom_bits")}
    nonfinite = result.nonfinite + sum(site.nonfinite for site in lost)
    return result.model_copy(update=first | {"sites": [*lost, *result.sites], "nonfinite": nonfinite})


def _site_of(parameter: str) -> str:
    path, _, name = parameter.rpartition(".")
    return f"{path}:{name}"
