"""What follows a conversion: training at the source's learning rates, adapters, quantisers.

    python benchmarks/rates.py

converts each demo by default, for ``train`` and for ``norm-safe``, without what is unsafe then, and trains source and
folders on the same batches, loaded in fp32, without dropout. ``follow`` is an optimizer that steps at the source's
scale (``MadeSafe.follow``). Losses are means over all held-out texts. Then one adapter, trained on the source, is put
on every folder, and quantised folders are compared with the source in fp32. bitsandbytes and torchao run where they
are installed (``make clients``). One thread.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from models import DEMOS, demo_corpus
from results import print_header, print_row

from bf16_to_fp16 import convert, convert_adapter
from bf16_to_fp16.families.resolve import ModelTensors, resolve
from bf16_to_fp16.finetuning.corpus import TrainingBatch
from bf16_to_fp16.measuring.stock import load, load_config
from bf16_to_fp16.quiet import quiet
from bf16_to_fp16.rescaling.follow import exponents_by_parameter, follow
from bf16_to_fp16.rescaling.plan import Plan

TARGETS = {"default": "auto", "train": "train", "norm-safe": "norm-safe"}

Make = Callable[..., torch.optim.Optimizer]
# As T5 is finetuned with: a given rate, in units of each tensor's RMS.
ADAFACTOR = partial(transformers.Adafactor, scale_parameter=True, relative_step=False, warmup_init=False)
OPTIMIZERS: dict[str, tuple[Make, tuple[float, ...]]] = {
    "AdamW": (torch.optim.AdamW, (3e-6, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)),
    "Adafactor": (ADAFACTOR, (1e-3, 1e-2)),
    "SGD, momentum": (partial(torch.optim.SGD, momentum=0.9), (1e-5, 1e-4)),
}


@dataclass(frozen=True)
class Weights:
    """A folder to train; ``plan`` is None for the source."""

    name: str
    folder: Path
    plan: Plan | None = None


@dataclass(frozen=True)
class Checkpoint:
    name: str
    weights: Sequence[Weights]
    batches: Sequence[TrainingBatch]
    held_out: Sequence[TrainingBatch]


def checkpoint(name: str, source: Path, work: Path) -> Checkpoint:
    training, judging = (demo_corpus(source, load_config(source), rows) for rows in (4, 16))
    stream = training.training_batches()
    conversions = (converted(source, work, name, target) for name, target in TARGETS.items())
    weights = [Weights("source", source), *(each for each in conversions if each is not None)]
    return Checkpoint(name, weights, [next(stream) for _ in range(20)], judging.held_out(None))


def converted(source: Path, work: Path, name: str, target: str) -> Weights | None:
    """Return a conversion of ``source`` for a target, None where it is unsafe."""
    out = work / f"{source.name}-{name}"
    result = convert(source, out, target=target)
    if not result.safe:
        return None
    return Weights(f"{name}, 2^{result.plan.residual_exponent}", out, result.plan)


@torch.no_grad()
def loss(model: Any, batches: Sequence[TrainingBatch]) -> float:
    return statistics.fmean(float(model(**batch.inputs()).loss) for batch in batches)


def loaded(folder: Path) -> Any:
    return load(folder, torch.float32, attention="sdpa")


def train(model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[TrainingBatch]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        model(**batch.inputs()).loss.backward()
        optimizer.step()


def trained(case: Checkpoint, weights: Weights, make: Make, rate: float, *, follows: bool = False) -> float:
    model = loaded(weights.folder)
    optimizer = make(model.parameters(), lr=rate)
    if follows and weights.plan is not None:
        follow(optimizer, exponents_by_parameter(model, resolve(ModelTensors(model)), weights.plan), model)
    train(model, optimizer, case.batches)
    return loss(model, case.held_out)


def compare_rates(cases: Sequence[Checkpoint]) -> None:
    for optimizer, (make, rates) in OPTIMIZERS.items():
        print()
        print_header(optimizer, "weights", *(f"{rate:g}" for rate in rates), f"{rates[-2]:g}, follow")
        for case in cases:
            for weights in case.weights:
                ends, followed = [trained(case, weights, make, rate) for rate in rates], ""
                if weights.plan is not None:
                    followed = f"{trained(case, weights, make, rates[-2], follows=True):.2f}"
                print_row(case.name, weights.name, *(f"{end:.2f}" for end in ends), followed)


def train_adapter(case: Checkpoint, out: Path) -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    model = peft.get_peft_model(loaded(case.weights[0].folder), config)
    train(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3), case.batches)
    model.save_pretrained(str(out))


def adapted(case: Checkpoint, folder: Path, adapter: Path) -> str:
    return f"{loss(peft.PeftModel.from_pretrained(loaded(folder), adapter).eval(), case.held_out):.2f}"


def compare_adapters(cases: Sequence[Checkpoint], work: Path) -> None:
    columns = "no adapter", "the source's LoRA", "by convert_adapter"
    print()
    print_header("checkpoint", "weights", *columns)
    for case in cases:
        train_adapter(case, adapter := work / f"{case.weights[0].folder.name}-lora")
        for weights in case.weights:
            folder, mine, by_plan = weights.folder, work / f"{weights.folder.name}-lora", ""
            if weights.plan is not None:
                convert_adapter(adapter, mine, folder)
                by_plan = adapted(case, folder, mine)
            plain = f"{loss(loaded(folder), case.held_out):.2f}"
            print_row(case.name, weights.name, plain, adapted(case, folder, adapter), by_plan)


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
    return torch.cat([model(**batch.inputs()).logits[batch.labels >= 0].double() for batch in batches])


def divergence(values: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the mean KL in nats of logits from the reference's."""
    said, wanted = values.log_softmax(-1), reference.log_softmax(-1)
    return float((wanted.exp() * (wanted - said)).sum(-1).mean())


def compare_quantisers(cases: Sequence[Checkpoint]) -> None:
    known = quantisers()
    print()
    print_header("KL to the source in fp32", "weights", *known)
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
            print_row(case.name, weights.name, *cells)


@quiet()
def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        cases = [checkpoint(name, folder, work) for name, folder in DEMOS.items()]
        compare_rates(cases)
        compare_adapters(cases, work)
        compare_quantisers(cases)


if __name__ == "__main__":
    main()
