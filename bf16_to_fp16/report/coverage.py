"""Say in words which inputs and which arithmetic a report's bounds cover, and what they leave out."""

from __future__ import annotations

from ..bounds.arithmetic import MAX_LENGTH
from ..checkpoint.contents import MODULES
from ..families.known import named
from ..families.wiring import MOST_MEAN
from ..measuring.batch import IMAGE
from ..targets import WHERE
from ..wording import below_limit, counted
from . import schema


def where(target: str | None) -> str:
    return WHERE.get(target, f"for {target}") if target else ""


def headroom_by_proof(report: schema.Report) -> str:
    certificate = report.certificate
    if certificate is None or not certificate.holds:
        return ""
    shown = f"{where(report.target)} {below_limit(certificate.headroom_bits)}".lstrip()
    return f"{shown} (proven; a proof needs no margin)"


def input_exceptions(padding: int | None, family: str | None, model_class: str | None = None) -> str:
    """Return the words that follow "every input" and name the inputs and parts of the model that a proof leaves out.
    padding: the least number of padding positions that keep a padded row from NaN; None if no row may be padded.
    model_class: the only class that the proof covers; None if it covers every class that the files fit."""
    aside = tower_aside(family)
    aside += f", run as {model_class} alone" if model_class else ""
    if padding == 0:
        return (" but for padding that attends to no token" if has_blind_padding(family) else "") + aside
    if padding is None:
        return f" without padding{aside}"
    return f" (padded on the right by at least {counted(padding, 'position')}, or not at all){aside}"


def every_input(report: schema.Report, *, length: bool = False) -> str:
    """Return the words "every input", followed by the inputs that a proof leaves out. length: whether to name the
    maximum sequence length even if it is the default."""
    certificate = report.certificate
    shown = certificate is not None and (length or certificate.max_length < MAX_LENGTH)
    of = f" of up to {counted(certificate.max_length, 'position')}" if certificate is not None and shown else ""
    return f"every input{of}{input_exceptions(report.padding, report.family, report.model_class)}{states_aside(report)}"


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
    most = f"has a mean |x| of at most {MOST_MEAN:,.0f}" if known.projector.layer_norm_eps is not None else "is finite"
    return (
        f"what the vision tower puts into the residual stream, if the tower's output {most}",
        f"what happens inside the vision tower, which is carried over as it is{ran}",
    )


def has_blind_padding(family: str | None) -> bool:
    known_family = named(family)
    return known_family is None or known_family.blind_padding


def padding_advice(report: schema.Report) -> str:
    title = "the transformers class" if (family := named(report.family)) is None else f"{family.title} in transformers"
    if report.padding == 0:
        if not has_blind_padding(report.family):
            return ""
        return (
            "under eager attention in fp16, left padding and padding beyond a sliding window can make their row NaN;"
            " use SDPA, where the class has it, or run only rows of one length together"
        )
    why = f"{title} masks with −inf in fp16"
    filled = "; encoder_attentions are NaN at the padding that transformers adds to fill a row's last block"
    if report.padding is None:
        return f"every padded row is NaN: {why}; run only rows of one length together{filled}"
    least = counted(report.padding, "position")
    enough = f"pad the longest row by {least}, on the right"
    return f"a padded row with fewer than {least} of padding can be NaN: {why}; {enough}{filled}"
