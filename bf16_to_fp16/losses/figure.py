"""A loss curve with its events drawn in."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import Any

from ..svg import both_schemes
from .events import Curve, Event, ScaleCollapse

FACTS = {
    "svg": {"Date": None, "Creator": "bf16-to-fp16", "Format": None, "Type": None},
    "png": {"Software": "bf16-to-fp16"},
    "pdf": {"Creator": "bf16-to-fp16"},
}
"""What a picture's own metadata say, by its format: that this program drew it, and so may replace it."""

_COLOURS = {
    "Spike": "#d62728",
    "Divergence": "#8c1d40",
    "Plateau": "#7f7f7f",
    "ResumeBump": "#ff7f0e",
    "ScaleCollapse": "#9467bd",
}


def curve_svg(curve: Curve, found: Sequence[Event], title: str = "") -> str:
    """Return the curve as SVG for light and dark, events shaded and named, with the loss scale below where one was
    logged."""
    target = io.StringIO()
    draw_curve(curve, found, target, title, format="svg")
    return both_schemes(target.getvalue())


def draw_curve(curve: Curve, found: Sequence[Event], target: Any, title: str = "", *, format: str) -> None:
    """Draw what ``curve_svg`` returns, in its light colours, to a path or an open file, as "svg", "png" or "pdf"."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    scaled = [(step, scale) for step, scale in zip(curve.steps, curve.scales, strict=True) if scale]
    # The text of an SVG has the font of the page that it is on.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "losses", "font.size": 9}):
        figure = Figure(figsize=(7.5, 4.2 if scaled else 3.2), layout="constrained")
        rows, heights = (2, [3, 1]) if scaled else (1, [1])
        axes: list[Any] = [*figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]]
        axes[0].plot(curve.steps, curve.losses, linewidth=0.8, color="#1f77b4")
        axes[0].set_ylabel("loss")
        if title:
            axes[0].set_title(title)
        known = [loss for loss in curve.losses if math.isfinite(loss)]
        lost = [step for step, loss in zip(curve.steps, curve.losses, strict=True) if not math.isfinite(loss)]
        if lost:  # at the lower edge, since they have no height
            edge = {"transform": axes[0].get_xaxis_transform(), "color": "#d62728", "markersize": 4}
            axes[0].plot(lost, [0.02] * len(lost), "x", label="no number", **edge)
        if known and max(known) > 20 * min(known) > 0:
            axes[0].set_yscale("log")
        if scaled:
            axes[1].plot([step for step, _ in scaled], [scale for _, scale in scaled], linewidth=0.8, color="#1f77b4")
            axes[1].set_yscale("log", base=2)
            axes[1].set_ylabel("loss scale")
        axes[-1].set_xlabel("step")
        named: set[str] = set()
        least = (max(curve.steps) - min(curve.steps)) / 400  # a short event would not be seen
        for event in found:
            end = max(curve.steps) if event.end is None else event.end
            label = None if event.kind in named else re.sub(r"(?<=[a-z])(?=[A-Z])", " ", event.kind).lower()
            named.add(event.kind)
            span = {"color": _COLOURS[event.kind], "alpha": 0.25, "label": label}
            axis = axes[-1 if isinstance(event, ScaleCollapse) else 0]
            axis.axvspan(event.start, max(end, event.start + least), **span)
        for axis in axes:
            if axis.get_legend_handles_labels()[1]:
                axis.legend(loc="upper right", fontsize=7)
        figure.savefig(target, format=format, dpi=150, metadata=FACTS[format])
