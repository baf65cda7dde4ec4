"""The report's results in Markdown, shared by the card and the page."""

from __future__ import annotations

import re
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..families.known import named
from ..families.older_versions import is_older_key
from ..wording import counted, magnitude, percent, power, scientific
from . import coverage, facts, sections, uses
from .schema import Report
from .screen import Table

MOST_UNCERTIFIED = 6  # sites without a proof that are listed; the report has all


def results_text(report: Report, *, on_page: bool = False) -> str:
    """Return a report's results as Markdown. on_page: whether to leave out the verdict, which the page's header has."""
    unproven = report.uncertified
    hub_id, revision = origin(report)
    close, run = report.fidelity, report.finetune
    reference = "finetuned model in fp32" if run else close.reference if close is not None else ""
    names = "the same in bf16" if run else "source in bf16", "output in fp16" if on_page else "this in fp16"
    template = templates().get_template("results.md.jinja")
    return template.render(
        report=report,
        on_page=on_page,
        hub_id=hub_id,
        revision=revision,
        regimes=Table(sections.REGIME_COLUMNS, list(report.regimes.items())),
        tiers=Table(sections.TIER_COLUMNS, facts.tier_rows(report)),
        unsafe=sections.unsafe_tables(report),
        unproven=Table(sections.UNPROVEN_COLUMNS, unproven[:MOST_UNCERTIFIED]),
        unproven_count=len(unproven),
        hidden_unproven=max(0, len(unproven) - MOST_UNCERTIFIED),
        remedies=[] if report.next else list(dict.fromkeys(site.remedy for site in unproven)),
        fidelity=sections.closeness_table(close, reference, *names),
    )


def changes_text(report: Report) -> str:
    run = report.finetune
    evaluated = (each.get("held_out_loss") for each in run.evaluations) if run is not None else ()
    losses = [loss for loss in evaluated if isinstance(loss, (int, float))]
    kept = None if run is None else run.fidelity
    moved = sections.closeness_table(kept, "original in fp32", "original in bf16", "this in fp16")
    template = templates().get_template("changes.md.jinja")
    return template.render(report=report, losses=losses, moved=moved) if report.plan else ""


@cache
def templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("bf16_to_fp16.report"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"prose": prose, "span": span, "oneline": oneline, "markdown": markdown}
    environment.globals |= {"coverage": coverage, "facts": facts, "sections": sections, "uses": uses}
    environment.globals |= {"notice": notice, "counted": counted, "percent": percent, "magnitude": magnitude}
    environment.globals |= {"power": power, "scientific": scientific, "is_older_key": is_older_key, "named": named}
    return environment


def markdown(table: Table) -> str:
    lines = [
        [prose(column.title) for column in table.columns],
        ["--:" if column.css == "n" else "---" for column in table.columns],
    ]
    for line in table.lines():
        cells = zip(line, table.columns, strict=True)
        lines.append([span(text) if column.css == "site" else prose(text) for text, column in cells])
    return "\n".join(f"|{'|'.join(line)}|" if line[0] == "---" else f"| {' | '.join(line)} |" for line in lines)


def notice(report: Report) -> str:
    head, _, rest = facts.verdict_sentence(report).partition(": ")
    verdict = f"**{prose(head)}.** {prose(rest[:1].upper() + rest[1:])}"
    words, colon, command = report.next.partition(": ")
    return f"{verdict} Next: {prose(words)}{colon}{span(command) if colon else ''}" if report.next else verdict


def origin(report: Report) -> tuple[str | None, str | None]:
    """Return the Hub id and commit of the report's source; both are None for a local folder."""
    # After a finetune the source is the original.
    path, revision = report.source.path, report.source.revision
    return (None, None) if path is None or revision is None else (path.partition("@")[0], revision)


def oneline(value: str) -> str:
    return " ".join(str(value).split())


def prose(value: object) -> str:
    return re.sub(r"([\\`*_\[\]<>|&])", r"\\\1", oneline(str(value)))


def span(value: object) -> str:
    """Return text as a Markdown code span that no character in the text can end, even inside a table."""
    line = oneline(str(value)).replace("|", r"\|")
    longest = max((len(run) for run in re.findall("`+", line)), default=0)
    fence, pad = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{pad}{line}{pad}{fence}"
