"""A report as a dictionary that a notebook shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup


class Result(dict[str, Any]):
    """A report as a dictionary; a notebook shows its verdict, its headroom and every site that breaks or lacks a
    proof."""

    def _repr_html_(self) -> str:
        measured = {**self.get("regimes", {}), "certificate": self.get("certificate")}
        rows = [(n, f"{m['headroom_bits']:.1f} bits", f"{len(m['sites'])} sites") for n, m in measured.items() if m]
        rows += [(site["signal"], "unsafe", site["reason"]) for site in self.get("unsafe", ())]
        rows += [(site["name"], f"{site['bound']:.6g}", site["reason"]) for site in self.get("uncertified", ())]
        return fragment(f"{self['verdict']}, {self['proof']}", rows)


def fragment(title: str, rows: Sequence[tuple[str, str, str]]) -> str:
    cells = Markup("").join(Markup("<tr><td>{}</td><td><b>{}</b></td><td>{}</td></tr>").format(*row) for row in rows)
    return str(Markup("<p><b>{}</b></p><table>{}</table>").format(title, cells))
