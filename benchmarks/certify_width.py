"""How loose is the certificate? Shows how far its bounds lie above what gradient ascent and whole inputs reach, for
random and trained weights, by width, and draws it.

    python benchmarks/certify_width.py

``--weights`` and ``--widths`` show only some rows, and draw nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import synthetic
import torch
import transformers
from ascent import aims, ascend, certified, forward, watch
from models import ROOT, demo, rounded
from support.adversary import free_norms
from svg import follow_schemes
from torch import Tensor

from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.families.types import Attention, FeedForward
from bf16_to_fp16.rescaling.weights import ModelTensors

PICTURE = ROOT / "benchmarks" / "certify_width.svg"
WIDTHS, KINDS = (64, 128, 256, 512, 1024, 2048), ("random", "outliers", "trained", "demo")
"""Widths of models, and kinds of weights: random, random with neurons that stand out, trained, the shipped ones."""


LINEAR = ("query", "key", "value", "gate", "neuron", "logits")
SIGNALS = ("linears", "scores", "context", "attention output", "product", "feed-forward output", "residual")
"""What the sites of a model are summed up as."""


def signal_of(site: Any, layout: Layout) -> str | None:
    """Return which of ``SIGNALS`` a site is, None for the rest."""
    outputs = {w.output: isinstance(w, Attention) for w in layout.topology if isinstance(w, Attention | FeedForward)}
    if site.name in outputs:
        return "attention output" if outputs[site.name] else "feed-forward output"
    if site.kind in LINEAR:
        return "linears"
    if site.kind == "scores" and site.name.endswith(":scores"):
        return "scores"
    if site.kind == "residual" and ":add" in site.name:
        return "residual"
    return site.kind if site.kind in ("context", "product") else None


def random_width(family: str, d: int, seed: int, *, outliers: bool = False) -> Any:
    """Return a random model of one layer a side with usual shapes: heads of 64, 2.5 or 4 times as many neurons.

    outliers: with neurons that stand out, as in the benchmarks' checkpoints.
    """
    torch.manual_seed(seed)
    size = min(64, d // 2)
    if family == "pegasus":
        config: Any = transformers.PegasusConfig(
            d_model=d,
            encoder_attention_heads=d // size,
            decoder_attention_heads=d // size,
            encoder_layers=1,
            decoder_layers=1,
            encoder_ffn_dim=4 * d,
            decoder_ffn_dim=4 * d,
            vocab_size=512,
            max_position_embeddings=128,
            activation_function="relu",
            scale_embedding=True,
            decoder_start_token_id=0,
            init_std=d**-0.5,
        )
        model: Any = transformers.PegasusForConditionalGeneration(config)
    else:
        config = transformers.T5Config(
            d_model=d,
            d_kv=size,
            num_heads=d // size,
            d_ff=5 * d // 2,
            num_layers=1,
            num_decoder_layers=1,
            vocab_size=512,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
            decoder_start_token_id=0,
        )
        model = transformers.T5ForConditionalGeneration(config)
        model.lm_head.weight = torch.nn.Parameter(torch.randn(512, d) * d**-0.5)
    if outliers:
        for name, weight in model.named_parameters():
            synthetic.stand_out(name, weight.data)
    return rounded(model)


def recipes() -> Any:
    """Return the module that trains the demo checkpoints."""
    if str(ROOT / "recipes") not in sys.path:
        sys.path.insert(0, str(ROOT / "recipes"))
    return importlib.import_module("train_demo")


def trained_width(family: str, d: int, steps: int) -> Any:
    """Return a model trained for ``steps`` on the demo's text with an ordinary initialisation.

    Wider than 256 it has one layer a side and is trained on 4 windows a step instead of 16, or it would take hours.
    """
    import yaml

    train_demo = recipes()
    recipe = yaml.safe_load((ROOT / "recipes" / f"demo_{family}.yaml").read_text(encoding="utf-8"))
    recipe |= {"steps": steps, "inflate": [], "align": [], "report_every": 10**9, "embedding_std": 1.0}
    heads, few = d // 32, d > 256
    recipe |= {"batch": 4} if few else {}
    if family == "pegasus":
        recipe["config"] |= {"encoder_attention_heads": heads, "decoder_attention_heads": heads}
        recipe["config"] |= {"d_model": d, "encoder_ffn_dim": 7 * d // 2, "decoder_ffn_dim": 7 * d // 2}
        recipe["config"] |= {"encoder_layers": 1, "decoder_layers": 1} if few else {}
    else:
        recipe["config"] |= {"d_model": d, "num_heads": heads, "d_ff": 5 * d // 2}
        recipe["config"] |= {"num_layers": 1, "num_decoder_layers": 1} if few else {}
    return rounded(train_demo.train(recipe).float())


def tightness(model: Any, texts: list[dict[str, Tensor]], seed: int, steps: int) -> dict[str, Any]:
    """Return bound / worst found of every site by signal: by gradient ascent at every norm, and by whole inputs.

    Sequences are long enough for every head to look at a position of its own.
    """
    layout = resolve(ModelTensors(model))
    certificate = certified(model, Arithmetic(512))
    r = random.Random(seed)
    heads = max(layout.heads(w) for w in layout.topology if isinstance(w, Attention))
    lengths, wide = (max(6, heads), max(6, heads)), heads > 8
    batch = 10 if wide else 24
    worst: dict[str, float] = {}
    model.set_attn_implementation("eager")
    for round_ in range(1 if wide else 2):
        targets = aims(layout, certificate, batch, lengths, r, 1.0)
        inputs = ascend(model, layout, targets, lengths, seed + round_, steps)

        def free(chosen: Mapping[str, Tensor] = inputs) -> None:
            with free_norms(model, chosen):
                forward(model, layout, batch, lengths)

        for name, amax in watch(model, free, "eager").items():
            worst[name] = max(worst.get(name, 0.0), amax)

    def whole() -> None:
        for text in texts:
            model(**text, use_cache=False)

    seen = watch(model, whole, "eager")
    result: dict[str, Any] = {"free": defaultdict(list), "whole": defaultdict(list)}
    for site in certificate.sites:
        signal = signal_of(site, layout)
        if signal is None:
            continue
        if signal != "residual" and worst.get(site.name, 0.0) > 0:
            result["free"][signal].append(site.bound / worst[site.name])
        if seen.get(site.name, 0.0) > 0:
            result["whole"][signal].append(site.bound / seen[site.name])
    return result


def random_texts(vocabulary: int, seed: int) -> list[dict[str, Tensor]]:
    """Return 64 sequences of 48 random ids on each side, the first ones of a single id."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(4):
        ids = torch.randint(vocabulary, (2, 16, 48), generator=generator)
        ids[:, :4] = ids[:, :4, :1]
        found.append({"input_ids": ids[0], "decoder_input_ids": ids[1]})
    return found


def width(options: argparse.Namespace) -> None:
    """Print and draw how far the bounds lie above the worst that was found, by width.

    ``keep``: a file of rows; those that are there are not computed again, so that a run may be stopped and gone on
    with.
    """
    torch.set_num_threads(1)
    keep, steps, training_steps = options.keep, options.steps, options.training_steps
    known: dict[str, Any] = {}
    if keep is not None and keep.exists():
        known = dict(json.loads(line) for line in keep.read_text(encoding="utf-8").splitlines())
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    print(f"bound / worst found: median, largest over the sites of each signal; load {os.getloadavg()[0]:.1f}\n")
    print(f"| weights | found by | {' | '.join(SIGNALS)} | s |\n|" + "---|" * (len(SIGNALS) + 3))
    limits = {"random": options.largest, "outliers": options.largest, "trained": options.trained, "demo": 128}
    for weights in options.weights or KINDS:
        for family in ("t5", "pegasus"):
            for d in options.widths or WIDTHS:
                if d > limits[weights] or (weights == "demo" and d != 128):
                    continue
                begin, name = time.monotonic(), f"{family} {d} {weights}"
                if name in known:
                    result = known[name]
                else:
                    if weights in ("random", "outliers"):
                        model = random_width(family, d, d, outliers=weights == "outliers")
                        texts = random_texts(512, d)
                    else:
                        model = demo(family, -8) if weights == "demo" else trained_width(family, d, training_steps)
                        texts = trained_texts(family)
                    result = {way: dict(found) for way, found in tightness(model, texts, d, steps).items()}
                    if keep is not None:
                        with open(keep, "a", encoding="utf-8") as file:
                            file.write(json.dumps([name, result]) + "\n")
                rows[weights, family, d] = result
                for way, label in (("free", "any norm input"), ("whole", "whole inputs")):
                    cells = [
                        f"{middle(result[way][s]):.2f}, {max(result[way][s]):.2f}" if result[way].get(s) else ""
                        for s in SIGNALS
                    ]
                    spent = f"{time.monotonic() - begin:.0f}" if way == "free" else ""
                    print(f"| {family} {d} {weights} | {label} | {' | '.join(cells)} | {spent} |", flush=True)
    if not options.weights and not options.widths:
        draw(rows)


def middle(values: list[float]) -> float:
    """Return the median."""
    return sorted(values)[len(values) // 2]


def trained_texts(family: str) -> list[dict[str, Tensor]]:
    """Return the demo's held-out text and random bytes."""
    import yaml

    train_demo = recipes()
    recipe = yaml.safe_load((ROOT / "recipes" / f"demo_{family}.yaml").read_text(encoding="utf-8"))
    held_out = [
        {"input_ids": b["input_ids"], "decoder_input_ids": b["labels"]} for b in train_demo.held_out_batches(recipe)
    ]
    return held_out[:4] + random_texts(384, 0)


def draw(rows: Mapping[tuple[str, str, int], Mapping[str, Any]]) -> None:
    """Draw the medians by width: random weights as lines, trained ones as dots."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "certify"
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True)
    for axis, way, title in (
        (axes[0], "free", "worst found by ascent at every norm"),
        (axes[1], "whole", "worst found by whole inputs"),
    ):
        for number, signal in enumerate(SIGNALS):
            for weights, style in (("random", "-"), ("trained", "o"), ("demo", "*")):
                for family in ("t5", "pegasus"):
                    points = sorted(
                        (d, middle(found[way][signal]))
                        for (w, f, d), found in rows.items()
                        if w == weights and f == family and found[way].get(signal)
                    )
                    if points:
                        fill = "none" if family == "pegasus" else f"C{number}"
                        dashed = "--" if family == "pegasus" and weights == "random" else style
                        axis.plot(
                            *zip(*points, strict=True),
                            dashed,
                            color=f"C{number}",
                            mfc=fill,
                            ms=9 if style == "*" else 5,
                            lw=1.3,
                        )
        axis.set(xscale="log", yscale="log", xlabel="d_model", title=f"bound / {title}")
        axis.title.set_fontsize(10)
        ticks = sorted({d for _, _, d in rows})
        axis.set_xticks(ticks, [str(t) for t in ticks])
        axis.minorticks_off()
        axis.set_yticks([1, 2, 4, 8, 16, 32, 64, 128, 256], ["1", "2", "4", "8", "16", "32", "64", "128", "256"])
        axis.grid(alpha=0.3)
    handles = [plt.Line2D([], [], color=f"C{n}", label=s) for n, s in enumerate(SIGNALS)]
    handles += [
        plt.Line2D([], [], color="k", ls="-", label="T5, random"),
        plt.Line2D([], [], color="k", ls="--", label="Pegasus, random"),
        plt.Line2D([], [], color="k", marker="o", ls="", label="trained (Pegasus open)"),
        plt.Line2D([], [], color="k", marker="*", ls="", label="demo checkpoints"),
    ]
    figure.legend(handles=handles, loc="center right", fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 0.8, 1))
    figure.savefig(PICTURE, metadata={"Date": None})
    follow_schemes(PICTURE)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--largest", type=int, default=2048, help="widest random model")
    parser.add_argument("--trained", type=int, default=2048, help="widest trained model")
    parser.add_argument("--steps", type=int, default=50, help="steps of the ascent")
    parser.add_argument("--training-steps", type=int, default=300)
    parser.add_argument("--keep", type=Path, help="a file for rows, to go on with after a break")
    parser.add_argument("--weights", nargs="+", choices=KINDS, help="all by default")
    parser.add_argument("--widths", nargs="+", type=int, choices=WIDTHS, help="all by default")
    width(parser.parse_args())


if __name__ == "__main__":
    main()
