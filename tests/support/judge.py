"""An independent judge of a conversion by stock classes alone, on the CPU.

The source in fp32 is the reference, the output runs in fp16, and the source in bf16 measures what an error may cost.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Judged:
    """KL divergences from the source in fp32 in nats, of last states relative squared errors; or ``inf``."""

    kl_fp16_text: float
    kl_bf16_text: float
    kl_fp32_text: float
    kl_fp16_random: float
    kl_bf16_random: float
    kl_fp32_random: float
    loss: float  # of the source in fp32 on the text: nats per token that it is given; nan without a head
    finite: bool  # all outputs in fp16 are


def load(folder: Path, dtype: torch.dtype, attention: str) -> Any:
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    kind = getattr(transformers, name)
    model = kind.from_pretrained(folder, dtype=dtype, attn_implementation=attention).to(dtype).eval()
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    return model


def is_seq2seq(model: Any) -> bool:
    return bool(model.config.is_encoder_decoder) and "Classification" not in type(model).__name__


def text_batches(model: Any, folder: Path, texts: Sequence[str], length: int) -> list[Batch]:
    """Return one batch per text: its first tokens or, of an encoder-decoder, those around a gap, and the gap's."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        end = ids[:, -1:] if model.config.is_encoder_decoder else ids[:, :0]
        ids = ids[:, : ids.shape[1] - end.shape[1]][:, :length]
        if is_seq2seq(model):
            gap = torch.tensor([[model.config.vocab_size - 1]])
            start, stop = ids.shape[1] // 2, ids.shape[1] * 2 // 3
            inputs = torch.cat([ids[:, :start], gap, ids[:, stop:], end], 1)
            found.append(decoded(model, inputs, torch.cat([gap, ids[:, start:stop], end], 1)))
        else:
            found.append({"input_ids": torch.cat([ids, end], 1)})
    return found


def decoded(model: Any, ids: Tensor, target: Tensor) -> Batch:
    """Return the inputs of a decoder that is forced to give the target."""
    start = torch.full_like(target[:, :1], model.config.decoder_start_token_id)
    return {"input_ids": ids, "decoder_input_ids": torch.cat([start, target[:, :-1]], 1), "target": target}


def random_batches(model: Any, count: int, length: int, seed: int) -> list[Batch]:
    """Return batches of one row of ids that are uniform over the vocabulary but for the first three."""
    rng = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        ids = torch.randint(3, model.config.vocab_size, (1, length), generator=rng)
        if model.config.is_encoder_decoder:
            ids = torch.cat([ids, torch.tensor([[model.config.eos_token_id]])], 1)
        target = torch.randint(3, model.config.vocab_size, (1, length // 2), generator=rng)
        found.append(decoded(model, ids, target) if is_seq2seq(model) else {"input_ids": ids})
    return found


@torch.no_grad()
def outputs(model: Any, batches: Sequence[Batch]) -> list[Tensor]:
    found = []
    for batch in batches:
        inputs = {name: ids for name, ids in batch.items() if name != "target"}
        result = model(**inputs)
        values = result.logits if "logits" in result else result.last_hidden_state
        found.append(values.reshape(-1, values.shape[-1]).double())
    return found


def divergences(reference: Sequence[Tensor], other: Sequence[Tensor], logits: bool) -> Tensor:
    """Return fp64 [positions] of all batches, ``inf`` where an output is not finite."""
    found = []
    for a, b in zip(reference, other, strict=True):
        if logits:
            p, q = a.log_softmax(-1), b.log_softmax(-1)
            each = torch.where(p.exp() > 0, p.exp() * (p - q), 0.0).sum(-1).clamp_min(0.0)
        else:
            each = (a - b).square().sum(-1) / a.square().sum(-1)
        found.append(torch.where(b.isfinite().all(-1), each, math.inf))
    return torch.cat(found)


def loss_on(model: Any, reference: Sequence[Tensor], batches: Sequence[Batch]) -> float:
    """Return the mean cross-entropy of what the texts go on with, ``nan`` of what predicts no tokens."""
    losses = []
    for logits, batch in zip(reference, batches, strict=True):
        if is_seq2seq(model):
            losses.append(torch.nn.functional.cross_entropy(logits, batch["target"][0], reduction="none"))
        elif type(model).__name__.endswith("ForCausalLM"):
            losses.append(torch.nn.functional.cross_entropy(logits[:-1], batch["input_ids"][0, 1:], reduction="none"))
    return float(torch.cat(losses).mean()) if losses else math.nan


def judge(
    source: Path,
    out: Path,
    texts: Sequence[str],
    seed: int,
    *,
    length: int = 160,
    rows: int = 8,
    attention: str = "eager",
) -> Judged:
    """Run source and output on texts and on ``rows`` rows of random ids, and compare them with the source in fp32."""
    model = load(source, torch.float32, attention)
    text = text_batches(model, source, texts, length)
    random = random_batches(model, rows, length, seed)
    exact_text, exact_random = outputs(model, text), outputs(model, random)
    assert all(values.isfinite().all() for values in (*exact_text, *exact_random)), "the source in fp32 is not finite"
    logits = not type(model).__name__.endswith("Model")
    loss = loss_on(model, exact_text, text)
    found: dict[str, Any] = {"loss": loss}
    for name, folder, dtype in (
        ("fp16", out, torch.float16),
        ("bf16", source, torch.bfloat16),
        ("fp32", out, torch.float32),
    ):
        other = load(folder, dtype, attention)
        on_text, on_random = outputs(other, text), outputs(other, random)
        found[f"kl_{name}_text"] = float(divergences(exact_text, on_text, logits).mean())
        found[f"kl_{name}_random"] = float(divergences(exact_random, on_random, logits).mean())
        if name == "fp16":
            found["finite"] = all(bool(values.isfinite().all()) for values in (*on_text, *on_random))
    return Judged(**found)
