"""The verdict: a checkpoint run in the ways people run it in fp16, with every operation measured.

The regimes differ in what is fp16. ``stock`` is what ``from_pretrained(dtype=float16)`` gives (T5's ``wo``
stays fp32, and with it the residual); ``half`` has every parameter in fp16; ``amp`` keeps fp32 weights and lets
autocast run the matrix products in fp16. Each runs with eager attention, where the scores are fp16 values that
can be measured, and with SDPA, where kernels keep them to themselves. Finite logits prove nothing, since stock
code clamps residuals: a regime is safe iff no output of any operation is non-finite or saturated, apart from
what is so by design. The other end of the range is reported beside the verdict, not in it: a signal that lies
below the smallest normal number as a whole overflows nowhere and has lost bits everywhere.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import probe
from .attention import SCALED, register
from .checkpoint import open_checkpoint
from .display import listed
from .environment import SCHEMA, environment
from .errors import UserError
from .families import resolve, stock_class
from .numerics import FP16_MAX, FP16_STEP, FP16_TINY, headroom_bits
from .observe import Site, SiteObserver
from .probe import Batch
from .proof import uncertified_rows
from .talk import Talk

REGIMES = ("stock", "amp", "half")
ATTENTIONS = ("eager", "sdpa")
"""Those that stock code runs; ``attention.SCALED`` can be asked for as well."""

LOSS_SCALE = 2.0**10
"""Loss scale of the training audit. A cross-entropy of ln(250,000) times it still fits fp16 (12,700), so that the scale
itself never breaks pure half; dynamic scalers start at 2¹⁶ and settle lower."""

REMEDY = "bf16-to-fp16 convert rescales what can be; what cannot, a finetune lowers"
REMEDY_CONVERTED = "rescaling was not enough; finetune with the activation-magnitude penalty"
REMEDY_CLEAN = ", or use {clean}, which is clean"

_OVERFLOWED = 65536.0
_ALL_BITS = math.log2(FP16_MAX / FP16_STEP)
# Operations that put out a signal: linears and norms, embeddings, residual adds, gated products, what attention
# gathers. Copies are the same signal again; scores, statistics and what happens inside an activation function may be
# small by nature, or mean something by their absolute size.
_SIGNALS = ("", "context", "embedding", "add", "mul", "layer_norm")
_INSIDES = ("act", "activation_fn", "relative_attention_bias")
# Stock code regenerates or zeroes these where a file lacks them.
_OPTIONAL = ("embed_positions.weight", "final_logits_bias")

Progress = Callable[[int, int], None]
"""Called with the number of steps done and their total."""


@dataclass(frozen=True)
class SiteResult:
    """One site of a regime, merged over batches and attentions; the fields are those of ``observe.Site``.

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


def audit(
    source: str | Path,
    *,
    regimes: Sequence[str] = REGIMES,
    data: str | None = None,
    train_mode: bool = False,
    attention: Sequence[str] = ATTENTIONS,
    attack_steps: int | None = None,
    subfolder: str | None = None,
    seed: int = 0,
    talk: Talk | None = None,
) -> dict[str, Any]:
    """Run ``source`` (folder or Hub id) in ``regimes`` and return the report: verdict, regimes with every site,
    environment.

    data: text to run on besides the built-in probe. train_mode: with dropout and the backward pass under a loss
    scale. attention: implementations, of ``ATTENTIONS`` and "scaled". attack_steps: gradient steps that go after every
    site, whose findings stand beside the certificate's bounds. Raises ``UserError`` for a source or data that cannot be
    used.
    """
    talk = talk or Talk(quiet=True)
    if attack_steps is not None and attack_steps < 1:
        raise UserError(f"{attack_steps} attack steps search nothing; give 1 or more")
    checkpoint = open_checkpoint(source, subfolder)
    layout = resolve(checkpoint)
    inputs = probe.gather(load_config(checkpoint.folder), checkpoint.folder, data, seed=seed)
    shown = ["SDPA" if name == "sdpa" else name for name in attention]
    with talk.step(f"Auditing {', '.join(regimes)}, {listed(shown)}") as advance:
        results = audit_folder(
            checkpoint.folder,
            regimes=regimes,
            inputs=inputs,
            train_mode=train_mode,
            progress=advance,
            attention=attention,
            seed=seed,
        )
    searched: dict[str, Any] = {}
    if attack_steps is not None:
        from .attack import attack
        from .certificate import bound, served

        with talk.step("Bounding every signal"):
            certificate = bound(layout, served(checkpoint, layout))
        with talk.step("Searching for the worst inputs") as advance:
            model = load(checkpoint.folder, torch.float16, half=True)
            adversary = attack(model, layout, steps=attack_steps, seed=seed, certificate=certificate, progress=advance)
        seen = dict(adversary.worst)
        for site in results["half"].sites if "half" in results else ():
            seen[site.name] = max(seen.get(site.name, 0.0), site.amax)
        searched = {"attack": adversary.to_json(), "certificate": certificate.to_json(seen)}
        searched["uncertified"] = uncertified_rows(searched)
    broken = bool(searched) and searched["attack"]["worst_headroom_bits"] < 0
    return {
        "schema": SCHEMA,
        "verdict": "unsafe" if broken else verdict(results),
        "proof": "certified" if searched and searched["certificate"]["holds"] else "observed",
        "family": layout.family.name,
        "source": {
            "path": checkpoint.name,
            "revision": checkpoint.revision,
            "sha256": {file.name: checkpoint.sha256(file) for file in checkpoint.weight_files},
        },
        "train_mode": train_mode,
        "attention": list(attention),
        "inputs": probe.describe(inputs, seed=seed, data=data),
        "regimes": {name: result.to_json() for name, result in results.items()},
        "unsafe": broken_sites(results, converted=is_converted(checkpoint.folder)),
        **searched,
        "environment": environment(),
    }


def broken_sites(results: Mapping[str, RegimeResult], *, converted: bool = False) -> list[dict[str, Any]]:
    """Return the sites that are non-finite or saturated other than by design, in the order they broke, each with its
    regimes, the counts of the worst of them, the reason and the remedy.

    converted: whether rescaling has been tried on these weights already.
    """
    rows: dict[str, dict[str, Any]] = {}
    for regime, result in results.items():
        for site in result.sites:
            if not site.nonfinite and not site.saturated:
                continue
            row = rows.setdefault(
                site.name, {"signal": site.name, "regimes": [], "nonfinite": 0, "saturated": 0, "excess_bits": 0.0}
            )
            row["regimes"].append(regime)
            row["nonfinite"] = max(row["nonfinite"], site.nonfinite)
            row["saturated"] = max(row["saturated"], site.saturated)
            bits = _plain_bits(-math.inf if site.headroom_bits is None else site.headroom_bits, FP16_MAX)
            row["excess_bits"] = max(row["excess_bits"], -bits)
    broken = {regime for row in rows.values() for regime in row["regimes"]}
    clean = " or ".join(regime for regime in results if regime not in broken)
    for row in rows.values():
        kinds = ((row["nonfinite"], "inf or NaN"), (row["saturated"], "saturated"))
        counts = " and ".join(f"{count:,} {kind}" for count, kind in kinds if count)
        row["reason"] = f"values that are {counts} in {', '.join(row['regimes'])}"
        row["remedy"] = REMEDY if not converted else REMEDY_CONVERTED + REMEDY_CLEAN.format(clean=clean) * bool(clean)
    return list(rows.values())


def is_converted(folder: Path) -> bool:
    """Return whether this program wrote the checkpoint in ``folder``."""
    return (Path(folder) / "fp16_report.json").is_file()


def verdict(results: Mapping[str, RegimeResult]) -> str:
    """Return "safe" if no regime has a non-finite or saturated value that is not benign, else "unsafe"."""
    return "safe" if all(result.safe for result in results.values()) else "unsafe"


def audit_folder(
    folder: Path,
    *,
    regimes: Sequence[str] = REGIMES,
    data: str | None = None,
    inputs: Sequence[Batch] | None = None,
    train_mode: bool = False,
    device: str | None = None,
    progress: Progress | None = None,
    attention: Sequence[str] = ATTENTIONS,
    seed: int = 0,
) -> dict[str, RegimeResult]:
    """Return what each regime shows on the checkpoint in ``folder``, on ``inputs``, else on the built-in probe and
    ``data``.

    device: a torch device name, by default the GPU where there is one. Raises ``UserError`` for a folder or data
    that cannot be used.
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
        inputs = probe.gather(config, folder, data, seed=seed)
    chosen = [regime for regime in REGIMES if regime in regimes]
    share = len(attention) * len(inputs)
    results: dict[str, RegimeResult] = {}
    for i, regime in enumerate(chosen):

        def advance(done: int, _: int, before: int = i * share) -> None:
            if progress is not None:
                progress(before + done, len(chosen) * share)

        dtype = torch.float32 if regime == "amp" else torch.float16
        results[regime] = audit_model(
            load(folder, dtype, half=regime == "half").to(place),
            inputs,
            regime=regime,
            attention=attention,
            train_mode=train_mode,
            progress=advance,
            seed=seed,
        )
    silent = {site.name for result in results.values() for site in _signals(result.sites) if site.amax == 0}
    if silent:
        alive = _nonzero(load(folder, torch.float32).to(place), inputs)
        for regime, result in results.items():
            sunk = {site.name for site in result.underflow} | (silent & alive)
            results[regime] = replace(result, underflow=tuple(s for s in _signals(result.sites) if s.name in sunk))
    return results


def audit_model(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    regime: str,
    attention: Sequence[str] = ATTENTIONS,
    train_mode: bool = False,
    progress: Progress | None = None,
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
                    if progress is not None:
                        progress(steps, len(attention) * len(batches))
            if regime == "amp":
                _check_amp(model, observer)
            _merge(merged, observer.sites())
    finally:
        model.train(was_training)
        _set_attention(model, stock)
    return _result(regime, merged, nonfinite_logits)


def load_config(folder: Path) -> Any:
    """Return the transformers configuration in ``folder``; ``UserError`` where it is unusable or of no known class."""
    import transformers

    if not (Path(folder) / "config.json").is_file():
        raise UserError(f"{folder}: no config.json; give the folder of a checkpoint")
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each field has its own validation, with exceptions of its own
        raise UserError(f"{folder}/config.json: {' '.join(str(error).split())}; mend the file") from error
    try:
        stock_class(config.to_dict())
    except UserError as error:
        raise UserError(f"{folder}/{error}") from None
    for key in ("decoder_start_token_id", "pad_token_id"):
        token = getattr(config, key, None)
        if token is not None and not (isinstance(token, int) and 0 <= token < config.vocab_size):
            raise UserError(
                f"{folder}/config.json: {key} is {token!r}, not an id of the vocabulary of {config.vocab_size};"
                " take it from the original config.json"
            )
    return config


def load(folder: Path, dtype: torch.dtype, *, half: bool = False, attention: str = "eager") -> Any:
    """Return the stock model in ``folder`` as ``from_pretrained(dtype=dtype)`` loads it, in eval mode on the CPU.

    With ``half`` every parameter is then cast to fp16 (stock keeps T5's ``wo`` in fp32). Nothing is fetched and
    no remote code runs. Raises ``UserError`` where files cannot be read or a tensor is missing (stock fills it
    at random).
    """
    import transformers

    name = stock_class(load_config(folder).to_dict())
    try:
        model, info = getattr(transformers, name).from_pretrained(
            str(folder),
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # safetensors, pickle and transformers each raise their own kinds
        raise UserError(f"{folder}: cannot be loaded ({_first_line(error)}); check its files") from error
    missing = sorted(key for key in info["missing_keys"] if not key.endswith(_OPTIONAL))
    if missing:
        raise UserError(
            f"{folder}: tensor {missing[0]} is missing, and stock code would fill it at random; complete the checkpoint"
        )
    return model.half().eval() if half else model.eval()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def _attention_of(model: Any) -> str:
    return str(model.config._attn_implementation)


def _set_attention(model: Any, implementation: str) -> None:
    model.set_attn_implementation(implementation)


def _autocast(model: nn.Module, regime: str) -> contextlib.AbstractContextManager[Any]:
    if regime != "amp":
        return contextlib.nullcontext()
    return torch.autocast(next(model.parameters()).device.type, torch.float16)


def _step(model: nn.Module, batch: Batch, regime: str, train_mode: bool) -> int:
    """Run one batch and return how many of its logits (or last hidden states) are not finite."""
    if not train_mode or batch.generate:
        with torch.no_grad(), _autocast(model, regime):
            output = probe.run(model, batch)
    else:
        labelled = batch.head and batch.decoder_input_ids is not None
        with _autocast(model, regime):
            output = probe.run(model, batch, labels=labelled)
        if output is not None:
            # An encoder has no loss of its own: pull its states towards zero.
            loss = output.loss if labelled else output[0].float().square().mean()
            (loss * LOSS_SCALE).backward()
            model.zero_grad(set_to_none=True)
    if output is None:
        return 0
    final: Tensor = output["logits"] if "logits" in output else output[0]
    return int(final.numel() - final.detach().isfinite().sum())


def _check_amp(model: nn.Module, observer: SiteObserver) -> None:
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
            # Where one of the two broke, its number is that of the breaking.
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


def _result(regime: str, merged: dict[str, tuple[int, SiteResult]], nonfinite_logits: int) -> RegimeResult:
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
        underflow=tuple(site for site in _signals(sites) if 0 < site.amax < FP16_TINY),
    )


def _signals(sites: Iterable[SiteResult]) -> list[SiteResult]:
    """The sites that put out a signal in fp16 in the forward."""
    sites = list(sites)
    attentions = {s.name.rpartition(":")[0] for s in sites if s.name.endswith((":scores", ":context"))}
    found = []
    for site in sites:
        path, _, operation = site.name.partition(":")
        operation = operation.partition("#")[0]
        inside = path.rpartition(".")[2] in _INSIDES or (path in attentions and operation != "context")
        if site.limit is not None and site.benign is None and operation in _SIGNALS and not inside:
            found.append(site)
    return found


def _nonzero(model: nn.Module, batches: Sequence[Batch]) -> set[str]:
    """The sites of a model that are not zero throughout."""
    observer = SiteObserver(model)
    with observer, torch.no_grad():
        for batch in batches:
            probe.run(model, batch)
    return {site.name for site in observer.sites() if site.amax > 0}


def _plain_amax(amax: float) -> float:
    return amax if math.isfinite(amax) else _OVERFLOWED


def _plain_bits(bits: float, limit: float) -> float:
    if bits == -math.inf:
        return math.log2(limit / _OVERFLOWED)
    return min(bits, _ALL_BITS)
