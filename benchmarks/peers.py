"""What people do today to run such checkpoints in fp16, against converting them, on the shipped demo checkpoints.

python benchmarks/peers.py
python benchmarks/peers.py --picture docs/before_after.svg

Each way is run on the built-in probe and the shipped held-out text: values that are inf, NaN or saturated inside the
model, KL to the source's fp32 logits, share of tokens with the same best id, bytes of the parameters. "Halving" is what
published scripts do: ``wo`` and ``wi`` (Pegasus: ``fc1`` and ``fc2``) of every layer are halved until the logits of a
greeting and of random strings, or of everything that is run here, are finite in fp16.
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
import string
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from bf16_to_fp16 import convert
from bf16_to_fp16.auditing.fidelity import compared, fidelity, output_on
from bf16_to_fp16.auditing.regimes import audit_model
from bf16_to_fp16.run.probe import Batch, audit_batches, run_batch
from bf16_to_fp16.run.products import FastProducts
from bf16_to_fp16.run.stock import load, load_config
from bf16_to_fp16.svg import follow_schemes
from bf16_to_fp16.wording import counted

DATA = Path(str(files("bf16_to_fp16") / "demo_data"))
NAMES = {"t5-gated-bytes": "T5", "pegasus-bytes": "Pegasus"}


def is_finite(model: Any, inputs: Sequence[Batch] | None) -> bool:
    """Return whether a model's logits are finite on the inputs, else on a greeting and eight random strings."""
    chance = random.Random(0)
    texts = [
        "Hello, my name is Anna and I like apples.",
        *("".join(chance.choices(string.printable, k=64)) for _ in range(8)),
    ]
    ids = [torch.tensor([[byte + 3 for byte in text.encode()] + [1]]) for text in texts]
    if inputs is None:
        outputs = (model(input_ids=each, decoder_input_ids=torch.tensor([[0]])).logits for each in ids)
    else:
        outputs = (run_batch(model, batch).logits for batch in inputs if not batch.generate and batch.head)
    with torch.no_grad(), FastProducts():
        return all(bool(torch.isfinite(logits).all()) for logits in outputs)


def halved(folder: Path, inputs: Sequence[Batch] | None = None) -> tuple[Any, int]:
    """Return the model with its feed-forwards halved until it ``is_finite`` in fp16, and how often."""
    model = load(folder, torch.float16, half=True, attention="sdpa")
    names = (".wi.", ".wi_0.", ".wi_1.", ".wo.", ".fc1.", ".fc2.")
    times = 0
    while not is_finite(model, inputs) and times < 16:
        times += 1
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if any(part in name for part in names):
                    weight.mul_(0.5)
    return model, times


def under_autocast(model: Any) -> Any:
    """Return the model with its forward under fp16 autocast, as a training loop or a server wraps it."""
    plain = model.forward

    @functools.wraps(plain)
    def forward(*given: Any, **named: Any) -> Any:
        with torch.autocast("cpu", torch.float16):
            return plain(*given, **named)

    model.forward = forward
    return model


def row(what: str, model: Any, regime: str, reference: Any, inputs: Sequence[Batch]) -> str:
    """Return a line of the table: a way to run the model, and what that gives."""
    size = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6
    # Autocast on its own wraps the forward while the audit looks.
    result = audit_model(copy.deepcopy(model), inputs, regime=regime, attention=("eager",)) if regime else None
    broken = "not fp16" if result is None else f"{result.nonfinite:,} / {result.saturated:,}"
    runs = (reference, under_autocast(model) if regime == "amp" else model)
    with torch.no_grad():
        expected, found = ([output_on(batch, run_batch(m, batch)) for batch in compared(inputs)] for m in runs)
    close = fidelity(expected, None, found, probabilities=True)
    kl = "not finite" if close.kl_fp16 == float("inf") else f"{close.kl_fp16:.1e}"
    return f"| {what} | {broken} | {kl} | {100 * (close.top1_fp16 or 0):.1f}% | {size:.1f} |"


def compare(name: str) -> None:
    """Print the table of one checkpoint."""
    folder = DATA / name
    inputs = audit_batches(load_config(folder), folder, str(DATA / "held_out.txt"))
    reference = load(folder, torch.float32)
    print(f"\n| {NAMES[name]} | inf, NaN / saturated | KL to fp32 | same best token | MB |\n|---|---|---|---|---|")
    print(row("source in bf16", load(folder, torch.bfloat16), "", reference, inputs))
    print(row("stock fp16: `wo` in fp32, blocks clamp", load(folder, torch.float16), "stock", reference, inputs))
    print(row("`.half()`", load(folder, torch.float16, half=True), "half", reference, inputs))
    print(row("fp16 autocast (AMP)", load(folder, torch.float32), "amp", reference, inputs))
    for what, looked_at in (("a few strings are finite", None), ("all of these inputs are finite", inputs)):
        half, times = halved(folder, looked_at)
        print(row(f"halved {counted(times, 'time')}, until {what}; `.half()`", half, "half", reference, inputs))
    with tempfile.TemporaryDirectory() as beside:
        out = Path(beside) / name
        convert(folder, out, data=str(DATA / "held_out.txt"))
        print(row("converted, `.half()`", load(out, torch.float16, half=True), "half", reference, inputs), flush=True)


def draw(picture: Path) -> None:
    """Write the largest values of every layer before and after converting the T5 demo, as an SVG."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    from bf16_to_fp16.report.figures import SERIES, points

    with tempfile.TemporaryDirectory() as beside:
        report = convert(DATA / "t5-gated-bytes", Path(beside) / "out").report
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "before-after", "font.size": 10}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.9), sharey=True, layout="constrained")
    colours = ("tab:blue", "tab:purple", "tab:orange", "tab:green")
    for axis, stack in zip(axes, ("encoder", "decoder"), strict=True):
        found = points(report["signals"], stack, report["family"])
        for series, colour in zip(SERIES, colours, strict=True):
            mine = [p for p in found if p.series is series]
            x, look = [p.x for p in mine], {"color": colour, "marker": series.marker, "markersize": 4}
            axis.plot(x, [p.before for p in mine], "--", linewidth=1, markerfacecolor="white", **look)
            axis.plot(x, [p.after for p in mine], "-", linewidth=1.8, label=series.name, **look)
        axis.axhspan(65504, 2.0**20, color="tab:red", alpha=0.1, linewidth=0)
        axis.axhline(65504, color="tab:red", linewidth=1.5)
        axis.set_yscale("log", base=2)
        axis.set_ylim(1, 2.0**20)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_xlabel(f"{stack} block")
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("largest |x|")
    axes[0].text(0, 65504 * 1.2, "65504", color="tab:red", va="bottom")
    handles, labels = axes[0].get_legend_handles_labels()
    title = "dashed: as trained, solid: converted"
    figure.legend(handles, labels, loc="outside lower center", ncols=2, title=title)
    figure.savefig(picture, metadata={"Date": None}, facecolor="white")
    follow_schemes(picture)


def main() -> None:
    """Print the tables, or draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, help="draw before and after into this SVG instead")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.picture is not None:
        draw(given.picture)
        return
    for name in NAMES:
        compare(name)


if __name__ == "__main__":
    main()
