"""Are edits worth what ``convert`` says of them? Converts random tiny models of every family that no exact plan saves.

    python benchmarks/edits.py 300 [--first 0] [--attack 8]

Gates, plain feed-forwards, heads, gains, key biases and logits are multiplied by hand to between 1e5 and 1e8, and each
model is converted with all defaults. What is safe must be no further from the source than bf16, or twice as far where
it is certified. What is certified must stand an adversary that moves every norm's input freely, and every so many
models a gradient search. Printed as well is how many predicted costs are within a factor 3 of the measured ones. Exits
with 1 where anything is broken.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from conftest import PICTURES
from support import tiny
from support.adversary import adverse_inputs, observe
from support.contract import FREE, broken, certified, outputs
from torch import Tensor

from bf16_to_fp16 import UserError, convert
from bf16_to_fp16.auditing.attack import attack
from bf16_to_fp16.auditing.fidelity import add_outputs
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.conversion.measuring import fidelity_to_original
from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.families.types import Attention, Experts, Topology
from bf16_to_fp16.observe.meter import RangeObserver
from bf16_to_fp16.ranges import ModuleRange
from bf16_to_fp16.report import figures
from bf16_to_fp16.rescaling.centred import centrable
from bf16_to_fp16.rescaling.edits import MOST_FOR_A_PROOF
from bf16_to_fp16.rescaling.weights import ModelTensors
from bf16_to_fp16.run.agreement import agreed_layout
from bf16_to_fp16.run.lanes import Walk
from bf16_to_fp16.run.probe import checkpoint_batches
from bf16_to_fp16.run.stock import load

NOISE = 1e-10  # divergences of two fp32 runs
FACTOR = 3.0  # how far from the measured cost a good prediction may be
STEPS = 40  # gradient steps of a search
MOST = 24  # largest exponent of what is multiplied

Ranges = dict[str, ModuleRange]


@dataclass
class Saturated:
    """A model to saturate: its layout, what its modules reach on random ids, and the choices that a seed gives."""

    model: Any
    layout: Layout
    ranges: Ranges
    rng: random.Random
    done: set[str] = field(default_factory=set)

    def chosen(self, found: Sequence[Topology], path: Callable[[Any], str]) -> Any:
        """Return a sublayer that was not chosen before, raise IndexError where there is none."""
        w: Any = self.rng.choice([w for w in found if path(w) not in self.done])
        self.done.add(path(w))
        return w

    def factors(self, reached: Tensor) -> Tensor:
        """Return powers of two that bring each magnitude to one number between 1e5 and 1e8, of a quiet one less far."""
        goal = 10.0 ** self.rng.uniform(5, 8)
        return 2.0 ** (goal / reached.clamp(min=1e-6)).log2().round().clamp(max=MOST)

    def some(self, count: int) -> Tensor:
        """Return a few of so many units, or sometimes all."""
        number = count if self.rng.random() < 0.15 else self.rng.randint(1, max(1, count // 4))
        return torch.tensor(sorted(self.rng.sample(range(count), number)))

    def weights(self, path: str) -> list[Tensor]:
        """Return the weight of a linear, and its bias where it has one."""
        module: Any = self.model.get_submodule(path)
        return [each for each in (module.weight, getattr(module, "bias", None)) if each is not None]

    def neurons(self, path: str, output: str, start: int, count: int) -> None:
        """Multiply some rows of a linear, and mostly divide what reads them, by all of it or by less."""
        chosen = self.some(count)
        factors = self.factors(self.ranges[path].output.amax[start + chosen])
        for each in self.weights(path):
            each[start + chosen] *= factors.view(-1, *[1] * (each.dim() - 1))
        if self.rng.random() < 0.8:
            self.model.get_submodule(output).weight[:, chosen] /= factors * 2.0 ** self.rng.choice((0, 0, 0, -2))

    def gates(self) -> str:
        w = self.chosen([w for w in self.layout.feed_forwards if w.gate and w.gate in self.ranges], lambda w: w.output)
        self.neurons(w.gate, w.output, 0, self.layout.tensors[f"{w.output}.weight"].shape[1])
        return f"gate {w.activation}"

    def plain(self) -> str:
        known = [w for w in self.layout.feed_forwards if w.linear in self.ranges]  # no token may take an expert
        plain = [w for w in known if not w.gate and w.activation != "relu"]
        w = self.chosen(plain, lambda w: w.output)
        self.neurons(w.linear, w.output, 0, self.layout.tensors[f"{w.output}.weight"].shape[1])
        return f"plain {w.activation}"

    def scores(self) -> str:
        attentions = [w for w in self.layout.topology if isinstance(w, Attention)]
        scores = {w.at: seen for w in attentions if w.at in self.ranges and (seen := self.ranges[w.at].scores)}
        w = self.chosen([w for w in attentions if w.at in scores], lambda w: w.at)
        seen = scores[w.at]
        factor = self.factors(torch.tensor(seen.product))
        if w.query_norm:
            share = self.rng.choice((0, 0.5, 1))
            for norm, part in ((w.query_norm, share), (w.key_norm, 1 - share)):
                self.gain(norm, 2.0 ** (factor.log2() * part).round())
            return "gains of queries and keys"
        size = self.layout.head_size(w)
        for head in self.some(self.layout.heads(w)).tolist():
            for each in self.weights(w.query):
                each[head * size : (head + 1) * size] *= factor
        return "scores" + (" under a cap" if self.layout.cap(w) is not None else "")

    def gain(self, norm: str, factor: Tensor) -> None:
        """Multiply what a norm multiplies by."""
        offset = self.layout.tensors[f"{norm}.weight"].offset
        for each in self.weights(norm):
            each.copy_((each + offset) * factor - offset)

    def keys(self) -> str:
        w = self.chosen(centrable(self.layout), lambda w: w.at)
        bias = self.model.get_submodule(w.key).bias
        bias.normal_().mul_(self.factors(self.ranges[w.query].output.amax.amax()))
        return "key bias"

    def logits(self) -> str:
        head = self.layout.head
        assert head is not None
        self.chosen([head], lambda w: w.at)
        last = head.linears[-1]
        reached = self.ranges[last.at].output.amax
        if self.layout.tied:
            norm = self.layout.stacks()[-1].ends.norm
            self.gain(norm, self.factors(reached.amax()))
            return "logits, tied"
        linear = self.rng.choice(head.linears)
        weights = self.weights(linear.at)
        chosen = self.some(len(weights[0]))
        factors = self.factors(self.ranges[linear.at].output.amax[chosen].amax()).expand(len(chosen))
        for each in weights:
            each[chosen] *= factors.view(-1, *[1] * (each.dim() - 1))
        return "logits" if linear is last else "dense of a classifier"

    def routing(self) -> str:
        w = self.chosen([w for w in self.layout.topology if isinstance(w, Experts)], lambda w: w.classifier)
        factor = self.factors(self.ranges[w.classifier].output.amax.amax())
        for each in self.weights(w.classifier):
            each *= factor
        return "router"

    def possible(self) -> list[Callable[[], str]]:
        """Return what can be saturated in this model."""
        found: list[Callable[[], str]] = [self.scores]
        if any(w.gate for w in self.layout.feed_forwards):
            found += [self.gates, self.gates]
        if any(not w.gate and w.activation != "relu" for w in self.layout.feed_forwards):
            found += [self.plain, self.plain]
        if any(isinstance(w, Experts) for w in self.layout.topology):
            found.append(self.routing)
        if centrable(self.layout):
            found.append(self.keys)
        if self.layout.head is not None and self.layout.cap(self.layout.head) is None:
            found.append(self.logits)
        return found


def model_of(seed: int) -> tuple[str, Any, list[str], torch.dtype]:
    """Return the kind, the model, what is saturated in it and the dtype of its file that a seed gives."""
    rng = random.Random(seed)
    kind = rng.choice(sorted(tiny.KINDS))
    entry = next(entry for entry in tiny.ENTRIES if kind in entry.kinds)
    drawn = {key: rng.choice(list(values)) for key, values in entry.shape.items()}
    drawn |= {"activation_function": rng.choice(("gelu", "gelu_new", "silu"))} if "activation_function" in drawn else {}
    shape = drawn if rng.random() < 0.5 else tiny.few_layers(kind)
    dtype = torch.float32 if rng.random() < 0.2 else torch.bfloat16
    model = tiny.build(kind, seed, factor=rng.choice((0.3, 1.0, 30.0, 900.0)), dtype=dtype, **shape)
    layout = resolve(ModelTensors(model))
    model.set_attn_implementation("eager")  # whose scores can be seen
    observer = RangeObserver(model)
    with observer:
        outputs(model)
    made = Saturated(model, layout, observer.ranges(), rng)
    with torch.no_grad():
        done = []
        for _ in range(rng.choice((1, 1, 2, 3))):
            with suppress(IndexError):  # where all of a kind are taken
                done.append(rng.choice(made.possible())())
        for tensor in model.state_dict().values():
            tensor.copy_(tensor.to(dtype).to(tensor.dtype))
    return kind, model, sorted(set(done)), dtype


@dataclass
class Tally:
    """What came of the models, and the folder in which they are converted."""

    work: Path
    attacks: int
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    costs: list[tuple[float, float, str]] = field(default_factory=list)
    elsewhere: list[tuple[float, int]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def broken(self, seed: int, what: str) -> None:
        self.violations.append(f"seed {seed}: {what}")
        print(self.violations[-1], flush=True)

    def run(self, seed: int) -> None:
        """Convert the model of one seed and check what is said of it."""
        kind, model, done, dtype = model_of(seed)
        source, out = tiny.save(model, self.work / f"{seed}", dtype), self.work / f"{seed}-fp16"
        try:
            report = convert(source, out).report
        except UserError as error:
            self.count(done, "refused")
            self.reasons[str(error).partition(":")[0][:80]] += 1
            return
        verdict = report["verdict"] if report["verdict"] == "unsafe" else report["proof"]
        self.count(done, verdict)
        close = report["fidelity"]
        if report["verdict"] == "safe":
            self.check_safe(seed, report)
            self.other_inputs(seed, source, out)
        else:
            why = {f"{e['kind']}: {e['reason']}" if e["kind"] == "inexact" else e["kind"] for e in report["unsafe"]}
            self.reasons[f"unsafe: {'; '.join(sorted(why))}"] += 1
        if report["proof"] == "certified":
            self.check_certified(seed, out)
        entries = report.get("inexact", [])
        self.costs += [(e["predicted"], e["measured"], f"seed {seed} {e['site']}") for e in entries]
        costs = " ".join(f"{e['site']}:{e['exponent']}:{e['predicted']:.1e}/{e['measured']:.1e}" for e in entries)
        closeness = " ".join(
            f"{close[key]:.1e}" if close.get(key) is not None else "-" for key in ("kl_fp16", "kl_bf16")
        )
        print(f"{seed} {kind} [{', '.join(done)}] {verdict} {closeness} {costs}", flush=True)

    def count(self, done: list[str], outcome: str) -> None:
        for name in done:
            self.counts.setdefault(name, Counter())[outcome] += 1

    def check_safe(self, seed: int, report: Any) -> None:
        """No regime broke, and fp16 is no further from the source than bf16, or twice as far where it is proven."""
        close = report["fidelity"]
        if any(regime["nonfinite"] or regime["saturated"] for regime in report["regimes"].values()):
            self.broken(seed, "safe, and a regime broke")
        most = MOST_FOR_A_PROOF if report["proof"] == "certified" else 1.0
        if not close["kl_fp16"] <= max(most * close["kl_bf16"], NOISE):
            self.broken(seed, f"safe, and fp16 at {close['kl_fp16']:.1e} from the source, bf16 {close['kl_bf16']:.1e}")

    def other_inputs(self, seed: int, source: Path, out: Path) -> None:
        """Note how far fp16 is from the source on inputs that the conversion did not see, over what bf16 is."""
        original, written = open_checkpoint(source), open_checkpoint(out)
        inputs = checkpoint_batches(original, agreed_layout(original), None, seed + 1000)
        walk = Walk(written)
        half = add_outputs(walk, inputs, torch.float16, half=True)
        walk.run()
        close = fidelity_to_original(original, [lane.result for lane in half], inputs)
        fp16, bf16 = math.inf if close.kl_fp16 is None else close.kl_fp16, close.kl_bf16 or math.inf
        self.elsewhere.append((fp16 / max(bf16, NOISE), seed))
        if not math.isfinite(fp16):
            self.broken(seed, "safe, and not finite on other inputs")

    def check_certified(self, seed: int, out: Path) -> None:
        """No input of a norm, and no embedding that a search finds, passes a bound or gives inf."""
        half = load(out, torch.float16, half=True).eval()
        layout, certificate = certified(half)
        seen = observe(half, layout, adverse_inputs(load(out, torch.float32).eval(), layout, 8, seed))
        sites = {site.name for site in certificate.sites if site.kind not in FREE}
        wrong = broken(certificate, seen, FREE) + [n for n in sites & seen.keys() if not math.isfinite(seen[n])]
        if wrong or not certificate.holds:
            self.broken(seed, f"certified, and an adversary breaks {wrong[:3]}")
        if self.attacks and seed % self.attacks == 0:
            found = attack(half, layout, steps=STEPS, seed=seed)
            if past := [site.name for site in found.found if not site.worst <= site.limit]:
                self.broken(seed, f"certified, and a search breaks {past[:3]}")

    def table(self) -> None:
        """Print what came of every kind."""
        columns = ("certified", "observed", "unsafe", "refused")
        print(f"\n| saturated | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
        for name, found in sorted(self.counts.items()):
            print(f"| {name} | {' | '.join(str(found[column]) for column in columns)} |")
        for reason, number in self.reasons.most_common():
            print(f"{number} {reason}")
        near = [other for other in self.costs if within(*other[:2])]
        print(f"{len(near)} of {len(self.costs)} predicted costs within a factor {FACTOR:g} of the measured")
        for predicted, measured, where in self.costs:
            if not within(predicted, measured):
                print(f"  predicted {predicted:.1e}, measured {measured:.1e}: {where}")
        further = [(ratio, seed) for ratio, seed in self.elsewhere if ratio > 1]
        print(f"{len(further)} of {len(self.elsewhere)} safe ones further than bf16 on other inputs: {further}")
        print(f"{len(self.violations)} violations", *self.violations, sep="\n  ")


def within(predicted: float, measured: float) -> bool:
    """Return whether a predicted cost is near enough to the measured one."""
    low, high = sorted((max(predicted, NOISE), max(measured, NOISE)))
    return high <= FACTOR * low


def main() -> int:
    """Convert and print."""
    parser = argparse.ArgumentParser(description="convert models that only edits save")
    parser.add_argument("models", type=int, help="how many")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--attack", type=int, default=8, help="a search for every so many certified ones, 0 for none")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no other model after so long")
    asked = parser.parse_args()
    end = time.monotonic() + 60 * asked.minutes
    for name in PICTURES:  # whose drawing takes as long as a plan
        setattr(figures, name, lambda _: [])
    with tempfile.TemporaryDirectory() as folder:
        tally = Tally(Path(folder), asked.attack)
        for seed in range(asked.first, asked.first + asked.models):
            if time.monotonic() > end:
                break
            try:
                tally.run(seed)
            except Exception:
                tally.broken(seed, f"failed\n{traceback.format_exc()}")
    tally.table()
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
