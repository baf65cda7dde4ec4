"""What follows a conversion: training at the source's learning rates, adapters, new tokens, inner states, quantisers.

    python benchmarks/rates.py [--folder DIR]

converts each demo by default, for ``train`` and for ``norm-safe``, without what is unsafe then, and trains source and
folders on the same batches, loaded in fp32, without dropout. ``follow`` is an optimizer that steps at the source's
scale (``MadeSafe.follow``). Losses are means over all held-out texts. Then one adapter, trained on the source, is put
on every folder; embeddings are resized; and quantised folders are compared with the source in fp32. bitsandbytes and
torchao run where they are installed (``make clients``). ``--folder`` adds a causal checkpoint, converted by default, at
rates of its own, in short rows, judged on 16 texts. One thread.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from models import DEMO, demo_corpus

from bf16_to_fp16 import convert, convert_adapter
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.finetuning.corpus import TrainingBatch
from bf16_to_fp16.quiet import quiet
from bf16_to_fp16.rescaling.follow import exponents_by_parameter, follow
from bf16_to_fp16.rescaling.plan import Plan
from bf16_to_fp16.rescaling.weights import ModelTensors
from bf16_to_fp16.run.stock import load, load_config

DEMOS = {"T5": "t5-gated-bytes", "Pegasus": "pegasus-bytes", "Gemma 3": "gemma3-bytes"}
TARGETS = {"default": "auto", "train": "train", "norm-safe": "norm-safe"}
HELD = 0.1
"""Nats by which the held-out loss may differ from the source's at the same rate."""

Make = Callable[[Any, float], torch.optim.Optimizer]


def adafactor(parameters: Any, rate: float) -> torch.optim.Optimizer:
    """Return Adafactor as T5 is finetuned with: a given rate, in units of each tensor's RMS."""
    return transformers.Adafactor(parameters, lr=rate, scale_parameter=True, relative_step=False, warmup_init=False)


OPTIMIZERS: dict[str, tuple[Make, tuple[float, ...]]] = {
    "AdamW": (lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate), (3e-6, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)),
    "Adafactor": (adafactor, (1e-3, 1e-2)),
    "SGD, momentum": (lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9), (1e-5, 1e-4)),
}
OWN_RATES = (1e-6, 1e-5, 5e-5, 2e-4)
"""AdamW's rates for ``--folder``."""


@dataclass(frozen=True)
class Weights:
    """A folder to train: ``plan`` is None for the source; ``moved`` and ``rest`` are the median RMS of the matrices
    that the plan multiplied by 2^±1 or more on average, and of the others."""

    name: str
    folder: Path
    plan: Plan | None = None
    moved: float = 0.0
    rest: float = 0.0

    @property
    def title(self) -> str:
        """The name, and the exponent of the residual stream."""
        return self.name if self.plan is None else f"{self.name}, 2^{self.plan.residual_exponent}"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, its conversions, and its batches."""

    name: str
    weights: Sequence[Weights]
    batches: Sequence[TrainingBatch]
    held_out: Sequence[TrainingBatch]
    optimizers: dict[str, tuple[Make, tuple[float, ...]]] = field(default_factory=lambda: OPTIMIZERS)


def checkpoint(name: str, source: Path, work: Path, *, own: bool = False) -> Checkpoint:
    """Convert a checkpoint into ``work``; own: the one that was given by ``--folder``."""
    rows, steps, length, judged = (2, 15, 24, 16) if own else (4, 20, 130, None)
    training, judging = (demo_corpus(source, load_config(source), n, input_length=length) for n in (rows, 16))
    stream = training.training_batches()
    targets = {"default": "auto"} if own else TARGETS
    conversions = (converted(source, work, name, target) for name, target in targets.items())
    weights = [Weights("source", source), *(each for each in conversions if each is not None)]
    optimizers = {"AdamW": (OPTIMIZERS["AdamW"][0], OWN_RATES)} if own else OPTIMIZERS
    return Checkpoint(name, weights, [next(stream) for _ in range(steps)], judging.held_out(judged), optimizers)


def converted(source: Path, work: Path, name: str, target: str) -> Weights | None:
    """Return a conversion of ``source`` for a target, None where it is unsafe."""
    out = work / f"{source.name}-{name}"
    result = convert(source, out, target=target)
    if not result.safe:
        return None
    model = load(out, torch.float32)
    sizes: dict[bool, list[float]] = {True: [], False: []}
    for weight, exponents in exponents_by_parameter(model, resolve(ModelTensors(model)), result.plan).items():
        if weight.dim() == 2:
            mean = exponents.full(weight.shape).expand(weight.shape).float().mean()
            sizes[bool(mean.abs() >= 1)].append(float(weight.detach().square().mean().sqrt()))
    return Weights(name, out, result.plan, *(statistics.median(sizes[key] or [math.inf]) for key in (True, False)))


@torch.no_grad()
def loss(model: Any, batches: Sequence[TrainingBatch]) -> float:
    """Return the mean loss over batches."""
    return statistics.fmean(float(model(**batch.inputs()).loss) for batch in batches)


def train(model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[TrainingBatch]) -> None:
    """Take one step on each batch."""
    for batch in batches:
        optimizer.zero_grad()
        model(**batch.inputs()).loss.backward()
        optimizer.step()


def trained(case: Checkpoint, weights: Weights, make: Make, rate: float, *, follows: bool = False) -> float:
    """Return the held-out loss of ``weights`` after training."""
    model = load(weights.folder, torch.float32, attention="sdpa")
    optimizer = make(model.parameters(), rate)
    if follows and weights.plan is not None:
        follow(optimizer, exponents_by_parameter(model, resolve(ModelTensors(model)), weights.plan))
    train(model, optimizer, case.batches)
    return loss(model, case.held_out)


def losses(case: Checkpoint, optimizer: str) -> dict[str, list[float]]:
    """Print the rows of one checkpoint and optimizer, and return the losses by weights and rate."""
    make, rates = case.optimizers[optimizer]
    found = {}
    for weights in case.weights:
        ends = found[weights.title] = [trained(case, weights, make, rate) for rate in rates]
        cells = [f"{end:.2f}" for end in ends]
        cells.append("" if weights.plan is None else f"{trained(case, weights, make, rates[-2], follows=True):.2f}")
        print(f"| {case.name} | {weights.title} | {' | '.join(cells)} |", flush=True)
    return found


def compare_rates(cases: Sequence[Checkpoint]) -> None:
    """Print a table for each optimizer, and for AdamW which relative steps gave the source's loss."""
    rows, marks = [], {True: [0.0], False: [math.inf]}
    for optimizer, grid in dict.fromkeys((o, rates) for case in cases for o, (_, rates) in case.optimizers.items()):
        print(f"\n| {optimizer} | weights | {' | '.join(f'{rate:g}' for rate in grid)} | {grid[-2]:g}, follow |")
        print(f"|---|---|{'--:|' * (len(grid) + 1)}")
        for case in cases:
            if case.optimizers.get(optimizer, (None, ()))[1] != grid:
                continue
            found = losses(case, optimizer)
            for weights in case.weights[1:] if optimizer == "AdamW" else ():
                steps: dict[bool, list[float]] = {True: [], False: []}
                for rate, here, there in zip(grid, found["source"], found[weights.title], strict=True):
                    steps[abs(here - there) <= HELD].append(rate / weights.moved)
                for held, values in steps.items():
                    marks[held] += values
                cells = [" ".join(f"{step:.1e}" for step in steps[held]) or "none" for held in (True, False)]
                sizes = f"{weights.moved:.2g} | {weights.rest:.2g}"
                rows.append(f"| {case.name} | {weights.title} | {sizes} | {' | '.join(cells)} |")
    print(f"\n| AdamW | weights | RMS of what moved | of the rest | rate / RMS, within {HELD} | further |")
    print("|---|---|--:|--:|---|---|", *rows, sep="\n")
    print(f"\nlargest step that held {max(marks[True]):.1e}, smallest that did not {min(marks[False]):.1e}")


def adapter_of(case: Checkpoint, out: Path) -> Path:
    """Train a LoRA of all linears on the source and save it."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    model = peft.get_peft_model(load(case.weights[0].folder, torch.float32, attention="sdpa"), config)
    train(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3), case.batches)
    model.save_pretrained(out)
    return out


def adapted(case: Checkpoint, folder: Path, adapter: Path) -> float:
    """Return the held-out loss of a folder with an adapter on it."""
    model = peft.PeftModel.from_pretrained(load(folder, torch.float32, attention="sdpa"), adapter)
    return loss(model.eval(), case.held_out)


def new_rows(folder: Path, count: int = 8) -> float:
    """Return the norm of random new rows of the embedding over that of the old ones."""
    model = load(folder, torch.float32)
    old = model.get_input_embeddings().weight
    # transformers would tie the head of an untied T5, whose config does not say that it is untied
    model.config.tie_word_embeddings = model.get_output_embeddings().weight is old
    torch.manual_seed(0)
    model.resize_token_embeddings(len(old) + count, mean_resizing=False)
    norms = model.get_input_embeddings().weight.detach().norm(dim=1)
    return float(norms[-count:].mean() / norms[:-count].mean())


@torch.no_grad()
def last_states(folder: Path, batch: TrainingBatch) -> torch.Tensor:
    """Return the ``last_hidden_state`` of a folder that ``AutoModel`` loads."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    decoder = {"decoder_input_ids": batch.input_ids} if model.config.is_encoder_decoder else {}
    states: torch.Tensor = model(input_ids=batch.input_ids, **decoder).last_hidden_state
    return states


def compare_adapters(cases: Sequence[Checkpoint], work: Path) -> None:
    """Print what becomes of the source's adapter, of new tokens and of the last states."""
    print("\n| checkpoint | weights | no adapter | the source's LoRA | by convert_adapter | new rows | last states |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for case in cases:
        source, batch = case.weights[0], case.held_out[0]
        adapter = adapter_of(case, work / f"{source.folder.name}-lora")
        states = last_states(source.folder, batch)
        for weights in case.weights:
            plain = loss(load(weights.folder, torch.float32, attention="sdpa"), case.held_out)
            cells = [f"{plain:.2f}", f"{adapted(case, weights.folder, adapter):.2f}", ""]
            if weights.plan is not None:
                mine = work / f"{weights.folder.name}-lora"
                convert_adapter(adapter, mine, weights.folder)
                cells[2] = f"{adapted(case, weights.folder, mine):.2f}"
            factor = float(last_states(weights.folder, batch).norm() / states.norm())
            cells += [f"{new_rows(weights.folder):.2g}", f"{factor:.3g}"]
            print(f"| {case.name} | {weights.title} | {' | '.join(cells)} |", flush=True)


def quantisers() -> dict[str, tuple[Any, torch.dtype]]:
    """Return the quantisers that are installed here, each with the dtype that it computes in."""
    found: dict[str, tuple[Any, torch.dtype]] = {}
    if find_spec("bitsandbytes"):
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it remarks on every product
        nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
        found["bitsandbytes NF4"] = transformers.BitsAndBytesConfig(**nf4), torch.float32
        found["bitsandbytes int8"] = transformers.BitsAndBytesConfig(load_in_8bit=True), torch.float32
    if find_spec("torchao"):
        from torchao.quantization import Int8WeightOnlyConfig

        for name, dtype in (("torchao int8", torch.float32), ("torchao int8, fp16", torch.float16)):
            found[name] = transformers.TorchAoConfig(Int8WeightOnlyConfig()), dtype
    return found


@torch.no_grad()
def logits(model: Any, batches: Sequence[TrainingBatch]) -> torch.Tensor:
    """Return the logits of every token that counts, float64."""
    found = []
    for batch in batches:
        assert batch.labels is not None
        found.append(model(**batch.inputs()).logits[batch.labels >= 0].double())
    return torch.cat(found)


def divergence(values: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the mean KL in nats of logits from the reference's."""
    said, wanted = values.log_softmax(-1), reference.log_softmax(-1)
    return float((wanted.exp() * (wanted - said)).sum(-1).mean())


def compare_quantisers(cases: Sequence[Checkpoint]) -> None:
    """Print how far each quantiser takes each folder from the source in fp32."""
    known = quantisers()
    print(f"\n| KL to the source in fp32 | weights | {' | '.join(known)} |\n|---|---|{'--:|' * len(known)}")
    for case in cases:
        batches, source = case.held_out[:2], case.weights[0].folder
        stock = getattr(transformers, load_config(source).architectures[0])
        reference = logits(load(source, torch.float32), batches)
        for weights in case.weights:
            cells = []
            for config, dtype in known.values():
                options = {"dtype": dtype, "quantization_config": config, "device_map": "cpu"}
                model = stock.from_pretrained(weights.folder, **options).eval()
                cells.append(f"{divergence(logits(model, batches), reference):.1e}")
            print(f"| {case.name} | {weights.title} | {' | '.join(cells)} |", flush=True)


@quiet()
def main() -> None:
    """Print every table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, help="another causal checkpoint")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        cases = [checkpoint(name, DEMO / folder, work) for name, folder in DEMOS.items()]
        if given.folder is not None:
            cases.append(checkpoint(given.folder.name, given.folder, work, own=True))
        compare_rates(cases)
        compare_adapters(cases, work)
        compare_quantisers(cases)


if __name__ == "__main__":
    main()
