"""Render the report as one HTML file that loads nothing and forbids every request. Jinja2 or the Markdown renderer
escapes all text, because it contains names from other people's files."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markdown_it import MarkdownIt
from markupsafe import Markup, escape

from ..results import SiteEntry
from ..wording import headroom_by_bound, infinite
from . import figures, markdown
from .facts import headroom_at
from .schema import Report

MOST_ROWS = 3_000  # rows of the table, by least headroom, so that the page stays under 2 MB


@dataclass(frozen=True)
class SiteRow:
    """A row of the page's table of sites: a site as measured in the ``regime`` (a way of running in fp16) where its
    headroom is least. ``regime`` is "" if nothing ran. ``bound`` is None if the site has none."""

    site: SiteEntry
    regime: str
    bound: float | None

    @property
    def order(self) -> tuple[bool, float]:
        """The sort key: broken sites first, then by least headroom; sites without a limit come last."""
        bits = self.site.headroom_bits
        return not self.site.broken, math.inf if bits is None or math.isnan(bits) else bits

    @property
    def headroom(self) -> str:
        bits = self.site.headroom_bits
        return headroom_by_bound(bits) if bits is not None and not self.regime else headroom_at(self.site)


def sort_value(value: float | None) -> str:
    """Return a number as the page's script sorts it: infinity as 1e308, NaN and None as ""."""
    if value is None or math.isnan(value):
        return ""
    return f"{math.copysign(1e308, value):g}" if infinite(value) else f"{value:.6g}"


def site_rows(report: Report) -> list[SiteRow]:
    bounds = {site.name: site for site in (report.certificate.sites if report.certificate else ())}
    least: dict[str, SiteRow] = {}
    for name, regime in report.regimes.items():
        for site in regime.sites:
            # A site in fp32 needs no bound.
            bound = bounds.get(site.name) if site.limit is not None else None
            row = SiteRow(site, name, None if bound is None else bound.bound)
            if site.name not in least or row.order < least[site.name].order:
                least[site.name] = row
    rows = list(least.values())
    if not report.regimes:
        nothing: dict[str, Any] = {"amax": math.nan, "nonfinite": 0, "saturated": 0, "benign": None}
        rows = [
            SiteRow(SiteEntry(name=s.name, limit=s.limit, headroom_bits=s.headroom_bits, **nothing), "", s.bound)
            for s in bounds.values()
        ]
    return sorted(rows, key=lambda row: row.order)


def write_page(path: Path, report: Report) -> None:
    path.write_text(render(report), encoding="utf-8", errors="backslashreplace", newline="\n")


def render(report: Report) -> str:
    rows = site_rows(report)
    template = page_templates().get_template("page.html.jinja")
    return template.render(
        report=report,
        results=markdown.results_text(report, on_page=True),
        changes=markdown.changes_text(report),
        pictures=figures.before_and_after(report.signals),
        bounds=figures.bound_and_observed(report.certificate) if report.certificate else [],
        rows=rows[:MOST_ROWS],
        hidden=max(0, len(rows) - MOST_ROWS),
    )


@cache
def page_templates() -> Environment:
    environment = markdown.templates().overlay(autoescape=True)
    renderer = MarkdownIt("commonmark", {"html": False}).enable("table")
    filters: dict[str, Any] = {
        "breakable": lambda name: Markup(re.sub(r"(?<!\d)\.|\.(?!\d)", ".<wbr>", str(escape(str(name))))),
        "with_command": with_command,
        "sort_value": sort_value,
        "as_html": lambda text: Markup(renderer.render(text)),
    }
    environment.filters = environment.filters | filters
    environment.globals = environment.globals | {"figures": figures}
    return environment


def with_command(text: str) -> Markup:
    words, colon, command = text.partition(": ")
    return Markup("{}: <code>{}</code>").format(words, command) if colon else escape(text)
