"""The report as one HTML file that loads nothing and forbids every request. Jinja2 or the Markdown renderer escapes all
text, since it holds names from other people's files."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from jinja2 import Environment
from markdown_it import MarkdownIt
from markupsafe import Markup, escape

from . import figures, text
from .schema import Report
from .site_table import MOST_ROWS, site_columns, site_rows


def write_page(path: Path, report: Report) -> None:
    path.write_text(render(report), encoding="utf-8", errors="backslashreplace", newline="\n")


def render(report: Report) -> str:
    rows = site_rows(report)
    return (
        environment()
        .get_template("page.html.jinja")
        .render(
            report=report,
            results=text.results_text(report, on_page=True),
            changes=text.changes_text(report),
            pictures=figures.before_and_after(report.signals),
            bounds=figures.bound_and_observed(report.certificate) if report.certificate else [],
            columns=site_columns(report),
            rows=rows[:MOST_ROWS],
            hidden=max(0, len(rows) - MOST_ROWS),
            provenance=provenance(report),
        )
    )


def provenance(report: Report) -> list[tuple[str, str]]:
    source, made_with = report.source, report.environment
    rows = [
        ("source", source.path),
        ("sub-folder", source.subfolder),
        ("revision", source.revision),
        ("stored as", source.dtype),
        ("command", report.command),
        *((name, version or "not installed") for name, version in made_with.versions.items()),
        *((f"device of the {part}", ", then ".join(names)) for part, names in made_with.devices.items()),
    ]
    return [(what, value) for what, value in rows if value]


@cache
def environment() -> Environment:
    made = text.environment().overlay(autoescape=True)
    made.filters = made.filters | {"breakable": breakable, "with_command": with_command, "as_html": as_html}
    made.globals = made.globals | {"figures": figures}
    return made


def as_html(text: str) -> Markup:
    return Markup(MarkdownIt("commonmark", {"html": False}).enable("table").render(text))


def breakable(name: object) -> Markup:
    return Markup(re.sub(r"(?<!\d)\.|\.(?!\d)", ".<wbr>", str(escape(str(name)))))


def with_command(said: str) -> Markup:
    words, colon, command = said.partition(": ")
    return Markup("{}: <code>{}</code>").format(words, command) if colon else escape(said)
