"""Quantisers on a source and on its conversion: how far the logits are from the source's in fp32.

``python benchmarks/quantisers.py [--by-kind] [MODEL ...]`` in ``.venv-clients`` (``make clients``); MODEL: a folder, by
default each demo. Stock transformers loads both folders with bitsandbytes NF4, bitsandbytes int8 (LLM.int8) and torchao
int8 (weights only); HQQ (4 bits, groups of 64) makes the weights of every linear but
the head, for transformers 5.23 cannot ask it. All compute in fp32 but for what a row calls fp16, so that what is
seen is the rounding of the weights. ``--by-kind`` also quantises conversions by a part of the plan.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import transformers
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from runtimes import Outputs, in_torch, inputs_of, one_batch
from torchao.quantization import Int8WeightOnlyConfig
from transformers import BitsAndBytesConfig, TorchAoConfig

from bf16_to_fp16 import convert
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.demo import CHECKPOINTS
from bf16_to_fp16.families.types import Kind
from bf16_to_fp16.report.schema import REPORT
from bf16_to_fp16.report.stored import read_plan
from bf16_to_fp16.rescaling.plan import Plan, describe_plan
from bf16_to_fp16.run import probe
from bf16_to_fp16.run.agreement import agreed_layout
from bf16_to_fp16.run.batch import Batch
from bf16_to_fp16.run.stock import load_config

NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
QUANTISERS: dict[str, tuple[Any, torch.dtype]] = {
    "bitsandbytes NF4": (NF4, torch.float32),
    "bitsandbytes int8": (BitsAndBytesConfig(load_in_8bit=True), torch.float32),
    "torchao int8": (TorchAoConfig(Int8WeightOnlyConfig()), torch.float32),
    "torchao int8, fp16": (TorchAoConfig(Int8WeightOnlyConfig()), torch.float16),
    "HQQ 4 bits": (None, torch.float32),
}


def by_hqq(model: Any) -> None:
    """Take the weights of a model's linears, but for its head, through HQQ and back."""
    for linear in model.modules():
        if isinstance(linear, torch.nn.Linear) and linear is not model.get_output_embeddings():
            config = BaseQuantizeConfig(nbits=4, group_size=64)
            quantised = HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu", del_orig=False)
            linear.weight.copy_(quantised.dequantize())


@torch.no_grad()
def logits(folder: Path, quantiser: str, batch: Batch) -> torch.Tensor:
    """Return the logits of a folder that stock code quantises as it loads it, float64."""
    config, dtype = QUANTISERS[quantiser]
    stock = getattr(transformers, load_config(folder).architectures[0])
    model = stock.from_pretrained(folder, dtype=dtype, quantization_config=config, device_map="cpu").eval()
    if config is None:
        by_hqq(model)
    values: torch.Tensor = Outputs(model)(*inputs_of(batch).values())
    return values.double()


def distances(values: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Return the relative squared error of logits, [positions, vocabulary], and their mean KL in nats."""
    error = float((values - reference).square().sum() / reference.square().sum())
    said, wanted = values.log_softmax(-1), reference.log_softmax(-1)
    return error, float((wanted.exp() * (wanted - said)).sum(-1).mean())


def part(plan: Plan, kinds: dict[str, Kind], kept: set[Kind]) -> Plan:
    """Return a plan with the exponents of some kinds of signals only."""
    streams = Kind.RESIDUAL in kept
    exponents = {name: exponent for name, exponent in plan.exponents.items() if kinds[name] in kept}
    changes: dict[str, Any] = {"exponents": exponents}
    if not streams:
        changes |= {"residual_exponent": 0, "gain_correction": {}, "eps": None, "drift": None}
    return plan.model_copy(update=changes)


def folders(source: Path, work: Path, *, by_kind: bool) -> Iterator[tuple[str, Path]]:
    """Yield a source, its conversion, and conversions by parts of the plan, each with its name."""
    yield "source", source
    convert(source, work / "whole")
    yield "converted", work / "whole"
    if not by_kind:
        return
    plan = read_plan(work / "whole" / REPORT)
    signals = agreed_layout(open_checkpoint(source)).signals
    kinds = {name: signal.kind for name, signal in signals.items()}
    moved = {Kind.RESIDUAL, *(kinds[name] for name in plan.exponents)}
    parts = {f"only {kind}": {kind} for kind in sorted(moved)} | {f"without {k}": moved - {k} for k in sorted(moved)}
    for name, kept in parts.items():
        path = work / f"{name}.json"
        path.write_text(json.dumps({"plan": describe_plan(part(plan, kinds, kept))}))
        convert(source, work / name, plan=str(path), run_model=False)
        yield name, work / name


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--by-kind", action="store_true")
    given = parser.parse_args()
    demos = Path(str(files("bf16_to_fp16"))) / "demo_data"
    torch.set_num_threads(1)
    for source in given.models or [demos / name for name in CHECKPOINTS]:
        config = load_config(source)
        batch = one_batch(config, probe.audit_batches(config, source, None))
        mask = (batch.attention_mask if batch.decoder_attention_mask is None else batch.decoder_attention_mask).bool()
        reference = in_torch(source, torch.float32, batch)[mask].double()
        print(f"\n{source.name}: relative squared error of the logits / KL in nats")
        print(f"| weights | {' | '.join(QUANTISERS)} |")
        with tempfile.TemporaryDirectory() as work:
            for name, folder in folders(source, Path(work), by_kind=given.by_kind):
                found = [distances(logits(folder, quantiser, batch)[mask], reference) for quantiser in QUANTISERS]
                print(f"| {name} | {' | '.join(f'{error:.1e} / {kl:.1e}' for error, kl in found)} |", flush=True)


if __name__ == "__main__":
    main()
