"""The verdict: a checkpoint run in the ways people run it in fp16, with every operation measured.

The regimes differ in what is fp16. ``stock`` is what ``from_pretrained(dtype=float16)`` gives (T5's ``wo``
stays fp32, and with it the residual); ``half`` has every parameter in fp16; ``amp`` keeps fp32 weights and lets
autocast run the matrix products in fp16. Each runs with eager attention, where the scores are fp16 values that
can be measured, and with SDPA, whose kernels do not show them. Finite logits prove nothing, since stock
code clamps residuals: a regime is safe iff no output of any operation is non-finite or saturated, apart from
what is so by design. The other end of the range is reported beside the verdict, not in it: a signal that lies
below the smallest normal number as a whole overflows nowhere and has lost bits everywhere.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..families.known import of_model_type, roles_of
from ..numerics import FP16_MAX, FP16_STEP, FP16_TINY, OVERFLOWED, headroom_bits
from ..observe.observer import SiteObserver
from ..observe.sites import Site
from ..progress import Advance
from ..run import probe
from ..run.probe import Batch
from ..run.scaled_attention import SCALED, register
from ..run.stock import load, load_config

REGIMES = ("stock", "amp", "half")


ATTENTIONS = ("eager", "sdpa")
"""Those that stock code runs; ``run.attention.SCALED`` can be asked for as well."""


LOSS_SCALE = 2.0**10
"""Loss scale of the training audit. A cross-entropy of ln(250,000) times it still fits fp16 (12,700), so that the scale
itself never breaks pure half; dynamic scalers start at 2¹⁶ and settle lower."""


_FP16_RANGE_BITS = math.log2(FP16_MAX / FP16_STEP)


# Operations that put out a signal: linears and norms, embeddings, residual adds, gated products, what attention
# gathers. Copies are the same signal again; scores, statistics and what happens inside an activation function may be
# small by nature, or mean something by their absolute size.
_SIGNALS = ("", "context", "embedding", "add", "mul", "layer_norm")


@dataclass(frozen=True)
class SiteResult:
    """One site of a regime, merged over batches and attentions; fields as in ``observe.sites.Site`` but for ``benign``.

    ``headroom_bits`` is log2(limit / amax), ``-inf`` after an overflow, None without a limit; ``benign`` is the
    reason, or None.
    """

    name: str
    amax: float
    limit: float | None
    headroom_bits: float | None
    nonfinite: int
    saturated: int
    benign: str | None
    dtype: str

    def to_json(self) -> dict[str, Any]:
        """Return the site as plain JSON values; see ``RegimeResult.to_json`` for infinities."""
        return {
            "name": self.name,
            "amax": _plain_amax(self.amax),
            "limit": self.limit,
            "headroom_bits": None
            if self.headroom_bits is None
            else _plain_bits(self.headroom_bits, self.limit or FP16_MAX),
            "nonfinite": self.nonfinite,
            "saturated": self.saturated,
            "benign": self.benign,
            "dtype": self.dtype,
        }


@dataclass(frozen=True)
class RegimeResult:
    """What one regime showed: totals over its sites, and the sites from the tightest on.

    ``amax`` and ``headroom_bits`` are those of the tightest site that has a limit; ``nonfinite_logits`` counts
    what a user would see of it. Sites equally tight stand in the order they ran: the first one is where an
    overflow began. ``underflow``: the fp16 signals of the forward that stayed below the smallest normal number, 2⁻¹⁴,
    on every input, in the order of ``sites``; one that is zero throughout is among them only where it is not zero in
    fp32.
    """

    regime: str
    nonfinite: int
    saturated: int
    amax: float
    headroom_bits: float
    nonfinite_logits: int
    sites: tuple[SiteResult, ...]
    underflow: tuple[SiteResult, ...] = ()

    @property
    def safe(self) -> bool:
        """Whether nothing was non-finite or saturated except by design."""
        return self.nonfinite == 0 and self.saturated == 0

    def to_json(self) -> dict[str, Any]:
        """Return the ``regimes`` entry of the report, in finite numbers.

        JSON has no infinity: an overflowed amax is written as 65536, which it at least was, and a headroom
        without end as the 40 bits between fp16's last subnormal and its limit.
        """
        return {
            "nonfinite": self.nonfinite,
            "saturated": self.saturated,
            "amax": _plain_amax(self.amax),
            "headroom_bits": _plain_bits(self.headroom_bits, FP16_MAX),
            "nonfinite_logits": self.nonfinite_logits,
            "underflow": [{"name": site.name, "amax": site.amax} for site in self.underflow],
            "sites": [site.to_json() for site in self.sites],
        }


def verdict(results: Mapping[str, RegimeResult]) -> Literal["safe", "unsafe"]:
    """Return "safe" if no regime has a non-finite or saturated value that is not benign, else "unsafe"."""
    return "safe" if all(result.safe for result in results.values()) else "unsafe"


def audit_folder(
    folder: Path,
    *,
    regimes: Sequence[str] = REGIMES,
    inputs: Sequence[Batch] | None = None,
    train_mode: bool = False,
    device: str | None = None,
    advance: Advance | None = None,
    attention: Sequence[str] = ATTENTIONS,
    seed: int = 0,
) -> dict[str, RegimeResult]:
    """Return what each regime shows on the checkpoint in ``folder``, on ``inputs``, by default the built-in probe.

    device: a torch device name, by default the GPU where there is one. Raises ``UserError`` for a folder that cannot be
    used.
    """
    unknown = [regime for regime in regimes if regime not in REGIMES]
    if unknown:
        raise UserError(f"{unknown[0]}: no such regime; choose from {', '.join(REGIMES)}")
    other = [name for name in attention if name not in (*ATTENTIONS, SCALED)]
    if other or not attention:
        named = other[0] if other else "none"
        raise UserError(f"{named}: no such attention; choose from {', '.join((*ATTENTIONS, SCALED))}")
    if SCALED in attention:
        register()
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config = load_config(folder)
    if inputs is None:
        inputs = probe.audit_batches(config, folder, None, seed=seed)
    chosen = [regime for regime in REGIMES if regime in regimes]
    share = len(attention) * len(inputs)
    results: dict[str, RegimeResult] = {}
    for i, regime in enumerate(chosen):

        def regime_advance(done: int, _: int, before: int = i * share) -> None:
            if advance is not None:
                advance(before + done, len(chosen) * share)

        dtype = torch.float32 if regime == "amp" else torch.float16
        results[regime] = audit_model(
            load(folder, dtype, half=regime == "half").to(place),
            inputs,
            regime=regime,
            attention=attention,
            train_mode=train_mode,
            advance=regime_advance,
            seed=seed,
        )
    within = insides_of(config)
    silent = {site.name for result in results.values() for site in _signals(result.sites, within) if site.amax == 0}
    if silent:
        alive = _nonzero(load(folder, torch.float32).to(place), inputs)
        for regime, result in results.items():
            sunk = {site.name for site in result.underflow} | (silent & alive)
            results[regime] = replace(
                result, underflow=tuple(s for s in _signals(result.sites, within) if s.name in sunk)
            )
    return results


def audit_model(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    regime: str,
    attention: Sequence[str] = ATTENTIONS,
    train_mode: bool = False,
    advance: Advance | None = None,
    seed: int = 0,
) -> RegimeResult:
    """Return what ``model``, already in the dtypes of ``regime``, shows on ``batches`` under each attention.

    For ``amp`` the model is in fp32 and runs under autocast. ``train_mode`` switches dropout on (seeded) and runs the
    backward of the loss times ``LOSS_SCALE``; without it the model runs in eval mode. The model's mode, attention and
    gradients are left as they were.
    """
    was_training, stock = model.training, _attention_of(model)
    merged: dict[str, tuple[int, SiteResult]] = {}
    nonfinite_logits = steps = 0
    model.train(train_mode)
    try:
        for implementation in attention:
            _set_attention(model, implementation)
            observer = SiteObserver(model)
            with observer, torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                for batch in batches:
                    nonfinite_logits += _step(model, batch, regime, train_mode)
                    steps += 1
                    if advance is not None:
                        advance(steps, len(attention) * len(batches))
            if regime == "amp":
                _check_autocast(model, observer)
            _merge(merged, observer.sites())
    finally:
        model.train(was_training)
        _set_attention(model, stock)
    return _result(regime, merged, nonfinite_logits, insides_of(model.config))


def _attention_of(model: Any) -> str:
    return str(model.config._attn_implementation)


def _set_attention(model: Any, implementation: str) -> None:
    try:
        model.set_attn_implementation(implementation)
    except ValueError as error:
        raise UserError(
            f"{type(model).__name__} has no {implementation} attention; leave it out of --attention"
        ) from error


def _autocast(model: nn.Module, regime: str) -> contextlib.AbstractContextManager[Any]:
    if regime != "amp":
        return contextlib.nullcontext()
    return torch.autocast(next(model.parameters()).device.type, torch.float16)


def _step(model: nn.Module, batch: Batch, regime: str, train_mode: bool) -> int:
    """Run one batch and return how many of its logits (or last hidden states) are not finite."""
    if not train_mode or batch.generate:
        with torch.no_grad(), _autocast(model, regime):
            output = probe.run_batch(model, batch)
    else:
        labelled = batch.head and batch.decoder_input_ids is not None
        with _autocast(model, regime):
            output = probe.run_batch(model, batch, labels=labelled)
        if output is not None:
            # An encoder has no loss of its own: pull its states towards zero.
            loss = output.loss if labelled else output[0].float().square().mean()
            (loss * LOSS_SCALE).backward()
            model.zero_grad(set_to_none=True)
    if output is None:
        return 0
    final: Tensor = output["logits"] if "logits" in output else output[0]
    return int(final.numel() - final.detach().isfinite().sum())


def _check_autocast(model: nn.Module, observer: SiteObserver) -> None:
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    seen = {site.dtype for site in observer.sites() if site.name in linear}
    if torch.float16 not in seen:
        raise RuntimeError(f"autocast did not run the linear layers in fp16 but in {seen}")


def _merge(merged: dict[str, tuple[int, SiteResult]], sites: Iterable[Site]) -> None:
    """Add ``sites`` by name; one that was fp16 at one time and fp32 at another is shown as fp16."""
    for site in sites:
        if not site.calls:
            continue
        order, result = site.order, _site_result(site)
        if site.name in merged:
            before, old = merged[site.name]
            shown = old if result.limit is None else result
            amax = max(r.amax for r in (old, result) if (r.limit is None) == (shown.limit is None))
            # Where only one of the two broke, the order is that of its breaking.
            if bool(old.nonfinite) == bool(site.nonfinite):
                order = min(order, before)
            elif old.nonfinite:
                order = before
            result = replace(
                shown,
                amax=amax,
                headroom_bits=None if shown.limit is None else headroom_bits(amax, shown.limit),
                nonfinite=old.nonfinite + result.nonfinite,
                saturated=old.saturated + result.saturated,
                benign=old.benign or result.benign,
            )
        merged[site.name] = (order, result)


def _site_result(site: Site) -> SiteResult:
    return SiteResult(
        name=site.name,
        amax=site.amax,
        limit=site.limit,
        headroom_bits=site.headroom_bits,
        nonfinite=site.nonfinite,
        saturated=site.saturated,
        benign=site.reason,
        dtype=str(site.dtype).removeprefix("torch."),
    )


def insides_of(config: Any) -> frozenset[str]:
    """Return what the modules are called whose outputs are no signals of their own; of an unknown family nothing."""
    return roles_of(of_model_type(getattr(config, "model_type", None))).insides


def _result(
    regime: str, merged: dict[str, tuple[int, SiteResult]], nonfinite_logits: int, insides: Collection[str]
) -> RegimeResult:
    def tightness(item: tuple[int, SiteResult]) -> tuple[float, int]:
        order, site = item
        bits = math.inf if site.headroom_bits is None else site.headroom_bits
        return (-math.inf if site.nonfinite else bits, order)

    sites = tuple(site for _, site in sorted(merged.values(), key=tightness))
    limited = [site for site in sites if site.limit is not None]
    tightest = min(limited, key=lambda site: headroom_bits(site.amax, site.limit or FP16_MAX), default=None)
    return RegimeResult(
        regime=regime,
        nonfinite=sum(site.nonfinite for site in sites),
        saturated=sum(site.saturated for site in sites),
        amax=tightest.amax if tightest else 0.0,
        headroom_bits=headroom_bits(tightest.amax, tightest.limit or FP16_MAX) if tightest else math.inf,
        nonfinite_logits=nonfinite_logits,
        sites=sites,
        underflow=tuple(site for site in _signals(sites, insides) if 0 < site.amax < FP16_TINY),
    )


def _signals(sites: Iterable[SiteResult], insides: Collection[str]) -> list[SiteResult]:
    """The sites that put out a signal in fp16 in the forward; ``insides`` as ``insides_of`` gives them."""
    sites = list(sites)
    attentions = {s.name.rpartition(":")[0] for s in sites if s.name.endswith((":scores", ":context"))}
    found = []
    for site in sites:
        path, _, operation = site.name.partition(":")
        operation = operation.partition("#")[0]
        inside = path.rpartition(".")[2] in insides or (path in attentions and operation != "context")
        if site.limit is not None and site.benign is None and operation in _SIGNALS and not inside:
            found.append(site)
    return found


def _nonzero(model: nn.Module, batches: Sequence[Batch]) -> set[str]:
    """The sites of a model that are not zero throughout."""
    observer = SiteObserver(model)
    with observer, torch.no_grad():
        for batch in batches:
            probe.run_batch(model, batch)
    return {site.name for site in observer.sites() if site.amax > 0}


def _plain_amax(amax: float) -> float:
    return amax if math.isfinite(amax) else OVERFLOWED


def _plain_bits(bits: float, limit: float) -> float:
    if bits == -math.inf:
        return math.log2(limit / OVERFLOWED)
    return min(bits, _FP16_RANGE_BITS)
