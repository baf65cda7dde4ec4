"""Draw the bracket of a checkpoint, layer by layer: the worst value that an attack found, the bound, fp16's limit.

bf16-to-fp16 convert bf16_to_fp16/demo_data/t5-gated-bytes out
bf16-to-fp16 audit out --regime half --attack 120 --json report.json
python benchmarks/bracket.py report.json benchmarks/bracket.svg
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from svg import follow_schemes

KINDS = {"residual": "residual stream", "product": "gated product", "scores": "attention scores"}
LIMIT = 65504


def layers(sites: list[Mapping[str, Any]], stack: str, kind: str) -> dict[int, tuple[float, float]]:
    """Return for each layer of a stack the largest (worst found, bound) of a kind of signal."""
    found: dict[int, tuple[float, float]] = {}
    for site in sites:
        place = re.search(rf"{stack}\.(?:block|layers)\.(\d+)", site["name"])
        if place and site["kind"] == kind and site["observed"]:
            layer = int(place[1])
            old = found.get(layer, (0.0, 0.0))
            found[layer] = (max(old[0], site["observed"]), max(old[1], site["bound"]))
    return found


def main() -> None:
    """Read the report and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="the JSON of audit --attack")
    parser.add_argument("picture", type=Path, help="the SVG to write")
    given = parser.parse_args()
    sites = json.loads(given.report.read_text(encoding="utf-8"))["certificate"]["sites"]
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "bracket", "font.size": 10}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axis, stack in zip(axes, ("encoder", "decoder"), strict=True):
        for offset, (colour, (kind, label)) in enumerate(
            zip(("tab:blue", "tab:orange", "tab:green"), KINDS.items(), strict=True)
        ):
            for layer, (worst, bound) in sorted(layers(sites, stack, kind).items()):
                x = layer + (offset - 1) * 0.22
                axis.plot([x, x], [worst, bound], color=colour, linewidth=2, label=label if layer == 0 else None)
                axis.plot(x, worst, "o", color=colour, markersize=6)
                axis.plot(x, bound, "_", color=colour, markersize=12, markeredgewidth=2)
        axis.axhline(LIMIT, color="tab:red", linewidth=1.5)
        axis.set_yscale("log", base=2)
        axis.set_xticks(range(1 + max(layers(sites, stack, "residual"), default=0)))
        axis.set_xlabel(f"{stack} layer")
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("largest |x|")
    axes[0].set_ylim(top=2.0**18)
    axes[0].text(-0.3, LIMIT * 1.2, "65504", color="tab:red", va="bottom")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, title="dot: worst found, bar: bound")
    figure.savefig(given.picture, metadata={"Date": None}, facecolor="white")
    follow_schemes(given.picture)


if __name__ == "__main__":
    main()
