"""Trains one of the demo checkpoints: ``python recipes/train_demo.py recipes/train-demo-t5.yaml OUT``.

A small byte-level model, trained in bf16 (autocast over fp32 master weights, stored as bf16) on real English text: a
T5 or a Pegasus that fills gaps, or a Gemma 3 that goes on with a text. It starts from an initialisation in which the
residual stream, a few output channels of late layers and a few neurons are large, because those are what published bf16
checkpoints carry past 65504 and what minutes on a CPU do not grow by themselves. Pre-norm makes the function nearly
blind to these scales, so the model learns like any other. Every factor is in the recipe; none is a power of two.

Adam's step is multiplied, element by element, by the scale of the initialisation. That is Adam on an ordinary
initialisation with the factors as constants outside it, and it lets large weights move as far, relative to their size,
as small ones (Adafactor's ``scale_parameter``, Shazeer and Stern 2018, per element).
"""

from __future__ import annotations

import gzip
import json
import math
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

# Only the stock classes are wanted here, and the folder is written without the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import yaml
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

HERE = Path(__file__).resolve().parent
TRAIN = HERE.parent / "bf16_to_fp16" / "demo_data" / "python-topics.txt.gz"
HELD_OUT = HERE.parent / "bf16_to_fp16" / "demo_data" / "held_out.txt"
PAD, EOS, BOS, BYTE0, BYTES, VOCABULARY = 0, 1, 2, 3, 256, 384
Recipe = dict[str, Any]


# ---- text to batches -----------------------------------------------------------------------------------------------


def spans(window: bytes, recipe: Recipe, rng: torch.Generator) -> tuple[list[int], list[int]]:
    """Return (source, target) ids: each gap becomes a sentinel, 383 first; the target lists their bytes."""
    count, length = recipe["spans"], recipe["span_length"]
    part = len(window) // count
    source: list[int] = []
    target: list[int] = []
    for k in range(count):
        piece = [byte + BYTE0 for byte in window[k * part : (k + 1) * part]]
        start = int(torch.randint(0, part - length + 1, (1,), generator=rng))
        sentinel = VOCABULARY - 1 - k
        source += [*piece[:start], sentinel, *piece[start + length :]]
        target += [sentinel, *piece[start : start + length]]
    return [*source, EOS], [*target, EOS]


def batch(windows: list[bytes], recipe: Recipe, rng: torch.Generator) -> dict[str, Tensor]:
    """Return ``input_ids`` and ``labels``, both (batch, length), for windows of equal length: gaps and what is missing,
    or, of a causal model, a text from its start token on and what each position should give."""
    if recipe["family"] == "gemma3":
        ids = torch.tensor([[BOS, *(byte + BYTE0 for byte in window)] for window in windows])
        return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    pairs = [spans(window, recipe, rng) for window in windows]
    return {"input_ids": torch.tensor([s for s, _ in pairs]), "labels": torch.tensor([t for _, t in pairs])}


def training_batch(text: bytes, recipe: Recipe, rng: torch.Generator) -> dict[str, Tensor]:
    """Return a batch of windows drawn uniformly from the text."""
    starts = torch.randint(0, len(text) - recipe["window"] + 1, (recipe["batch"],), generator=rng).tolist()
    return batch([text[s : s + recipe["window"]] for s in starts], recipe, rng)


def held_out_batches(recipe: Recipe) -> list[dict[str, Tensor]]:
    """Return the first window of every held-out passage, with gaps that never change."""
    rng = torch.Generator().manual_seed(0)
    lines = [line.encode() for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]
    windows = [line[: recipe["window"]] for line in lines if len(line) >= recipe["window"]]
    return [batch(windows[i : i + 32], recipe, rng) for i in range(0, len(windows), 32)]


# ---- the model and its large initialisation ------------------------------------------------------------------------


def build(recipe: Recipe) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Return the model at its initialisation and, per parameter name, the scale of every element and its Adam step."""
    torch.manual_seed(recipe["seed"])
    model: PreTrainedModel
    if recipe["family"] == "t5":
        model = T5ForConditionalGeneration(T5Config(**recipe["config"]))
        # transformers 5 ties the head in memory whatever the config says.
        model.lm_head.weight = torch.nn.Parameter(torch.empty(VOCABULARY, recipe["config"]["d_model"]))
    elif recipe["family"] == "gemma3":
        model = Gemma3ForCausalLM(Gemma3TextConfig(**recipe["config"]))
    else:
        model = PegasusForConditionalGeneration(PegasusConfig(**recipe["config"]))
    scales = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("embed_positions.weight"):
                continue
            std = standard_deviation(name, weight, recipe)
            if weight.dim() == 2:
                weight.normal_(0.0, std)
            scales[name] = torch.full_like(weight, std)
        for rule in recipe["inflate"]:
            enlarge(model, scales, rule)
        for rule in recipe["align"]:
            align(model, scales, rule)
    return model, scales


def standard_deviation(name: str, weight: Tensor, recipe: Recipe) -> float:
    """Return the ordinary initialisation's scale: 1/√fan_in for matrices, a step size for vectors (0 or 1 at first)."""
    if name.endswith(("shared.weight", "embed_tokens.weight")):
        return float(recipe["embedding_std"])
    if name.endswith(".q.weight"):  # T5 has no 1/√d_kv in its scores
        return float((weight.shape[1] * recipe["config"]["d_kv"]) ** -0.5)
    if weight.dim() == 2:
        return float(weight.shape[1] ** -0.5) if "relative_attention_bias" not in name else 0.1
    return 0.1


def matches(name: str, rule: Recipe) -> bool:
    """Say whether one of the rule's patterns ends the parameter's name."""
    return any(name.endswith(pattern) for pattern in rule["tensors"])


def enlarge(model: PreTrainedModel, scales: dict[str, Tensor], rule: Recipe) -> None:
    """Multiply weight and scale of the rule's tensors, or of some ``rows`` or ``columns``, by its factor, in place."""
    found = False
    for name, weight in model.named_parameters():
        if matches(name, rule):
            found = True
            for tensor in (weight, scales.get(name)):
                if tensor is not None:
                    part = tensor.T if "columns" in rule else tensor
                    where = rule.get("columns", rule.get("rows", slice(None)))
                    part[where] = part[where] * rule["factor"]
    if not found:
        raise SystemExit(f"error: no parameter ends with any of {rule['tensors']}: mend the recipe's 'inflate'")


def align(model: PreTrainedModel, scales: dict[str, Tensor], rule: Recipe) -> None:
    """Set ``[rows, columns]`` of the rule's tensors to ``values`` (one, or one per column) times their scale, in place.

    ``keep`` is the share of the random weight that stays beside it. A vector has no columns, and is set whole without
    rows. This is what makes the chosen neurons fire, and with one sign, from the first step on.
    """
    for name, weight in model.named_parameters():
        if matches(name, rule):
            values = torch.tensor(rule["values"])
            if weight.dim() == 1:
                where = rule.get("rows", slice(None))
                weight[where] = values * scales[name][where]
            else:
                rows = torch.tensor(rule.get("rows", list(range(weight.shape[0]))))
                where = (rows[:, None], torch.tensor(rule["columns"])[None, :])
                weight[where] = weight[where] * rule.get("keep", 0.0) + values * scales[name][where]


# ---- training ------------------------------------------------------------------------------------------------------


class ScaledAdam:
    """Adam (Kingma and Ba 2014) whose step is multiplied by a scale per element; gradients are clipped at norm 1."""

    def __init__(self, model: PreTrainedModel, scales: dict[str, Tensor]) -> None:
        """Start with zero moments for every parameter that has a scale; the others stay as they are."""
        named = dict(model.named_parameters())
        self.weights = [named[name] for name in scales]
        self.scales = list(scales.values())
        self.first = [torch.zeros_like(weight) for weight in self.weights]
        self.second = [torch.zeros_like(weight) for weight in self.weights]
        self.steps = 0

    @torch.no_grad()
    def step(self, rate: float) -> float:
        """Take one step, clear the gradients, and return their norm in units of the scales."""
        self.steps += 1
        slow, fast = 0.98, 0.9
        # With theta = weight / scale the gradient with respect to theta is grad · scale.
        gradients = torch._foreach_mul([weight.grad for weight in self.weights], self.scales)
        norm = float(torch.stack(torch._foreach_norm(gradients)).norm())
        torch._foreach_mul_(gradients, 1.0 / max(norm, 1.0))
        torch._foreach_lerp_(self.first, gradients, 1 - fast)
        torch._foreach_mul_(self.second, slow)
        torch._foreach_addcmul_(self.second, gradients, gradients, 1 - slow)
        root = torch._foreach_sqrt(self.second)
        torch._foreach_div_(root, math.sqrt(1 - slow**self.steps))
        torch._foreach_add_(root, 1e-8)
        update = torch._foreach_div(torch._foreach_mul(self.first, self.scales), root)
        torch._foreach_add_(self.weights, update, alpha=-rate / (1 - fast**self.steps))
        for weight in self.weights:
            weight.grad = None
        return norm


def logits_of(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    """Return the logits at the labels' positions, computed under bf16 autocast; a decoder's input are the labels."""
    given = inputs if model.config.is_encoder_decoder else {"input_ids": inputs["input_ids"]}
    with torch.autocast("cpu", torch.bfloat16):
        logits: Tensor = model(**given, use_cache=False).logits
    return logits.float().flatten(0, 1)


def loss_of(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy per target token in nats, computed under bf16 autocast."""
    return torch.nn.functional.cross_entropy(logits_of(model, inputs), inputs["labels"].flatten())


@torch.no_grad()
def bits_per_byte(model: PreTrainedModel, recipe: Recipe) -> float:
    """Return the cross-entropy of the held-out bytes (no sentinels, no end), of gaps or of all, in bits per byte, under
    autocast."""
    total, count = 0.0, 0
    for inputs in held_out_batches(recipe):
        labels = inputs["labels"]
        labels = labels.masked_fill((labels < BYTE0) | (labels >= BYTE0 + BYTES), -100)
        logits = logits_of(model, inputs)
        total += float(torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum"))
        count += int((labels != -100).sum())
    return total / count / math.log(2)


def unigram_bits(text: bytes) -> float:
    """Return the bits per byte of the held-out text under the training text's byte frequencies."""
    counts = Counter(text)
    held = HELD_OUT.read_bytes().replace(b"\n", b"")
    return -sum(math.log2((counts[byte] + 1) / (len(text) + BYTES)) for byte in held) / len(held)


def rate_at(step: int, recipe: Recipe) -> float:
    """Return the relative step size: linear warm-up, then a cosine down to 2%."""
    warm = min(1.0, step / recipe["warmup"])
    return float(recipe["rate"]) * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / recipe["steps"])))


def train(recipe: Recipe) -> PreTrainedModel:
    """Train by the recipe and return the model in fp32; progress goes to standard error."""
    text = gzip.decompress(TRAIN.read_bytes())
    model, scales = build(recipe)
    optimizer = ScaledAdam(model, scales)
    rng = torch.Generator().manual_seed(recipe["seed"])
    size = sum(weight.numel() for weight in model.parameters())
    print(f"{size} parameters; unigram {unigram_bits(text):.3f} bits/byte", file=sys.stderr)
    started, recent = time.monotonic(), 0.0
    for step in range(1, recipe["steps"] + 1):
        loss = loss_of(model, training_batch(text, recipe, rng))
        loss.backward()
        norm = optimizer.step(rate_at(step, recipe))
        if not math.isfinite(norm):
            raise SystemExit(f"error: step {step}: the gradient is not finite: lower 'rate' in the recipe")
        now = loss.item()
        recent = now if step == 1 else 0.95 * recent + 0.05 * now
        if step % recipe["report_every"] == 0 or step in (1, recipe["steps"]):
            line = f"step {step}/{recipe['steps']} loss {recent:.3f} gradient {norm:.2f}"
            if step % (4 * recipe["report_every"]) == 0:
                line += f" held-out {bits_per_byte(model, recipe):.3f} bits/byte"
            print(f"{line} {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return model.eval()


# ---- the stock folder ----------------------------------------------------------------------------------------------


def save(model: PreTrainedModel, recipe: Recipe, out: Path) -> None:
    """Write config.json, model.safetensors (every tensor bf16), generation_config.json and the tokenizer's files."""
    out.mkdir(parents=True, exist_ok=True)
    tied = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    if recipe["family"] != "t5":
        tied.append("lm_head.weight")
    state = model.state_dict()
    tensors = {name: t.to(torch.bfloat16).contiguous() for name, t in state.items() if not name.endswith(tuple(tied))}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    # In memory transformers 5 forces true, and written beside an untied head that makes transformers 4 tie it.
    config["tie_word_embeddings"] = recipe["family"] != "t5"
    for key in ("scale_decoder_outputs", "_name_or_path"):
        config.pop(key, None)
    (out / "model.safetensors").chmod(0o644)
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    model.generation_config.save_pretrained(out)
    if recipe["family"] == "gemma3":
        byte_tokenizer(recipe["model_max_length"]).save_pretrained(out)
        written = json.loads((out / "tokenizer_config.json").read_text(encoding="utf-8"))
        # transformers 4 does not know the name that transformers 5 writes for the same class.
        written["tokenizer_class"] = "PreTrainedTokenizerFast"
        (out / "tokenizer_config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        return
    # ByT5Tokenizer needs no more, while what transformers 5 saves for it does not load in transformers 4.
    tokenizer = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125, "model_max_length": recipe["model_max_length"]}
    tokenizer |= {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2) + "\n", encoding="utf-8")


def byte_tokenizer(longest: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes that begins a text with ``<bos>``, as Gemma's does; ByT5's would end a prompt."""
    special = {"<pad>": PAD, "<eos>": EOS, "<bos>": BOS}
    # The letters that byte-level tokenizers use for bytes: printable ones for themselves, others from 256 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(BYTES) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(BYTES + k) for k, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(special | {letters[byte]: byte + BYTE0 for byte in range(BYTES)}, []))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", BOS)])
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=longest, **names)


def main() -> None:
    """Train by the recipe in argv[1] into the folder argv[2]."""
    if len(sys.argv) != 3:
        raise SystemExit("usage: python recipes/train_demo.py RECIPE.yaml OUT")
    recipe = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(recipe["threads"])
    model = train(recipe)
    save(model, recipe, Path(sys.argv[2]))
    stored = type(model).from_pretrained(sys.argv[2], dtype=torch.float32).eval()
    print(f"held-out, weights as stored: {bits_per_byte(stored, recipe):.3f} bits/byte")


if __name__ == "__main__":
    main()
