"""Measures a demo checkpoint on the held-out text: ``python recipes/measure_demo.py FOLDER``.

Prints the largest magnitudes in fp32, layer by layer, and how far from fp32 the logits of three copies are: in bf16, in
fp16 as stored, and in fp16 after a power-of-two rescaling in memory whose exponents are guessed from the magnitudes. It
uses nothing of the package, so that the checkpoints and the converter are judged apart.
"""

from __future__ import annotations

import copy
import math
import sys
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from train_demo import HELD_OUT, batch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

LIMIT = 65504.0
BLOCKS = ("T5Block", "PegasusEncoderLayer", "PegasusDecoderLayer", "Gemma3DecoderLayer")
SHOWN = ("layer_norm", "layernorm", ".norm", ".wo", ".wo input", ".fc2", ".fc2 input", ".down_proj input", "lm_head")
POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
WRITERS = (".o", ".wo", ".out_proj", ".fc2")
BEFORE = {"fc2": "fc1", "wo": "wi_1", "down_proj": "up_proj"}
GAPS = {"spans": 3, "span_length": 18}


def held_out(family: str) -> list[dict[str, Tensor]]:
    """Return 96 held-out windows of 180 bytes in batches of 16: with three gaps each, or as they are."""
    rng = torch.Generator().manual_seed(1)
    windows = [line.encode()[:180] for line in HELD_OUT.read_text(encoding="utf-8").splitlines()[:96]]
    made = [batch(windows[i : i + 16], GAPS | {"family": family}, rng) for i in range(0, len(windows), 16)]
    return made if family != "gemma3" else [{"input_ids": each["input_ids"]} for each in made]


@torch.no_grad()
def logits(model: PreTrainedModel, batches: list[dict[str, Tensor]]) -> Tensor:
    """Return the logits of all target tokens, (tokens, vocabulary), fp64."""
    return torch.cat([model(**inputs, use_cache=False).logits.double().flatten(0, 1) for inputs in batches])


def divergence(reference: Tensor, other: Tensor) -> float:
    """Return the mean KL(reference ‖ other) per token in nats."""
    p, q = reference.log_softmax(-1), other.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


class Signals:
    """The largest magnitude per channel of what enters and leaves every linear and leaves every norm and block."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Put hooks on the model; ``channels`` fills as it runs."""
        self.channels: dict[str, Tensor] = {}
        self.rms: dict[str, list[float]] = defaultdict(list)
        for name, module in model.named_modules():
            kind = type(module).__name__
            if isinstance(module, nn.Linear) or "Norm" in kind or kind in BLOCKS:
                module.register_forward_hook(lambda m, args, out, name=name: self.see(name, m, args, out))

    def see(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Record one call of a module."""
        block = type(module).__name__ in BLOCKS
        seen = {name: output[0] if isinstance(output, tuple) else output}
        if block or isinstance(module, nn.Linear):
            seen[name + " input"] = args[0]
        for key, value in seen.items():
            flat = value.detach().abs().float().flatten(0, -2)
            top = flat.amax(0)
            self.channels[key] = torch.maximum(self.channels.get(key, top), top)
            self.rms[key].append(float(flat.square().mean()))

    def amax(self, *endings: str) -> float:
        """Return the largest magnitude among the signals whose names end so, 0 if there is none."""
        return max((float(top.max()) for name, top in self.channels.items() if name.endswith(endings)), default=0.0)


@torch.no_grad()
def rescaled(model: PreTrainedModel, r: int, exponents: dict[str, Tensor]) -> PreTrainedModel:
    """Return a copy with the residual at 2^-r and each named linear's inputs at 2^-exponent; LayerNorm's eps stays."""
    moved = copy.deepcopy(model)
    s = 2.0**-r
    for name, module in moved.named_modules():
        if name in exponents:
            factor = torch.exp2(-exponents[name])
            parent, leaf = name.rsplit(".", 1)
            before: Any = moved.get_submodule(f"{parent}.{BEFORE[leaf]}")
            before.weight *= factor[:, None]
            module.weight /= factor
            if before.bias is not None:
                before.bias *= factor
        if name.endswith((*WRITERS, "embed_positions", "shared", "model.embed_tokens")):
            module.weight *= s
            if getattr(module, "bias", None) is not None:
                module.bias *= s
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon *= s * s
        if name.endswith(POST_NORMS):  # what is stored is the gain less 1
            module.weight.copy_((1 + module.weight) * s - 1)
        elif name.endswith(("input_layernorm", "pre_feedforward_layernorm", "model.norm")):
            module.eps *= s * s
        if name == "model.norm":  # Gemma's head is its embedding
            module.weight.copy_((1 + module.weight) / s - 1)
        if name == "model.decoder.layer_norm":  # Pegasus's head is its embedding
            module.weight /= s
            module.bias /= s
    return moved


def is_residual(name: str) -> bool:
    """Say whether a signal is a block's output, or what enters the first block."""
    *_, parent, leaf = ["", *name.split(".")]
    return parent in ("block", "layers") and (leaf.isdigit() or leaf == "0 input")


def print_signals(signals: Signals) -> None:
    """Print the table of residuals, feed-forwards and norms, and the rest's maxima."""
    print(f"{'signal':52} {'amax':>9} {'rms':>9} {'median channel':>14}  channels past 65504")
    for name, top in signals.channels.items():
        if name.endswith(SHOWN) or is_residual(name):
            label = name.replace(".DenseReluDense", "").replace(".wo input", ".product").replace(".fc2 input", ".relu")
            label = label.replace(".down_proj input", ".product")
            rms = math.sqrt(sum(signals.rms[name]) / len(signals.rms[name]))
            past = f"{int((top > LIMIT).sum())} of {len(top)}"
            print(f"{label:52} {float(top.max()):9.4g} {rms:9.4g} {float(top.median()):14.4g}  {past}")
    for endings in (
        (".q", ".q_proj"),
        (".k", ".k_proj"),
        (".v", ".v_proj"),
        (".wi_0",),
        (".wi_1",),
        (".fc1",),
        (".up_proj",),
        (".gate_proj",),
        (*WRITERS[::2], ".o_proj"),
    ):
        if signals.amax(*endings):
            print(f"largest {' or '.join(endings):15} {signals.amax(*endings):9.4g}")


def main(folder: str) -> None:
    """Print the signals, the divergences and the share of small weights."""
    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    batches = held_out(config.model_type.removesuffix("_text"))
    reference = logits(model, batches)
    watched = copy.deepcopy(model)
    signals = Signals(watched)
    logits(watched, batches)
    print_signals(signals)

    written = (*WRITERS, *POST_NORMS)
    peak = max(float(t.max()) for n, t in signals.channels.items() if n.endswith(written) or is_residual(n))
    r = max(0, math.ceil(math.log2(peak / (LIMIT / 2))))
    products = {
        n.removesuffix(" input"): t
        for n, t in signals.channels.items()
        if n.endswith(tuple(f".{leaf} input" for leaf in BEFORE))
    }
    moved = rescaled(model, r, {n: (t / 2048).clamp_min(1).log2().ceil() for n, t in products.items()})
    drift = logits(moved, batches)
    bf16 = divergence(reference, logits(copy.deepcopy(model).bfloat16(), batches))
    fp16 = divergence(reference, logits(copy.deepcopy(moved).half(), batches))
    stored = divergence(reference, logits(copy.deepcopy(model).half(), batches))
    print(f"KL to fp32: bf16 {bf16:.3g}; fp16 as stored {stored:.3g}")
    print(f"rescaled by 2^-{r}: fp16 {fp16:.3g} = bf16's / {bf16 / fp16:.1f}; fp32 {divergence(reference, drift):.3g}")
    for ending in ("shared.weight", ".o.weight", ".wo.weight", "out_proj.weight", "fc2.weight", "embed_tokens.weight"):
        some = [weight.float().abs().flatten() for name, weight in model.named_parameters() if name.endswith(ending)]
        if some:
            share = float((torch.cat(some) * 2.0**-4 < 2.0**-17).float().mean())
            print(f"share of {ending:15} with |w|/16 < 2^-17: {share:.1e}")


if __name__ == "__main__":
    main(sys.argv[1])
