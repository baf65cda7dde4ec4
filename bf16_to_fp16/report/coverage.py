"""What a report's bounds cover: which inputs, which arithmetic, and what they say nothing about."""

from __future__ import annotations

from ..bounds.arithmetic import MAX_LENGTH
from ..bounds.kinds import SiteKind
from ..checkpoint.contents import MODULES
from ..families.known import named
from ..families.wiring import MOST_MEAN
from ..measuring.batch import IMAGE
from ..targets import TIERS, WHERE
from ..wording import below_limit, counted
from . import answers, schema


def for_target(report: schema.Report | answers.Verification) -> str:
    return f" {where(report.target)}" if report.target else ""


def where(target: str) -> str:
    return WHERE.get(target, f"for {target}") if target else ""


def by_proof(report: schema.Report) -> list[tuple[str, float]]:
    """Return (arithmetic, bits of headroom) that the certificate proves: in PyTorch, and with norms that square in
    fp16. Bounds for norms in fp16 also hold in PyTorch, where ``certify`` finds tighter ones."""
    certificate, target = report.certificate, report.target or ""
    assert certificate is not None  # it holds
    squares = [site.headroom_bits for site in certificate.sites if site.kind == SiteKind.SQUARES]
    if not squares:
        return [(where(target), certificate.headroom_bits)]
    others = [site.headroom_bits for site in certificate.sites if site.kind != SiteKind.SQUARES]
    plain, normed = (tier.target for tier in TIERS[:2])
    place = f"{where(plain)} at least" if target == normed else where(target)
    return [(place, min(others)), (where(normed), min(squares))]


def headroom_by_proof(report: schema.Report) -> str:
    proofs = [f"{place} {below_limit(bits)}".lstrip() for place, bits in by_proof(report)] if report.proven else []
    return f"{'; '.join(proofs)} (proven; a proof needs no margin)" if proofs else ""


def claim_end(padding: int | None, family: str | None, model_class: str | None = None) -> str:
    """Return the exceptions to a claim (padding, vision tower, class), as words to follow "every input"."""
    aside = tower_aside(family)
    aside += f", run as {model_class} alone" if model_class else ""
    if padding == 0:
        return (" but for padding that sees no token" if has_blind_padding(family) else "") + aside
    if padding is None:
        return f" without padding{aside}"
    return f" (padded on the right by at least {counted(padding, 'position')}, or not at all){aside}"


def every_input(report: schema.Report, *, length: bool = False) -> str:
    """Return "every input" with its limits; with its length where ``length`` asks for it or it is less than usual."""
    certificate = report.certificate
    shown = certificate is not None and (length or certificate.max_length < MAX_LENGTH)
    of = f" of up to {counted(certificate.max_length, 'position')}" if certificate is not None and shown else ""
    return f"every input{of}{claim_end(report.padding, report.family, report.model_class)}{states_aside(report)}"


def states_aside(report: schema.Report) -> str:
    return " to the encoder's last states" if MODULES in report.source.carried_over else ""


def has_tower(family: str | None) -> bool:
    known = named(family)
    return known is not None and known.projector is not None


def tower_aside(family: str | None) -> str:
    return ", the vision tower aside" if has_tower(family) else ""


def tower_advice(report: schema.Report) -> tuple[str, str]:
    if (known := named(report.family)) is None or known.projector is None:
        return "", ""
    seen = report.regimes and report.inputs and any(entry.kind == IMAGE for entry in report.inputs.batches)
    ran = "; an image of noise was run through it" if seen else ""
    most = f"no larger than {MOST_MEAN:,.0f} in the mean" if known.projector.layer_norm_eps is not None else "finite"
    return (
        f"what the vision tower brings into the stream, whatever it gives, as long as that is {most}",
        f"what happens inside the vision tower, which is carried over as it is{ran}",
    )


def has_blind_padding(family: str | None) -> bool:
    known_family = named(family)
    return known_family is not None and known_family.blind_padding


def padding_advice(report: schema.Report) -> str:
    title = "the stock class" if (family := named(report.family)) is None else f"stock {family.title}"
    if report.padding == 0:
        if not report.blind_padding and not has_blind_padding(report.family):
            return ""
        ran = {entry.attention for regime in report.regimes.values() for entry in regime.runs}
        first = "" if ran == {"eager"} else f"use SDPA{'' if ran else ', where the class has it'}, or "
        return (
            "under eager attention in fp16, left padding and padding beyond a sliding window can make their row NaN;"
            f" {first}batch rows of one length"
        )
    why = f"{title} masks with −inf in fp16"
    filled = "; encoder_attentions are NaN for the places that fill up a short row's last block"
    if report.padding is None:
        return f"every padded row is NaN: {why}; batch rows of one length{filled}"
    least = counted(report.padding, "position")
    enough = f"pad the longest row by {least}, on the right"
    return f"a row with less than {least} of padding can be NaN: {why}; {enough}{filled}"


def coverage(report: schema.Report) -> tuple[list[str], list[tuple[str, str]]]:
    """Return what the bounds cover, and what they do not, each with the option that would cover it."""
    certificate = report.certificate
    if certificate is None:
        return [], []
    squares = any(site.kind == SiteKind.SQUARES for site in certificate.sites)
    sums = counted(certificate.splits, "partial sum")
    covers = [
        "every operation of the forward pass, in pure fp16, under AMP and as stock code loads it",
        f"{every_input(report, length=True)}: any tokens, and embeddings anywhere in the hull of the table",
        f"kernels that accumulate in fp32 in any order, or in up to {sums} rounded to fp16 and added in fp16",
    ]
    leaves = [
        ("a LayerNorm that computes E[x²] − E[x]²", ""),
        ("the loss and the backward pass", ""),
        ("what is inf by design and harms nothing: masked scores, the cube inside GELU", ""),
        ("encoder outputs and caches from elsewhere, quantised caches, embeddings beyond the table's hull", ""),
        ("hardware that flushes subnormal numbers to zero", ""),
        ("rows of attention that see no position at all, such as a decoder's that are padded on the left", ""),
        ("other weights than those in the files: adapters, quantisation (quantise the source, or undo first)", ""),
        ("precision: it says that nothing overflows, not that nothing is lost", ""),
    ]
    brought, inside = tower_advice(report)
    covers += [brought] if brought else []
    leaves += [(inside, "")] if inside else []
    if squares:
        covers.append("norms that square the residual stream and compute in fp16, where mean squares stay over 2⁻¹⁷")
    else:
        leaves.insert(1, ("norms that square the residual stream in fp16", "--target norm-safe"))
    if report.tiers and report.tiers[TIERS[-1].name].proof == "certified":
        covers.append("kernels that make every sum in fp16, in any order")
    else:
        leaves.insert(0, ("kernels that accumulate everything in fp16", "--target fp16-accumulate"))
    if certificate.train_mode:
        covers.append("training mode: dropout at the config's rates")
    else:
        leaves.insert(1, ("training mode, with dropout", "--target train"))
    return covers, leaves
