"""What the probe's choice of ids finds of what running every id finds, site by site.

    python benchmarks/probe.py

runs models in fp32 with eager attention on the probe with chosen ids and on the probe with the whole vocabulary
(``--sweep``) and prints, over all sites, how the largest |x| of the first compares with that of the second: the least
ratio, the median, and how many sites are below 0.95. The models are the shipped demo checkpoints, of whose 384 ids only
128 are then chosen, and a random gated T5 with a vocabulary of 32,128 and outliers: three channels of the table eight
times as large, and neurons that stand out in two layers of each stack. Sites inside a norm hold squares, so that a
ratio there is the square of what it is of the signal; the second line leaves them out.

    python benchmarks/probe.py --cost [SHAPE [LAYERS]]

prints instead what choosing, the probe and the probe with ranges metered cost on random weights of a shape, in
processor time over that of one fp32 forward of 4 x 128 encoder and 4 x 32 decoder tokens.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import models
import synthetic
import torch
import transformers

from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.observe.meter import observe_ranges
from bf16_to_fp16.observe.observer import SiteObserver
from bf16_to_fp16.rescaling.weights import ModelTensors
from bf16_to_fp16.run import choice
from bf16_to_fp16.run.batch import Batch, run_batch
from bf16_to_fp16.run.probe import batches, chosen_ids
from bf16_to_fp16.run.products import FastProducts
from bf16_to_fp16.run.stock import load

TIGHT = 0.95


def wide(vocabulary: int = 32128, width: int = 256, layers: int = 4, seed: int = 0) -> Any:
    """Return a random gated T5 in fp32 with outliers in its table and neurons, every weight a bf16 number."""
    torch.manual_seed(seed)
    config = transformers.T5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=32,
        d_ff=2 * width,
        num_layers=layers,
        num_heads=width // 32,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        architectures=["T5ForConditionalGeneration"],
    )
    model: Any = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(std=0.1 if weight.dim() == 1 else weight.shape[1] ** -0.5)
            if weight.dim() == 1:
                weight.add_(1)
            elif name.endswith(".q.weight"):
                weight.mul_(config.d_kv**-0.5)
        model.shared.weight.mul_(width**0.5)
        model.shared.weight[:, [3, width // 3, width // 2]] *= 8
        for stack in (model.encoder, model.decoder):
            for block in stack.block[1:3]:
                inside = block.layer[-1].DenseReluDense
                for neuron in (5, width // 3, width):
                    inside.wi_0.weight[neuron] *= 6
                    inside.wi_1.weight[neuron] *= 6
                    inside.wo.weight[[11, width // 2 + 9], neuron] *= 40
        for weight in model.parameters():
            weight.copy_(weight.bfloat16().float())
    return model


def largest(model: Any, inputs: Sequence[Batch]) -> dict[str, float]:
    """Return the largest |x| of every site on these inputs."""
    observer = SiteObserver(model)
    with torch.no_grad(), observer:
        for batch in inputs:
            run_batch(model, batch)
    return {site.name: site.amax for site in observer.sites() if site.calls}


def compare(name: str, model: Any) -> None:
    """Print the lines of one model."""
    model.set_attn_implementation("eager")
    source = ModelTensors(model)
    begin = time.process_time()
    ids = chosen_ids(model.config, source, resolve(source))
    choosing = time.process_time() - begin
    inputs = {
        "chosen": batches(model.config, None, None, chosen=ids),
        "drawn at random": batches(model.config, None, None),
        "sweep": batches(model.config, None, None, sweep=True),
    }
    found, seconds = {}, {"choosing": choosing}
    for way, made in inputs.items():
        begin = time.process_time()
        found[way] = largest(model, made)
        seconds[way] = time.process_time() - begin
    for inside in (True, False):
        sites = [s for s, x in found["sweep"].items() if x and (inside or "norm:" not in s)]
        for way in ("chosen", "drawn at random"):
            ratios = sorted((found[way].get(site, 0.0) / found["sweep"][site], site) for site in sites)
            below = sum(ratio < TIGHT for ratio, _ in ratios)
            median, (least, where) = statistics.median(r for r, _ in ratios), ratios[0]
            shown = f"{way}, {'all sites' if inside else 'but inside norms'}"
            print(
                f"| {name} | {shown} | {len(sites)} | {median:.3f} | {least:.3f} (`{where}`) | {below} |"
                f" {seconds['choosing'] if way == 'chosen' else 0:.1f} | {seconds[way]:.1f} | {seconds['sweep']:.1f} |",
                flush=True,
            )


def seconds_of(work: Callable[[], Any]) -> float:
    """Return the processor time that something takes."""
    begin = time.process_time()
    with torch.no_grad():
        work()
    return time.process_time() - begin


def cost(name: str, layers: int | None) -> None:
    """Print what the probe costs on one shape."""
    shape = synthetic.SHAPES[name] if layers is None else synthetic.SHAPES[name].with_layers(layers)
    with tempfile.TemporaryDirectory() as work:
        synthetic.write(Path(work) / "model", shape, outliers=True)
        model = load(Path(work) / "model", torch.float32)
    source = ModelTensors(model)
    layout = resolve(source)
    ids = torch.randint(0, shape.vocabulary, (4, 128))
    unit = Batch("", ids, torch.ones_like(ids), ids[:, :32], torch.ones_like(ids[:, :32]))
    run_batch(model, unit)
    u = min(seconds_of(lambda: run_batch(model, unit)) for _ in range(3))
    choosing = seconds_of(lambda: chosen_ids(model.config, source, layout))
    inputs = batches(model.config, None, None)
    with FastProducts():  # as they are computed where ranges are metered
        plain = seconds_of(lambda: [run_batch(model, batch) for batch in inputs])
    metered = seconds_of(lambda: observe_ranges(model, inputs))
    tokens = (
        sum(b.input_ids.numel() for b in inputs),
        sum(b.decoder_input_ids.numel() for b in inputs if b.decoder_input_ids is not None),
    )
    print(
        f"| {name}, {shape.layers} layers | {u:.2f} | {choosing / u:.1f} | {tokens[0]}, {tokens[1]}"
        f" | {plain / u:.1f} | {metered / u:.1f} | {metered / plain - 1:.0%} |"
    )


def main() -> None:
    """Compare on every model, or print the cost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cost", nargs="*", metavar="SHAPE [LAYERS]")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.cost is not None:
        name, layers, *_ = [*given.cost, *["t5-v1_1-base", None][len(given.cost) :]]
        print("| shape | U, CPU s | choosing, U | tokens | probe, U | metered, U | metering |\n|" + "---|" * 7)
        cost(name, None if layers is None else int(layers))
        return
    print(
        "| model | probe | sites | median | least | below 0.95 | choosing, CPU s | CPU s | sweep, CPU s |\n|"
        + "---|" * 9
    )
    usual, choice.CHOSEN, choice.WHOLE = choice.CHOSEN, 128, 128
    for name in ("t5-gated-bytes", "pegasus-bytes"):
        compare(f"{name}, 128 of 384", load(models.DEMO / name, torch.float32))
    choice.CHOSEN = usual
    compare(f"random, {usual} of 32,128", wide())


if __name__ == "__main__":
    main()
