"""What people do today to run such checkpoints in fp16, against converting them, on the shipped demo checkpoints.

    python benchmarks/peers.py
    python benchmarks/peers.py --picture docs/before_after.svg

Each way is run on the built-in probe and the shipped held-out text: values that are inf, NaN or saturated inside the
model, KL to the source's fp32 logits, share of tokens with the same best id, bytes of the parameters; and on held-out
examples: the loss, the bytes that a training step keeps for its backward pass, and the time of a forward pass, by the
CPU's own kernels, in times of that in fp32. "Halving" is what published scripts do: ``wo`` and ``wi`` (Pegasus: ``fc1``
and ``fc2``) of every layer are halved until the logits of everything that is run here are finite in fp16.
"Feed-forward out of autocast" is transformers' pull request 10956: ``T5LayerFF`` computes in fp32 where everything else
is under autocast.
"""

from __future__ import annotations

import argparse
import copy
import math
import re
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from models import DEMO, DEMOS, demo_corpus
from optimizer import seconds
from results import print_header, print_row
from transformers.models.t5.modeling_t5 import T5LayerFF

from bf16_to_fp16 import convert
from bf16_to_fp16.finetuning.corpus import TrainingBatch
from bf16_to_fp16.measuring.batch import Batch, run_batch
from bf16_to_fp16.measuring.fidelity import compared, fidelity, output_on
from bf16_to_fp16.measuring.probe import audit_batches
from bf16_to_fp16.measuring.products import FastProducts
from bf16_to_fp16.measuring.regimes import audit_model
from bf16_to_fp16.measuring.stock import load, load_config
from bf16_to_fp16.wording import counted

TEXTS = str(DEMO / "held_out.txt")
FOLDERS = {"T5": DEMOS["T5"], "Pegasus": DEMOS["Pegasus"]}


@torch.no_grad()
def halved(folder: Path, inputs: Sequence[Batch]) -> tuple[Any, int]:
    """Return the model with its feed-forwards halved until its logits are finite in fp16, and how often."""
    model, times = load(folder, torch.float16, half=True, attention="sdpa"), 0
    with_logits = [batch for batch in inputs if not batch.generate and batch.head]
    with FastProducts():
        while times < 16 and not all(bool(run_batch(model, b).logits.isfinite().all()) for b in with_logits):
            times += 1
            for name, weight in model.named_parameters():
                if re.search(r"\.(wi|wi_0|wi_1|wo|fc1|fc2)\.", name):
                    weight.mul_(0.5)
    return model, times


def under_autocast(model: Any) -> Any:
    """Return the model with its forward under autocast: of a class of its own, so that a copy has it too."""
    plain = type(model)

    @wraps(plain.forward)
    def forward(self: Any, *given: Any, **named: Any) -> Any:
        with torch.autocast("cpu", torch.float16):
            return plain.forward(self, *given, **named)

    model.__class__ = type(plain.__name__, (plain,), {"forward": forward})
    return model


class FeedForwardInFp32(T5LayerFF):
    """A feed-forward with its norm and residual that autocast does not reach."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden_states.device.type, enabled=False):
            result: torch.Tensor = super().forward(hidden_states)
        return result


def without_feed_forwards(model: Any) -> Any:
    for module in model.modules():
        if type(module) is T5LayerFF:
            module.__class__ = FeedForwardInFp32
    return model


def kept(model: Any, batch: TrainingBatch) -> int:
    """Return the bytes, parameters left out, that a forward pass keeps for its backward."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**batch.inputs()).loss  # which must outlive the sum, or storages would be used again
        found = sum(size for place, size in storages.items() if place not in parameters)
    del loss
    return found


def compare(name: str) -> None:
    folder = FOLDERS[name]
    config, reference = load_config(folder), load(folder, torch.float32)
    inputs, held_out = audit_batches(config, folder, TEXTS), demo_corpus(folder, config).held_out(32)
    first = held_out[0]
    print()
    columns = "inf, NaN / saturated", "KL to fp32", "same best token", "held-out loss", "MB", "MB kept for backward"
    print_header(name, *columns, "time")

    def show(what: str, model: Any, regime: str) -> None:
        # Autocast on its own wraps the forward while the audit looks.
        result = audit_model(copy.deepcopy(model), inputs, regime=regime, attention=("eager",)) if regime else None
        run = under_autocast(model) if regime == "amp" else model
        with torch.no_grad():
            loss = statistics.mean(float(run(**batch.inputs()).loss) for batch in held_out)
            expected, found = ([output_on(b, run_batch(m, b)) for b in compared(inputs)] for m in (reference, run))
            times = [min(seconds(partial(m, **first.inputs()), "cpu") for _ in range(5)) for m in (run, reference)]
        close = fidelity(expected, None, found, probabilities=True)
        print_row(
            what,
            "not fp16" if result is None else f"{result.nonfinite:,} / {result.saturated:,}",
            "not finite" if close.kl_fp16 == math.inf else f"{close.kl_fp16:.1e}",
            f"{100 * (close.top1_fp16 or 0):.1f}%",
            f"{loss:.3f}" if math.isfinite(loss) else "not finite",
            f"{sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6:.1f}",
            f"{kept(run, first) / 1e6:.0f}",
            f"{times[0] / times[1]:.1f}",
        )

    show("source in fp32", load(folder, torch.float32), "")
    show("source in bf16", load(folder, torch.bfloat16), "")
    show("stock fp16: `wo` in fp32, blocks clamp", load(folder, torch.float16), "stock")
    show("`.half()`", load(folder, torch.float16, half=True), "half")
    show("fp16 autocast (AMP)", load(folder, torch.float32), "amp")
    if name != "Pegasus":
        show("AMP, feed-forwards out of autocast", without_feed_forwards(load(folder, torch.float32)), "amp")
    half, times = halved(folder, inputs)
    show(f"halved {counted(times, 'time')}, until all of these inputs are finite; `.half()`", half, "half")
    with tempfile.TemporaryDirectory() as beside:
        convert(folder, out := Path(beside) / "out", data=TEXTS)
        show("converted, AMP", load(out, torch.float32), "amp")
        show("converted, `.half()`", load(out, torch.float16, half=True), "half")


def draw(picture: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    from bf16_to_fp16.report.figures import SERIES, signal_points
    from bf16_to_fp16.report.schema import SignalEntry, read

    with tempfile.TemporaryDirectory() as beside:
        report = convert(FOLDERS["T5"], Path(beside) / "out").report
    signals = [read(SignalEntry, signal) for signal in report["signals"]]
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "before-after", "font.size": 10}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.9), sharey=True, layout="constrained")
    colours = ("tab:blue", "tab:purple", "tab:orange", "tab:green", "tab:brown")
    for axis, stack in zip(axes, ("encoder", "decoder"), strict=True):
        found = signal_points(signals, stack)
        for series, colour in zip(SERIES, colours, strict=True):
            mine = [p for p in found if p.series is series]
            x, look = [p.x for p in mine], {"color": colour, "marker": series.marker, "markersize": 4}
            axis.plot(x, [p.upper for p in mine], "--", linewidth=1, markerfacecolor="white", **look)
            axis.plot(x, [p.lower for p in mine], "-", linewidth=1.8, label=series.name, **look)
        axis.axhspan(65504, 2.0**20, color="tab:red", alpha=0.1, linewidth=0)
        axis.axhline(65504, color="tab:red", linewidth=1.5)
        axis.set_yscale("log", base=2)
        axis.set(ylim=(1, 2.0**20), xlabel=f"{stack} block")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("largest |x|")
    axes[0].text(0, 65504 * 1.2, "65504", color="tab:red", va="bottom")
    look = {"loc": "outside lower center", "ncols": 2, "title": "dashed: as trained, solid: converted"}
    figure.legend(*axes[0].get_legend_handles_labels(), **look)
    figure.savefig(picture, metadata={"Date": None}, facecolor="white")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, help="draw before and after into this SVG instead")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.picture is not None:
        draw(given.picture)
    else:
        for name in FOLDERS:
            compare(name)


if __name__ == "__main__":
    main()
