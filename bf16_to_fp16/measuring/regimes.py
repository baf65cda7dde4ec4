"""Run a checkpoint in each regime, a way in which people use fp16, and measure every operation.

``stock`` loads the model with ``dtype=float16``, where T5's ``wo`` and the residual stay in fp32. ``half`` has every
weight in fp16. ``amp`` runs fp32 weights under fp16 autocast. A regime is safe iff no operation's output is non-finite
or saturated, except where the model's code intends it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.contents import listed_modules
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..errors import UserError
from ..families.known import stock_class
from ..progress import Advance
from .batch import SHORT, Batch, run_batch, values_of, without_blind_padding
from .fidelity import EveryOutput, Outputs, add_outputs, compared, output_on
from .gradients import LAST_EXPONENT, measure_gradients, output_and_loss
from .lanes import Walk, results_of
from .meter import NormMeters, metering_norms, norms_seen
from .observer import SiteObserver
from .regime_results import RegimeResult, Run, beside_fp32, regime_result
from .sentence_vectors import SentenceVectors, runs_behind
from .sites import Site, sites_of_all
from .stock import attentions_of, load, set_attention

REGIMES = ("stock", "amp", "half")

DTYPES = {"stock": torch.float16, "amp": torch.float32, "half": torch.float16, "fp32": torch.float32}
"""The dtype in which stock code loads a regime's weights; ``half`` then casts those that stay in fp32."""

ATTENTIONS = ("eager", "sdpa")  # SDPA hides the scores

LOSS_SCALE = 2.0**10
"""Largest loss scale of the training audit. A cross-entropy of ln(250,000) times it still fits fp16 (12,700), so the
scale itself never breaks pure fp16. If gradients under AMP need a lower one, as by a dynamic scaler, that is used."""


def audit_folder(
    folder: Path,
    *,
    inputs: Sequence[Batch],
    regimes: Sequence[str] = REGIMES,
    train_mode: bool = False,
    device: torch.device | None = None,
    advance: Advance | None = None,
    attention: Sequence[str] = ATTENTIONS,
    seed: int = 0,
) -> dict[str, RegimeResult]:
    """Audit the checkpoint in ``folder`` in each regime, and return the results by regime.

    The regime ``half`` runs all inputs with the first attention implementation. Other regimes and implementations run
    only some inputs, and more if ``half`` overflows. If ``half`` is not asked for, every regime runs all inputs with
    the first implementation. train_mode: load the whole model at once, run a backward too, and give every run all
    inputs. attention: the implementations to run; those that the model's class lacks are skipped. Raises UserError for
    an unusable folder."""
    place, checkpoint = device or torch.device("cpu"), open_checkpoint(folder)
    chosen = [regime for regime in REGIMES if regime in regimes]
    if not train_mode:
        return run_regimes(checkpoint, inputs, chosen, attention, device=place, advance=advance).regimes
    results = audit_each(
        lambda regime: load(folder, DTYPES[regime], half=regime == "half").to(place),
        inputs,
        chosen,
        attention=attentions_of(stock_class(checkpoint.config), attention),
        train_mode=train_mode,
        advance=advance,
        seed=seed,
    )
    return _beside_fp32(checkpoint, inputs, results, place)


def audit_each(
    load: Callable[[str], nn.Module],
    inputs: Sequence[Batch],
    regimes: Sequence[str],
    *,
    attention: Sequence[str],
    train_mode: bool = False,
    advance: Advance | None = None,
    seed: int = 0,
    weights: Callable[[nn.Module], Iterable[Site]] = lambda model: (),
) -> dict[str, RegimeResult]:
    """Audit a model in each regime on all inputs, and return the results by regime. load: returns the model of a
    regime. train_mode: run a backward too. weights: returns a site for each non-finite weight of a model."""
    share = sum(len(without_blind_padding(inputs, name)) for name in attention)
    results: dict[str, RegimeResult] = {}
    scale, fits, first = LOSS_SCALE, train_mode, "amp" if train_mode else None
    for i, regime in enumerate(sorted(regimes, key=lambda each: each != first)):

        def step(done: int, _: int, before: int = i * share) -> None:
            if advance is not None:
                advance(before + done, len(regimes) * share)

        model, gradients = load(regime), None
        if regime == first:
            set_attention(model, attention[0])
            gradients = measure_gradients(model.train(), without_blind_padding(inputs, attention[0]), seed=seed)
            scale, fits = min(scale, gradients.loss_scale or scale), gradients.loss_scale is not None
        options: dict[str, Any] = {"regime": regime, "attention": attention, "advance": step, "seed": seed}
        options["known"] = weights(model)
        shown, least = audit_model(model, inputs, loss_scale=scale if train_mode else None, **options), scale
        # An fp16 stream may need a lower scale than autocast; search for it only if autocast has one.
        while fits and least > 2.0**LAST_EXPONENT and _breaks_backwards_alone(shown):
            least = max(least / 16, 2.0**LAST_EXPONENT)
            shown = audit_model(model, inputs, loss_scale=least, **options)
        results[regime] = shown if gradients is None else shown.model_copy(update={"gradients": gradients})
    return {regime: results[regime] for regime in regimes}


def _breaks_backwards_alone(result: RegimeResult) -> bool:
    return result.broken and all(":grad" in site.name for site in result.sites if site.broken)


@dataclass(frozen=True)
class Audited:
    """An audit's results by regime. half: the outputs of the regime ``half`` under the first attention implementation.
    fp32: outputs in fp32, if requested. every: all that stock code returned in fp32 on the smallest batches."""

    regimes: dict[str, RegimeResult]
    half: Outputs
    fp32: Outputs
    every: Sequence[EveryOutput] = ()


def run_regimes(
    checkpoint: Checkpoint,
    inputs: Sequence[Batch],
    regimes: Sequence[str] = REGIMES,
    attention: Sequence[str] = ATTENTIONS,
    *,
    device: torch.device | str = "cpu",
    fp32: Sequence[Batch] = (),
    advance: Advance | None = None,
) -> Audited:
    """Run a checkpoint in ``regimes``, in one pass over its files if nothing overflows. The results are those of
    ``audit_folder`` with ``train_mode=False``. fp32: inputs whose outputs are returned in fp32 too."""
    walk, attention = Walk(checkpoint, device), attentions_of(stock_class(checkpoint.config), attention)
    pooled = bool(listed_modules(checkpoint.folder))
    encoder = checkpoint.folder if runs_behind(checkpoint.folder) else None
    first = ("half", attention[0])
    seen = {
        pair: _Runs(*pair, meters=pair == first, keeps=pair == first, encoder=encoder)
        for pair in product(regimes, attention)
    }
    given = {name: without_blind_padding(inputs, name) for name in attention}
    for (regime, name), shown in seen.items():
        shown.add(walk, _inputs_of(given[name], regime == "half" or "half" not in regimes, name == attention[0]))
    every: list[EveryOutput] = []
    plain = add_outputs(walk, fp32, torch.float32, every)
    walk.run(advance)
    halves = [sites for name in attention if "half" in regimes for sites in seen["half", name].done.sites]
    if any(site.nonfinite or site.saturated for sites in halves for site in sites):
        # Other runs get fewer inputs only because half shows that they fit.
        rest = Walk(checkpoint, device)
        for (_, name), shown in seen.items():
            ran_on = {id(batch) for batch in shown.inputs}
            shown.add(rest, [b for b in _inputs_of(given[name], True, name == attention[0]) if id(b) not in ran_on])
        rest.run(advance)
    results: dict[str, RegimeResult] = {}
    for regime in regimes:
        shares = [seen[regime, name] for name in attention]
        result = regime_result([shown.done for shown in shares], norms_seen(shares[0].norms))
        results[regime] = result.model_copy(update={"vectors": pooled})
    half = seen[first].outputs if "half" in regimes else []
    return Audited(_beside_fp32(checkpoint, inputs, results, device), half, results_of(plain), every)


def _weights(regime: str) -> tuple[torch.dtype, bool]:
    return DTYPES[regime], regime == "half"


def check_names(regimes: Sequence[str], attention: Sequence[str]) -> None:
    for what, names, known in (("regime", regimes, REGIMES), ("attention", attention or ["none"], ATTENTIONS)):
        for name in names:
            if name not in known:
                raise UserError(f"{name}: no such {what}; choose from {', '.join(known)}")


def _inputs_of(inputs: Sequence[Batch], thorough: bool, first: bool) -> Sequence[Batch]:
    """Return the batches that a regime runs under one attention implementation. thorough: whether the regime needs many
    batches, as ``half`` does. first: whether this is the first implementation, which runs more batches."""

    def is_special(batch: Batch) -> bool:  # a generation, or padded rows of kinds other than ``SHORT``
        return batch.generate or (batch.kind != SHORT and not bool(batch.attention_mask.all()))

    if first:
        return inputs if thorough else [*inputs[:1], *filter(is_special, inputs[1:])]
    return list(filter(is_special, inputs))[: None if thorough else 1] or inputs[:1]


class _Runs:
    """Collects the runs of a regime under one attention implementation. meters: measure norms' inputs. keeps: keep
    outputs. encoder: a sentence encoder's folder; the regime ``half`` also runs the modules that follow the encoder."""

    def __init__(
        self, regime: str, attention: str, *, meters: bool = False, keeps: bool = False, encoder: Path | None = None
    ) -> None:
        self.regime, self.attention, self.meters, self.keeps = regime, attention, meters, keeps
        self.encoder = encoder if regime == "half" else None
        self.inputs: list[Batch] = []
        self.results: dict[int, tuple[int, Sequence[Site], Tensor | None]] = {}
        self.norms: NormMeters = {}

    def run_on(self, batch: Batch, loss_scale: float | None = None) -> Callable[[nn.Module], None]:
        """Add a batch to ``inputs``, and return a function that runs a model on it. loss_scale: if given, the function
        also runs a backward of the loss times this scale, unless the batch generates."""
        self.inputs.append(batch)
        return partial(self._run, len(self.inputs) - 1, loss_scale)

    def add(self, walk: Walk, inputs: Sequence[Batch]) -> None:
        dtype, half = _weights(self.regime)
        for batch in inputs:
            walk.add(self.run_on(batch), dtype, half=half, attention=self.attention)

    def _run(self, number: int, loss_scale: float | None, model: nn.Module) -> None:
        batch = self.inputs[number]
        with SiteObserver(model) as observer, metering_norms(model, self.norms) if self.meters else nullcontext():
            output = _output(model, batch, self.regime, loss_scale)
        sites = observer.sites()
        if output is None:
            self.results[number] = 0, sites, None
            return
        shown = (output.get(name) for name in ("encoder_last_hidden_state", "last_hidden_state"))
        states = next((each for each in shown if each is not None), None)
        if self.encoder is not None and states is not None:
            vectors = SentenceVectors(self.encoder).to(states.device, states.dtype)
            with SiteObserver(vectors) as behind:
                vectors(states, batch.attention_mask.to(states.device))
            sites += behind.sites()
        kept = output_on(batch, output) if self.keeps and compared([batch]) else None
        final = values_of(output)
        self.results[number] = int(final.numel() - final.detach().isfinite().sum()), sites, kept

    @property
    def done(self) -> Run:
        results = [self.results[number] for number in range(len(self.inputs))]
        return Run(self.attention, self.inputs, [sites for _, sites, _ in results], sum(n for n, *_ in results))

    @property
    def outputs(self) -> list[Tensor]:
        return [output for _, (*_, output) in sorted(self.results.items()) if output is not None]


def _beside_fp32(
    checkpoint: Checkpoint, inputs: Sequence[Batch], results: dict[str, RegimeResult], device: torch.device | str
) -> dict[str, RegimeResult]:
    def run() -> dict[str, float]:
        walk, seen = Walk(checkpoint, device), _Runs("fp32", "eager")
        seen.add(walk, inputs)
        walk.run()
        return {site.name: site.amax for site in sites_of_all(seen.done.sites)}

    return beside_fp32(results, run)


def audit_model(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    regime: str,
    attention: Sequence[str] = ATTENTIONS,
    loss_scale: float | None = None,
    advance: Advance = lambda done, total: None,
    seed: int = 0,
    known: Iterable[Site] = (),
) -> RegimeResult:
    """Return the result of a regime for ``model``, run on ``batches`` under each attention implementation.

    model: has the regime's dtypes, which are fp32 for ``amp``. loss_scale: turns on training mode and a backward of the
    loss times this scale. known: sites measured elsewhere. The model's mode and attention are restored."""
    config: Any = model.config
    was_training, stock = model.training, str(config._attn_implementation)
    cards = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    given = {implementation: without_blind_padding(batches, implementation) for implementation in attention}
    shares = [_Runs(regime, each, meters=regime == "half" and each == attention[0]) for each in attention]
    numbers, total = count(1), sum(map(len, given.values()))
    model.train(loss_scale is not None)
    try:
        for share in shares:
            set_attention(model, share.attention)
            with torch.random.fork_rng(devices=cards):
                torch.manual_seed(seed)
                for batch in given[share.attention]:
                    share.run_on(batch, loss_scale)(model)
                    advance(next(numbers), total)
    finally:
        model.train(was_training)
        set_attention(model, stock)
    return regime_result([share.done for share in shares], norms_seen(shares[0].norms), known)


def _output(model: nn.Module, batch: Batch, regime: str, loss_scale: float | None) -> Any:
    """Run a model on a batch and return its output, or None where ``run_batch`` returns None. loss_scale: if given, run
    a backward of the loss times this scale, unless the output is None."""
    trains, place = loss_scale is not None and not batch.generate, next(model.parameters()).device.type
    with torch.set_grad_enabled(trains), torch.autocast(place, torch.float16, enabled=regime == "amp"):
        output, loss = output_and_loss(model, batch) if trains else (run_batch(model, batch), None)
    if loss is not None and loss_scale is not None:
        (loss * loss_scale).backward()
        model.zero_grad(set_to_none=True)
    return output
