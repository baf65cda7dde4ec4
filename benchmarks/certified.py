"""What it takes to finetune a checkpoint until no input can overflow it, and what that costs: kinds of hard
checkpoints, each rescaled alone, with the activation-magnitude penalty alone, with the bounds held alone, with both,
and with both where the bounds are a term of the loss instead.

    python benchmarks/certified.py                # all kinds and arms: about forty minutes on one core
    python benchmarks/certified.py scores gate --arms both "both, bounds in the loss"

The checkpoints are made here from those that the repository has. "scores", "gate" and "tied logits": the hard T5, which
was trained until all three pass 65504, with the bounds of the other two brought under it, so that one kind is left.
"Pegasus": the demo with a constant added to one head's keys, c·u with u the mean direction of the queries, up to scores
of 170,000; all keys of a query get the same, so that softmax and logits stay as they are. "late Pegasus": the demo with
a residual stream that is small in the first two layers of either stack (standard deviations of 0.3 to 1) and 50,033
times larger after them, past ten million: the second feed-forward also copies what its norm gives, so much larger that
what was there no longer shows, and what the layers behind it write is multiplied to match. An exponent for the stream
that holds the late layers brings the early ones under LayerNorm's eps, which stays. But for the arm the recipe is five
lines:

    source: KIND
    out: OUT
    data: {path: bf16_to_fp16/demo_data/python-topics.txt.gz}
    schedule: {steps: 120}
    penalty: {certify: true}

Held-out loss and KL to the original are those of the run's first and last evaluation (rescaled alone: the audit's KL,
unsafe also where fp16 is further from the original than bf16); "over" counts the bounds of the written checkpoint that
pass their limits, with the worst excess; times are of the whole finetune, audit included, in brackets what it took of
the processors' time, which other work changes little.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.commands.convert import convert
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.families.types import Attention
from bf16_to_fp16.finetuning.bound_constraint import BoundConstraint
from bf16_to_fp16.finetuning.penalty import ActivationPenalty
from bf16_to_fp16.finetuning.run import finetune
from bf16_to_fp16.observe.observer import SiteObserver
from bf16_to_fp16.run.stock import load

ROOT = Path(__file__).parents[1]
HARD = ROOT / "recipes" / "demo" / "t5-hard-bytes"
PEGASUS = ROOT / "bf16_to_fp16" / "demo_data" / "pegasus-bytes"
HELD_OUT, FIRST_BYTE = PEGASUS.parent / "held_out.txt", 3
TEXT = ROOT / "bf16_to_fp16" / "demo_data" / "python-topics.txt.gz"
T5_KINDS = {"scores": ":", "gate": "wi_0", "tied logits": "lm_head"}
RESCALING = "nothing, rescaled alone"
ARMS: dict[str, dict[str, Any]] = {
    RESCALING: {},
    "penalty": {"certify": False},
    "bounds": {"form": "none", "certify": True},
    "both": {"certify": True},
    "both, bounds in the loss": {"certify": True},
}
SCORES = 170_000.0

SMALL, LARGER, COPIES = 1 / 1013, 50_033.0, 1
"""The factor on the whole stream of the late Pegasus, on what comes after it has been copied, and the layer in which it
is."""


class InTheLoss(BoundConstraint):
    """The bounds as a term of the loss instead: their excess in bits, with weights by dual ascent as the penalty's."""

    def __init__(self, *given: Any) -> None:
        """Begin with weights of 0."""
        super().__init__(*given)
        self.weights: dict[str, float] = {}

    def hold(self, step: int, steps: int) -> None:
        """Let the weights follow the excess, and move nothing."""
        for site, bits in self.excess().items() if self.first is not None else ():
            excess = float(bits.max())
            self.weights[site] = max(0.0, self.weights.get(site, 0.0) + 0.05 * min(max(excess, -1.0), 16.0))

    def term(self) -> torch.Tensor:
        """Return what is added to the loss."""
        over = {site: (bits > 0).nonzero()[:, 0] for site, bits in self.excess().items() if self.weights.get(site)}
        found = self.bounds.at({site: rows for site, rows in over.items() if len(rows)})
        terms = [self.weights[site] * (bounds / self.target).log2().sum() for site, bounds in found.items()]
        return torch.stack(terms).sum() if terms else torch.zeros(())


@contextmanager
def in_the_loss() -> Iterator[None]:
    """Finetune with ``InTheLoss``, whose term the penalty on activations brings along."""
    made: list[InTheLoss] = []
    plain = ActivationPenalty.__call__

    def construct(*given: Any) -> InTheLoss:
        made.append(InTheLoss(*given))
        return made[-1]

    with (
        patch("bf16_to_fp16.finetuning.trainer.BoundConstraint", construct),
        patch.object(ActivationPenalty, "__call__", lambda self: plain(self) + made[-1].term()),
    ):
        yield


def make_t5(kind: str, folder: Path) -> None:
    """Write the hard T5 with only one kind of site over the limit."""
    model = load(HARD, torch.float32)
    constraint = BoundConstraint(resolve(open_checkpoint(HARD)), model)
    others = [part for name, part in T5_KINDS.items() if name != kind]
    for _ in range(30):
        for site, bits in constraint.excess().items():
            if any(part in site for part in others) and float(bits.max()) > 0:
                # Half of it: the sites of an attention come down together.
                constraint.project(site, bits.clamp(min=0) / 2)
    save(model, HARD, folder)


def make_pegasus(folder: Path) -> None:
    """Write the demo Pegasus with large scores in one head, which change nothing."""
    model = load(PEGASUS, torch.float32, attention="eager")
    layout = resolve(open_checkpoint(PEGASUS))
    w = next(w for w in layout.topology if isinstance(w, Attention))
    heads = layout.heads(w)
    attention = model.get_submodule(w.at)
    queries: list[torch.Tensor] = []
    handle = model.get_submodule(w.query).register_forward_hook(lambda module, given, made: queries.append(made))
    ids = torch.randint(3, model.config.vocab_size, (8, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(input_ids=ids, decoder_input_ids=ids[:, :8])
        handle.remove()
        head = queries[0].flatten(0, 1).view(-1, heads, queries[0].shape[-1] // heads)[:, 0]
        direction = torch.nn.functional.normalize(head.mean(0), dim=0)
        size = SCORES / float((head @ direction).abs().max())
        attention.k_proj.bias.view(heads, -1)[0] += size * direction
        with SiteObserver(model) as observer:
            model(input_ids=ids, decoder_input_ids=ids[:, :8])
    reached = {site.name: site.amax for site in observer.sites()}[f"{w.at}:scores"]
    print(f"Pegasus: scores up to {reached:,.0f} at {w.at}")
    save(model, PEGASUS, folder)


@torch.no_grad()
def make_late_pegasus(folder: Path) -> None:
    """Write the demo Pegasus with a residual stream that is small early and past ten million late."""
    demo = load(PEGASUS, torch.float32)
    spread: dict[str, float] = {}
    for path, module in demo.named_modules():
        if path.endswith("final_layer_norm"):
            module.register_forward_hook(
                lambda norm, given, made, path=path: spread.update({path: float(given[0].var(-1).median()) ** 0.5})
            )
    ids = torch.tensor(list(HELD_OUT.read_bytes()[:512])).view(8, 64) + FIRST_BYTE
    demo(input_ids=ids, decoder_input_ids=ids[:, :32])
    d, wider = demo.config.d_model, dict[str, int]()
    for stack in ("encoder", "decoder"):
        wider[f"{stack}_ffn_dim"] = getattr(demo.config, f"{stack}_ffn_dim") + 2 * d
    model = type(demo)(type(demo.config).from_dict(demo.config.to_dict() | wider))
    weights, before = model.state_dict(), demo.state_dict()
    for name, weight in weights.items():
        weight.zero_()[tuple(map(slice, before[name].shape))] = before[name]
    weights["model.shared.weight"] *= SMALL
    both_ways = torch.cat([torch.eye(d), -torch.eye(d)])
    for stack in ("encoder", "decoder"):
        weights[f"model.{stack}.embed_positions.weight"] *= SMALL
        for number in range(getattr(demo.config, f"{stack}_layers")):
            at = f"model.{stack}.layers.{number}"
            attention = SMALL * (LARGER if number > COPIES else 1.0)
            factors = {"self_attn.out_proj": attention, "encoder_attn.out_proj": attention}
            factors["fc2"] = SMALL * (LARGER if number >= COPIES else 1.0)
            for name, factor in factors.items():
                for what in ("weight", "bias") if f"{at}.{name}.weight" in weights else ():
                    weights[f"{at}.{name}.{what}"] *= factor
        at = f"model.{stack}.layers.{COPIES}"
        norm, size = f"{at}.final_layer_norm", spread[f"{at}.final_layer_norm"] * SMALL * LARGER
        undone = size / weights[f"{norm}.weight"]
        weights[f"{at}.fc1.weight"][-2 * d :] = both_ways
        weights[f"{at}.fc2.weight"][:, -2 * d :] = both_ways.T * undone[:, None]
        weights[f"{at}.fc2.bias"] -= undone * weights[f"{norm}.bias"]
    for what in ("weight", "bias"):  # the head is the embedding
        weights[f"model.decoder.layer_norm.{what}"] /= SMALL
    save(model, PEGASUS, folder, wider)


def save(model: Any, source: Path, folder: Path, changes: Mapping[str, Any] | None = None) -> None:
    """Write a model in bf16 with the other files of its source; changes: to its config."""
    shutil.copytree(source, folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | dict(changes or {})
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


MAKERS = {kind: partial(make_t5, kind) for kind in T5_KINDS} | {
    "Pegasus": make_pegasus,
    "late Pegasus": make_late_pegasus,
}


def run(kind: str, arm: str, source: Path, work: Path, steps: int) -> str:
    """Finetune once and return a line of the table."""
    schedule: dict[str, Any] = {"steps": steps}
    if arm == "bounds":
        # Without the penalty nothing says when fp16 holds the activations; the lid is down by then.
        schedule["bf16_steps"] = int(0.6 * steps)
    recipe = {
        "source": str(source),
        "out": str(work / f"{source.name}-{list(ARMS).index(arm)}"),
        "data": {"path": str(TEXT)},
        "schedule": schedule,
        "penalty": ARMS[arm],
        "device": "cpu",
        "evaluation": {"every": steps},
    }
    begun, used = time.monotonic(), time.process_time()
    with in_the_loss() if "loss" in arm else nullcontext():
        result = convert(source, recipe["out"], target="half") if arm == RESCALING else finetune(recipe)
    took, used = time.monotonic() - begun, time.process_time() - used
    assert result is not None
    report = result.report
    over = report["uncertified"]
    worst = max((entry["excess_bits"] for entry in over), default=0.0)
    losses, divergence = "", report["fidelity"]["kl_fp16"]
    if report.get("finetune"):
        first, last = report["finetune"]["evaluations"][0], report["finetune"]["evaluations"][-1]
        losses = f"{first['held_out_loss']:.3f} to {last['held_out_loss']:.3f}"
        divergence = last["held_out_divergence"]
    headroom = min(regime["headroom_bits"] for regime in report["regimes"].values())
    cells = (
        kind,
        arm,
        f"{report['verdict']}, {report['proof']}",
        f"{len(over)} ({worst:.1f} bits)" if over else "0",
        f"{headroom:.1f}",
        losses,
        "none reported" if divergence is None else f"{divergence:.3f}",
        f"{took:.0f} ({used:.0f})",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Make the checkpoints, finetune each in every arm, and print a Markdown table."""
    kinds = list(MAKERS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(kinds)}; all by default")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if unknown := set(args.kinds) - set(kinds):
        parser.error(f"unknown kind {min(unknown)!r}; choose of {', '.join(kinds)}")
    torch.set_num_threads(args.threads)
    print(
        "| checkpoint | trained with | verdict | bounds over | headroom (bits) | held-out loss | KL | seconds (CPU) |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for kind in args.kinds or kinds:
            source = Path(scratch) / kind.replace(" ", "-")
            MAKERS[kind](source)
            for arm in args.arms:
                print(run(kind, arm, source, Path(scratch), args.steps), flush=True)


if __name__ == "__main__":
    main()
