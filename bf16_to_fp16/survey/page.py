"""A survey as one HTML page with nothing outside it but the pages of its checkpoints, in the style of a report's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from ..numerics import FP16_MAX
from ..report.figures import REACHES, Reach, draw_reaches
from ..report.page import jinja_environment
from ..wording import bytes_in_words, counted, headroom, headroom_by_bound, known, listed, reached, scientific
from .rows import Row

PARAMETER_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))


def render(rows: Sequence[Row], folders: Sequence[str] = ()) -> str:
    """Return the page of a survey; folders: where the pages of each row lie, relative to this one."""
    template = jinja_environment().get_template("survey.html.jinja")
    places = folders or [""] * len(rows)
    return template.render(
        rows=[shown(row, folder) for row, folder in zip(rows, places, strict=True)],
        figures=figures(rows),
        svg=picture(rows),
        series=REACHES,
        sentence=sentence(rows),
    )


def name_of(row: Row) -> str:
    """Return a checkpoint with the folder inside it."""
    return "/".join(filter(None, (row.source, row.subfolder)))


def sentence(rows: Sequence[Row]) -> str:
    """Return in a sentence how many were done."""
    ended = sum(row.ended for row in rows)
    failed, left = (sum(row.status == status for row in rows) for status in ("failed", "waiting"))
    said = f"{ended} of {counted(len(rows), 'checkpoint')} surveyed"
    return said + (f", {failed} failed" if failed else "") + (f", {left} to do" if left else "") + "."


def figures(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Return the headline: name, value and note of each figure."""
    audited, converted = ([row for row in rows if row.status in among] for among in (("done", "audit only"), ("done",)))
    broken, safe = (sum(bool(row.source_broken) for row in audited), sum(row.verdict == "safe" for row in converted))
    certified = sum(row.verdict == "safe" and row.proof == "certified" for row in converted)
    return [
        ("overflow as published", f"{broken} of {len(audited)}", "in stock, amp or half, on the probe's inputs"),
        ("safe after conversion", f"{safe} of {len(converted)}", "of the families that can be converted"),
        ("of them for every input", f"{certified} of {len(converted)}", "certified, by bounds from the weights"),
    ]


def shown(row: Row, folder: str) -> dict[str, Any]:
    """Return what the table shows of a checkpoint."""
    broken = row.source_broken
    about = [row.architecture or "", "" if row.parameters is None else f"{parameters(row.parameters)} parameters"]
    about.append((row.revision or "")[:12])
    return {
        "name": name_of(row),
        "about": " · ".join(filter(None, about)),
        "status": row.status,
        "error": row.error,
        "before": None if row.source_verdict is None else f"in {listed(broken)}" if broken else "on what was run",
        "proven": None if row.source_proven is None else "certified" if row.source_proven else "not certified",
        "broken": bool(broken),
        "largest": None if row.source_site is None else reached(row.source_largest),
        "site": row.source_site,
        "verdict": row.verdict,
        "proof": row.proof,
        "target": row.target,
        "headroom": "" if row.headroom_bits is None else headroom(row.headroom_bits),
        "bound": "" if row.bound_bits is None else headroom_by_bound(row.bound_bits),
        "tiers": [name if proof == "certified" else f"{name} (observed)" for name, proof in row.tiers.items()],
        "fidelity": None if row.fidelity in (None, "kl") else row.fidelity,
        "bf16": "" if row.fidelity is None else scientific(row.error_bf16),
        "fp16": "" if row.fidelity is None else scientific(row.error_fp16),
        "seconds": "" if row.seconds is None else spent(row.seconds),
        "memory": "" if row.peak_bytes is None else bytes_in_words(row.peak_bytes),
        "audit": f"{folder}/audit.html" if folder and row.source_verdict else None,
        "report": f"{folder}/fp16_report.html" if folder and row.verdict else None,
    }


def spent(seconds: float) -> str:
    """Return a time that was measured, in seconds up to ten minutes."""
    return f"{seconds:,.0f} s" if seconds < 600 else f"{seconds / 60:,.0f} min"


def parameters(number: int) -> str:
    """Return a number of parameters with three digits: "248 M"."""
    unit = next(((size, name) for size, name in PARAMETER_UNITS if number >= size), None)
    return str(number) if unit is None else f"{number / unit[0]:.3g} {unit[1]}"


def picture(rows: Sequence[Row]) -> Markup | None:
    """Return the picture of what has been surveyed, None where nothing has."""
    found = [
        Reach(
            name_of(row),
            None if row.source_largest is None else over(row.source_largest),
            None if row.headroom_bits is None else -row.headroom_bits,
            None if row.bound_bits is None else -row.bound_bits,
        )
        for row in rows
        if row.source_verdict is not None
    ]
    if not found:
        return None
    return draw_reaches(
        found, "How far the values of each checkpoint are from fp16's limit, as published and converted"
    )


def over(value: float) -> float:
    """Return how many bits a magnitude is over 65504; half a bit for an overflow whose size is not known."""
    size = known(value)
    return 0.5 if size is None else math.log2(max(size, 2.0**-24) / FP16_MAX)
