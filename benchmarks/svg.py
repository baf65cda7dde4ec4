"""Matplotlib's SVGs made to follow light and dark: on their own, as a README shows them, and within a page."""

from __future__ import annotations

from pathlib import Path

PAPER, INK, GRID = "#15171b", "#e6e8eb", "#4a505b"

# Inline styles of matplotlib can only be overruled as important; what has no fill of its own inherits the root's.
DARK = f"""<style>@media (prefers-color-scheme: dark) {{
svg {{ fill: {INK}; }}
[style*="fill: #ffffff"] {{ fill: {PAPER} !important; }}
[style*="fill: #000000"] {{ fill: {INK} !important; }}
[style*="stroke: #000000"] {{ stroke: {INK} !important; }}
[style*="stroke: #ffffff"] {{ stroke: {PAPER} !important; }}
[style*="stroke: #b0b0b0"], [style*="stroke: #cccccc"] {{ stroke: {GRID} !important; }}
}}</style>
"""


def both_schemes(svg: str) -> str:
    """Return an SVG of matplotlib, of its default black on white, with the colours that it has on a dark screen.

    One that has them already is returned as it is. Raises ValueError for what is no SVG.
    """
    if DARK in svg:
        return svg
    end = svg.index(">", svg.index("<svg")) + 1
    return f"{svg[:end]}\n{DARK}{svg[end:].lstrip()}"


def follow_schemes(path: Path) -> None:
    """Give an SVG that matplotlib has saved its dark colours."""
    path.write_text(both_schemes(path.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")
