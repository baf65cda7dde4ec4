"""Table rows and sentences about verdict, distances, outputs, edits and runtimes, for the page, card and terminal."""

from __future__ import annotations

from typing import NamedTuple

from ..families.known import named
from ..rescaling.exponents import LAST, on_request
from ..results import SiteEntry
from ..targets import MARGIN_BITS, TIERS, Tier
from ..wording import (
    about,
    below_limit,
    counted,
    headroom,
    headroom_or_excess,
    known,
    listed,
    magnitude,
    percent,
    power,
    reached,
    scientific,
)
from . import coverage, other_reports, schema
from .remedies import OVER, SQUARES_UNSEEN, described, prices, tower_in_fp32

REGIME_MEANINGS = {
    "stock": "as from_pretrained(dtype=torch.float16) loads it",
    "amp": "fp32 weights under torch.autocast",
    "half": "every parameter in fp16, .half()",
}


def measured_on(report: schema.Report) -> str:
    devices = list(dict.fromkeys(name for names in report.environment.devices.values() for name in names))
    if report.inputs is None or not devices:
        return ""
    kinds = ", ".join(dict.fromkeys(entry.kind for entry in report.inputs.batches))
    batches = sum(entry.batches for entry in report.inputs.batches)
    return f"{listed(devices)}, {batches:,} batch{'' if batches == 1 else 'es'} ({kinds})"


def accuracy(report: schema.Report) -> str:
    close = report.fidelity
    if close is None:
        return ""
    reference = f"the {close.reference}" if report.finetune is None else "the finetuned weights in fp32"
    reference += "" if report.regimes else ", on a few short rows"
    distances = f"{close.title} to {reference}: fp16 {scientific(close.kl_fp16)}"
    bf16, fp16 = known(close.kl_bf16), known(close.kl_fp16)
    if bf16 is None:
        return distances
    distances += f", bf16 {scientific(bf16)}"
    if fp16 is None or fp16 <= 0:  # a divergence of 0 can be rounded below it
        return distances
    ratio = max(bf16, 1e-300) / fp16
    closer = f"{about(ratio)} closer" if ratio >= 1 else f"{about(1 / ratio)} further off"
    return f"{closer} than bf16; {distances}"


def reached_at(site: SiteEntry) -> str:
    return reached(site.reached) if site.limit is not None or site.nonfinite else magnitude(site.reached)


def headroom_at(site: SiteEntry) -> str:
    if site.headroom_bits is None or site.limit is None:
        return headroom(site.headroom_bits)
    return headroom_or_excess(site.headroom_bits, site.reached, site.limit)


def by_design(site: SiteEntry) -> str:
    return "" if site.broken else site.benign or ""


class Distance(NamedTuple):
    """The distance of a finetuned checkpoint from the original, on the inputs in ``where``. ``value``: the distance;
    not a finite number if outputs had inf or NaN. ``bf16``: the distance of the original in bf16; 0 if not measured."""

    value: float | None
    where: str
    bf16: float = 0.0


KINDS = {  # inputs of a finetune's evaluations, by the prefix of their keys
    "held_out": "held-out data",
    "unlike": "code, figures and other languages",
    "audit": "the audit's inputs",
}


def distances(run: schema.FinetuneEntry) -> tuple[str, str, list[Distance]]:
    close = run.fidelity
    what = "KL" if close is None else close.title
    unit = " nats per token" if what == "KL" else ""
    measured, last = [], run.last
    for kind, where in KINDS.items():
        value = last.get(f"{kind}_divergence")
        if kind == "audit" and close is not None:
            measured.append(Distance(close.kl_fp16, where, close.kl_bf16 or 0.0))
        elif isinstance(value, (int, float)):
            measured.append(Distance(float(value), where))
    return f"{what} to the original", unit, measured


def distance_moved(run: schema.FinetuneEntry) -> str:
    what, unit, measured = distances(run)
    if not measured:
        return "how far the result is from the original was not measured"
    units = [unit, *[""] * (len(measured) - 1)]
    text = listed([f"{scientific(each.value)}{of} on {each.where}" for each, of in zip(measured, units, strict=True)])
    return f"{what} is {text}"


def attacked(report: schema.Report) -> str:
    if report.attack is None:
        return ""
    steps = counted(report.attack.steps, "gradient step")
    return f"the worst input that {steps} found is {below_limit(report.attack.worst_headroom_bits)}"


def standing(report: schema.Report) -> str:
    return "safe" if report.safe else "short" if report.short else "unsafe"


def verdict_of(report: schema.Report) -> tuple[str, str]:
    """Return the verdict as terminal, card and page show it: a label, such as "safe", and a sentence of reasons."""
    if not report.safe and not report.short:
        parts = [broken_when_run(report) or broken_by_search(report) or passed(report)]
        if tower_in_fp32(report.family, report.regimes):
            parts.append(f"{'the text model is' if report.proven else 'in the text model'} {claim(report)}")
        return "unsafe", "; ".join(parts)
    parts = [missed(report)] if report.short else []
    parts += [claim(report), largest_run(report)]
    if report.finetune is not None:
        parts.append(distance_moved(report.finetune))
    label = "safe, but short of what was asked" if report.short else "safe"
    if report.safe and (unmet := unmet_target(report)):
        label, parts = f"safe {coverage.where(TIERS[0].target)}", [*parts, unmet]
    return label, "; ".join(filter(None, parts))


def claim(report: schema.Report) -> str:
    certificate = report.certificate
    if certificate is not None and certificate.holds:
        return f"proven for {coverage.every_input(report, length=True)}"
    observed = "nothing overflowed on what was run" if report.regimes else ""
    if certificate is None or not certificate.over:
        return observed
    sites = counted(len(certificate.sites), "site")
    unproven = f"not proven at {len(certificate.over)} of {sites} {coverage.where(report.target)}".rstrip()
    return "; ".join(filter(None, (observed, unproven)))


def largest_run(report: schema.Report) -> str:
    regime = min(report.regimes.values(), key=lambda each: each.headroom_bits, default=None)
    if regime is None:
        return "nothing was audited"
    text = f"the largest observed {regime.measured}, {reached(regime.amax)}, is {below_limit(regime.headroom_bits)}"
    near = regime.headroom_bits < MARGIN_BITS and not report.proven
    return f"{text}, and other input may come nearer" if near else text


def broken_when_run(report: schema.Report) -> str:
    regimes = [report.regimes[name] for name in report.broken_regimes]
    if not regimes:
        return ""
    nonfinite, saturated = (max(getattr(each, key) for each in regimes) for key in ("nonfinite", "saturated"))
    counts = [f"{n:,} values {verb}" for n, verb in ((nonfinite, "are inf or NaN"), (saturated, "saturate")) if n]
    first = next((site.name for regime in regimes for site in regime.broken_sites), None)
    at = f", first at {first}" if first else ""
    return f"overflows in {listed(report.broken_regimes)}{at}; up to {listed(counts)}"


def verdict_sentence(report: schema.Report) -> str:
    label, sentence = verdict_of(report)
    whole = f"{label.replace('safe', 'safe in fp16', 1)}: {sentence}"
    parts = filter(None, (whole, inexactness(report), coverage.padding_advice(report)))
    return " ".join(f"{part[:1].upper()}{part[1:]}." for part in parts)


def scaled_outputs(report: schema.Report) -> str:
    by_factor: dict[float, list[str]] = {}
    others, of_layers = [], ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
    for name, entry in report.outputs.items():
        if on_request(name, report.outputs) and not entry.fits(drifts=True):
            error, error_bf16 = scientific(entry.error), scientific(entry.error_bf16 or 0.0)
            others.append(f"do not use {name}: the relative squared error is {error}, and {error_bf16} in bf16")
        elif not isinstance(entry.factor_log2, int | float):
            others.append(f"{name} is scaled per channel: see outputs in {schema.REPORT}")
        elif entry.factor_log2:
            shown = f"{name} (all but the last)" if name in of_layers else name
            by_factor.setdefault(entry.factor_log2, []).append(shown)
    steps = [
        f"divide {listed(names)} by {2**factor:,}" if factor > 0 else f"multiply {listed(names)} by {2**-factor:,}"
        for factor, names in by_factor.items()
    ]
    steps_back = [f"to get the source's, {', '.join(steps)}"] if steps else []
    if LAST in report.outputs and report.outputs[LAST].factor_log2 and (stock := giving_states(report)):
        steps_back.append(f"or convert --as {stock}" if steps else f"to get the source's, convert --as {stock}")
    return "; ".join([*steps_back, *others])


def giving_states(report: schema.Report) -> str:
    """Return the name of the transformers class that outputs the last hidden states; "" if there is none."""
    family, decodes = named(report.family), "cross_attentions" in report.outputs
    return "" if family is None else family.giving_states(decodes=decodes) or ""


def inexactness(report: schema.Report) -> str:
    close = report.fidelity
    if not report.inexact or close is None or close.kl_fp16 is None:
        return ""
    beside = "" if close.kl_bf16 is None else f"; bf16 is {scientific(close.kl_bf16)}"
    sites = counted(len(report.inexact), "site")
    return f"edited at {sites}: fp16 is {scientific(close.kl_fp16)} {close.unit} from the source{beside}"


def function_rows(report: schema.Report, most: int) -> list[tuple[str, str]]:
    """Return (title, text) rows on what users must know of a conversion: rescaled outputs, another transformers class,
    centred biases, a stream moved for the proof, and at most ``most`` edits and ``most`` exceptions."""
    keys = 0 if report.plan is None else len(report.plan.centred_keys)
    centred = f"key or position biases of {counted(keys, 'attention')} lose a shift of all scores; softmax ignores it"
    before, after = report.source.class_in("before"), report.source.class_in("after")
    scaled = LAST in report.outputs and report.outputs[LAST].factor_log2
    other = f"made for {after} alone: {before} would give other values" if before and after and not scaled else ""
    rows = [("outputs", scaled_outputs(report)), ("class", other), ("centred", centred if keys else "")]
    for stream, room in report.for_proof.items():
        rows.append(
            ("for the proof", f"observed values need only --stream {room}, but a proof needs {stream} to be smaller")
        )
    return [(what, words) for what, words in rows if words] + edit_rows(report, most)


def edit_rows(report: schema.Report, most: int) -> list[tuple[str, str]]:
    dearest = sorted(report.inexact, key=lambda edit: -(edit.measured or edit.predicted or 0.0))
    rows = []
    for edit in dearest[:most]:
        costs = (("predicted", edit.predicted), ("measured", edit.measured))
        parts = [f"{what} {scientific(value)}" for what, value in costs if value is not None]
        what = f"{counted(edit.columns, 'column')} " if edit.columns else ""
        rows.append((f"edit for {edit.site}", ", ".join([f"{what}down to {power(edit.exponent)}", *parts])))
    rows += [("exception", f"{described(rare)}: {prices(rare)}") for rare in report.exceptions[:most]]
    for what, number in (("edits", len(report.inexact)), ("exceptions", len(report.exceptions))):
        if number > most:
            rows.append((f"further {what}", f"{number - most} more, with smaller divergences, are in the report"))
    if report.searched is not None:
        tokens = f"{counted(report.searched.ids, 'token')} tried, {counted(len(report.exceptions), 'exception')} found"
        share, covered = percent(report.searched.further), report.searched.covered
        rows.append(("rare input", f"{tokens}; on {share} of random pairs the edits are further off than bf16"))
        if covered is not None:
            inputs = f"at least {percent(covered)} of single tokens (in attention: of pairs of tokens)"
            rows.append(("covered", f"each edit is within bf16's rounding error on {inputs}"))
    return rows


def missed(report: schema.Report) -> str:
    return "; ".join(entry.reason for entry in report.unsafe if entry.kind == "goal")


def passed(report: schema.Report) -> str:
    kinds = {entry.kind: entry for entry in reversed(report.unsafe)}
    if (inexact := kinds.get("inexact")) is not None:
        return inexact.reason
    over = sum(entry.kind == "limit" for entry in report.unsafe)
    if over:
        return f"no exponent keeps {counted(over, 'signal')} under the limit with the margin"
    unproven = len(report.uncertified)
    return f"bounds exceed the limit at {counted(unproven, 'site')}" if unproven else "see below what exceeds its limit"


def broken_by_search(report: schema.Report) -> str:
    broken = sorted((each for each in report.unsafe if each.kind == "found"), key=lambda each: -each.excess_bits)
    if not broken:
        return ""
    sites = f"{counted(len(broken), 'site')}, furthest " if len(broken) > 1 else ""
    return f"overflows {sites}{broken[0].signal}: {broken[0].reason}"


def held_in(entry: schema.TierEntry, proven: str, *, broken: bool) -> str:
    unseen = {SQUARES_UNSEEN: "not known", OVER: "no" if broken else "not proven"}.get(entry.reason, "no")
    return {"certified": f"yes, {proven}", "observed": "yes, on what was run", None: unseen}[entry.proof]


def unmet_target(report: schema.Report | other_reports.Verification) -> str:
    """Return why a checkpoint is not known to be safe in its target's arithmetic, or "" if it is known to be safe. The
    target is the group of runtimes for which it was converted."""
    name = next((tier.name for tier in TIERS if tier.target == report.target), "")
    entry = report.tiers.get(name)
    if entry is None or entry.holds:
        return ""
    return f"{coverage.where(report.target)}: {held_in(entry, '', broken=False)}, {entry.reason}"


def held_tiers(report: schema.Report, proven: str) -> list[tuple[Tier, schema.TierEntry, str]]:
    entries = [(tier, report.tiers[tier.name]) for tier in TIERS if tier.name in report.tiers]
    return [(tier, each, held_in(each, proven, broken=bool(report.broken_regimes))) for tier, each in entries]


def tier_rows(report: schema.Report) -> list[tuple[str, str, str, str]]:
    return [
        (tier.title, tier.words, held + (f": {entry.reason}" if entry.reason else ""), ", ".join(entry.runtimes))
        for tier, entry, held in held_tiers(report, f"for {coverage.every_input(report)}")
    ]


def gradients_in_words(report: schema.Report) -> str:
    amp = report.regimes.get("amp")
    if amp is None or (seen := amp.gradients) is None:
        return ""
    if seen.largest is None:
        return "backward under AMP: the forward pass overflows already, so every step is skipped"
    if seen.loss_scale is None:
        return f"backward under AMP: gradients overflow at every loss scale, first at {seen.largest.name}"
    return (
        f"backward under AMP: gradients fit up to a loss scale of {seen.loss_scale:,.6g} (torch begins at 65,536),"
        f" at which {seen.flushed:.1%} of gradient elements become 0; the largest gradient is at {seen.largest.name}"
    )
