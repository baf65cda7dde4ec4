"""What people do today to run such checkpoints in fp16, against converting them, on the shipped demo checkpoints.

python benchmarks/peers.py
python benchmarks/peers.py --picture docs/before_after.svg

Each way is run on the built-in probe and the shipped held-out text: values that are inf, NaN or saturated inside the
model, KL to the source's fp32 logits, share of tokens with the same best id, bytes of the parameters; and on held-out
examples: the loss, the bytes that a training step keeps for its backward pass, and the time of a forward pass, by the
CPU's own kernels, in times of that in fp32. "Halving" is what published scripts do: ``wo`` and ``wi`` (Pegasus: ``fc1``
and ``fc2``) of every layer are halved until the logits of a greeting and of random strings, or of everything that is
run here, are finite in fp16. "Clamps" are stock code's own: after each part of a block (Pegasus: after each encoder
layer) infinities in an fp16 residual become 64504; without them is what they do. "Feed-forward out of autocast" is
transformers' pull request 10956: ``T5LayerFF`` computes in fp32 where everything else is under autocast.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import random
import statistics
import string
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from svg import follow_schemes
from torch.overrides import TorchFunctionMode
from transformers.models.t5.modeling_t5 import T5LayerFF

from bf16_to_fp16 import convert
from bf16_to_fp16.auditing.fidelity import compared, fidelity, output_on
from bf16_to_fp16.auditing.regimes import audit_model
from bf16_to_fp16.finetuning.corpus import Corpus, TrainingBatch
from bf16_to_fp16.finetuning.recipe import Data
from bf16_to_fp16.run.batch import Batch, run_batch
from bf16_to_fp16.run.probe import audit_batches
from bf16_to_fp16.run.products import FastProducts
from bf16_to_fp16.run.stock import load, load_config
from bf16_to_fp16.wording import counted

DATA = Path(str(files("bf16_to_fp16") / "demo_data"))
ROOT = Path(__file__).parent.parent
NAMES = {"t5-gated-bytes": "T5", "pegasus-bytes": "Pegasus"}
HARD = "t5-hard-bytes"
"""A checkpoint whose scores overflow, which no way of running the feed-forwards can mend."""


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


def wrapped(model: Any, context: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Return the model with its forward in a context: of a class of its own, so that a copy has it too."""
    plain = type(model)

    @functools.wraps(plain.forward)
    def forward(self: Any, *given: Any, **named: Any) -> Any:
        with context():
            return plain.forward(self, *given, **named)

    model.__class__ = type(plain.__name__, (plain,), {"forward": forward})
    return model


def under_autocast(model: Any) -> Any:
    """Return the model with its forward under fp16 autocast, as a training loop or a server wraps it."""
    return wrapped(model, lambda: torch.autocast("cpu", torch.float16))


class FeedForwardInFp32(T5LayerFF):
    """A feed-forward with its norm and residual that autocast does not reach."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after it."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            result: torch.Tensor = super().forward(hidden_states)
        return result


def without_feed_forwards(model: Any) -> Any:
    """Return the model with every ``T5LayerFF`` out of autocast."""
    for module in model.modules():
        if type(module) is T5LayerFF:
            module.__class__ = FeedForwardInFp32
    return model


class NoClamps(TorchFunctionMode):
    """Context manager under which fp16 tensors are not clamped."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, or give back what it was to clamp."""
        if func is torch.clamp and args[0].dtype == torch.float16:
            return args[0]
        return func(*args, **(kwargs or {}))


def without_clamps(model: Any) -> Any:
    """Return the model with its forward under ``NoClamps``."""
    return wrapped(model, NoClamps)


@dataclass(frozen=True)
class Peers:
    """One checkpoint: its model in fp32, what is run, and held-out examples of the objective that it was trained on."""

    reference: Any
    inputs: Sequence[Batch]
    held_out: Sequence[TrainingBatch]

    def loss(self, model: Any) -> float:
        """Return the mean loss of the held-out batches."""
        with torch.no_grad():
            return statistics.mean(float(model(**batch.inputs()).loss) for batch in self.held_out)

    def seconds(self, model: Any) -> float:
        """Return the least processor time of a forward pass of the first held-out batch, of five."""
        found = []
        with torch.no_grad():
            for _ in range(5):
                begin = time.process_time()
                model(**self.held_out[0].inputs())
                found.append(time.process_time() - begin)
        return min(found)

    def kept(self, model: Any) -> int:
        """Return the bytes, parameters left out, that a forward of the first held-out batch keeps for its backward."""
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        storages: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(**self.held_out[0].inputs()).loss
            found = sum(size for place, size in storages.items() if place not in parameters)
        del loss
        return found


def row(what: str, model: Any, regime: str, peers: Peers) -> str:
    """Return a line of the table: a way to run the model, and what that gives."""
    inputs, reference = peers.inputs, peers.reference
    size = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6
    # Autocast on its own wraps the forward while the audit looks.
    result = audit_model(copy.deepcopy(model), inputs, regime=regime, attention=("eager",)) if regime else None
    broken = "not fp16" if result is None else f"{result.nonfinite:,} / {result.saturated:,}"
    runs = (reference, under_autocast(model) if regime == "amp" else model)
    size_kept, seconds = peers.kept(runs[1]) / 1e6, peers.seconds(runs[1]) / peers.seconds(reference)
    loss = peers.loss(runs[1])
    with torch.no_grad():
        expected, found = ([output_on(batch, run_batch(m, batch)) for batch in compared(inputs)] for m in runs)
    close = fidelity(expected, None, found, probabilities=True)
    kl = "not finite" if close.kl_fp16 == float("inf") else f"{close.kl_fp16:.1e}"
    shown = "not finite" if not math.isfinite(loss) else f"{loss:.3f}"
    best = f"{100 * (close.top1_fp16 or 0):.1f}%"
    return f"| {what} | {broken} | {kl} | {best} | {shown} | {size:.1f} | {size_kept:.0f} | {seconds:.1f} |"


def held_out(name: str, config: Any) -> list[TrainingBatch]:
    """Return 32 held-out examples, as the checkpoint was trained on them."""
    data = Data(
        path=str(ROOT / "bf16_to_fp16" / "demo_data" / "python-topics.txt.gz"),
        held_out_path=str(DATA / "held_out.txt"),
        input_length=130,
        target_length=62,
        **({"first_sentinel": 383, "noise_density": 0.3, "mean_span_length": 18.0} if name.startswith("t5") else {}),
    )
    return Corpus(data, folder_of(name), config).held_out(32)


def folder_of(name: str) -> Path:
    """Return the folder of a checkpoint."""
    return ROOT / "recipes" / "demo" / HARD if name == HARD else DATA / name


def compare(name: str) -> None:
    """Print the table of one checkpoint."""
    folder = folder_of(name)
    config = load_config(folder)
    inputs = audit_batches(config, folder, str(DATA / "held_out.txt"))
    peers = Peers(load(folder, torch.float32), inputs, held_out(name, config))
    print(
        f"\n| {NAMES.get(name, 'hard T5')} | inf, NaN / saturated | KL to fp32 | same best token | held-out loss |",
        end="",
    )
    print(" MB | MB kept for backward | time |\n|---|---|---|---|---|---|---|---|")

    def show(what: str, model: Any, regime: str) -> None:
        print(row(what, model, regime, peers), flush=True)

    show("source in fp32", load(folder, torch.float32), "")
    show("source in bf16", load(folder, torch.bfloat16), "")
    show("stock fp16: `wo` in fp32, blocks clamp", load(folder, torch.float16), "stock")
    show("`.half()`, with stock code's clamps", load(folder, torch.float16, half=True), "half")
    show("`.half()`, without them", without_clamps(load(folder, torch.float16, half=True)), "half")
    show("fp16 autocast (AMP)", load(folder, torch.float32), "amp")
    if name.startswith("t5"):
        show("AMP, feed-forwards out of autocast", without_feed_forwards(load(folder, torch.float32)), "amp")
    if name == HARD:
        return
    for what, looked_at in (("a few strings are finite", None), ("all of these inputs are finite", inputs)):
        half, times = halved(folder, looked_at)
        show(f"halved {counted(times, 'time')}, until {what}; `.half()`", half, "half")
    with tempfile.TemporaryDirectory() as beside:
        out = Path(beside) / name
        convert(folder, out, data=str(DATA / "held_out.txt"))
        show("converted, AMP", load(out, torch.float32), "amp")
        show("converted, `.half()`", load(out, torch.float16, half=True), "half")


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
    parser.add_argument("--models", nargs="+", choices=[*NAMES, HARD], default=[*NAMES, HARD])
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.picture is not None:
        draw(given.picture)
        return
    for name in given.models:
        compare(name)


if __name__ == "__main__":
    main()
