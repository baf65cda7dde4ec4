"""Are edits worth what ``convert`` says of them? Three tables of models that no exact plan saves.

    python benchmarks/edits.py saturated [--cases gate scores ...]
    python benchmarks/edits.py random [--models 300] [--first 0]
    python benchmarks/edits.py rare [--cases NAME ...]

saturated: the checkpoints of ``benchmarks/saturated.py``, trained here, half a minute each; what ``convert`` makes
of them, as stock classes judge it (``tests/support/judge.py``).

random: tiny models of every family, in which gates, plain feed-forwards, heads, gains, key biases and logits are
multiplied by hand to between 1e5 and 1e8. What is safe must be no further from the source than bf16, or twice as far
where it is certified; what is certified must stand an adversary that moves every norm's input freely, and every so many
models a gradient search. Exits with 1 where anything is broken.

rare: demo checkpoints in which one rare byte passes 65504 in many heads and gates at once, while usual rows are soft,
so that a power of two on whole rows flattens them. One channel of the
stream is taken from all other bytes, and queries and gates answer to it: no other byte's row changes by that.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import pytest
import saturated
import torch
from models import DEMO
from results import print_header, print_row
from support import brief, tiny
from support.adversary import adverse_inputs, observe
from support.contract import FREE, broken, certified, outputs
from support.judge import judge
from torch import Tensor

from bf16_to_fp16 import UserError, audit, convert
from bf16_to_fp16.checkpoint.reader import Checkpoint, open_checkpoint
from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.families.resolve import ModelTensors, resolve
from bf16_to_fp16.families.wiring import Attention, Experts
from bf16_to_fp16.measuring.attack import attack
from bf16_to_fp16.measuring.batch import run_batch
from bf16_to_fp16.measuring.fidelity import output_on
from bf16_to_fp16.measuring.meter import RangeObserver
from bf16_to_fp16.measuring.probe import whole_rows
from bf16_to_fp16.measuring.soft_side import LEAST, LENGTH, TIMES, divergences, mean_bf16_divergence
from bf16_to_fp16.measuring.stock import load, load_config, vocabulary_of
from bf16_to_fp16.ranges import ModuleRange
from bf16_to_fp16.rescaling.centred import centrable, tables_of
from bf16_to_fp16.rescaling.edits import MOST_FOR_A_PROOF
from bf16_to_fp16.wording import power

TEXTS, SEED = 24, 7  # of the judge
NOISE = 1e-10  # divergences of two fp32 runs
DRAWN = 500  # random pairs of ids that fill rows
CONFIRMED, AGAIN = 16, 32  # most inputs of a harmed row that are judged once more, each in so many rows
STEPS, SEARCHED = 40, 8  # gradient steps of a search, and of how many random models one is searched
MOST = 24  # largest exponent of what is multiplied


def texts(file: str = "held_out.txt") -> list[str]:
    return (DEMO / file).read_text(encoding="utf-8").splitlines()[:TEXTS]


# ---- trained ---------------------------------------------------------------------------------------------------------


def compare_saturated(asked: argparse.Namespace, work: Path) -> None:
    print_header("kind", "bf16: text, random", "fp16: text, random", "verdict, proof", "edits")
    for kind in asked.cases or saturated.KINDS:
        source = saturated.saturated(kind, work / "made")
        report = convert(source, work / kind).report
        found = judge(source, work / kind, texts(), SEED)
        edits = [f"`{edit['site']}` {power(edit['exponent'])}" for edit in report.get("inexact", [])]
        edits += [f"`{path}` centred keys" for path in report["plan"].get("centred_keys", [])]
        print_row(
            kind,
            f"{found.kl_bf16_text:.1e}, {found.kl_bf16_random:.1e}",
            f"{found.kl_fp16_text:.1e}, {found.kl_fp16_random:.1e}",
            f"{report['verdict']}, {report['proof']}",
            "; ".join(edits) or "none",
        )


# ---- random ----------------------------------------------------------------------------------------------------------


@dataclass
class Saturation(saturated.Scaling):
    """Multiplies parts of a model: its layout, what its modules reach on random ids, and the choices that a seed gives.
    Each method takes a sublayer that none has taken, and says what it was; IndexError where there is none."""

    ranges: dict[str, ModuleRange]
    rng: random.Random
    done: set[str] = field(default_factory=set)

    def chosen(self, found: Sequence[Any]) -> Any:
        w = self.rng.choice([w for w in found if w.at not in self.done])
        self.done.add(w.at)
        return w

    def factors(self, reached: Tensor) -> Tensor:
        """Return powers of two that bring each magnitude to one number between 1e5 and 1e8, of a quiet one less far."""
        goal = 10.0 ** self.rng.uniform(5, 8)
        return 2.0 ** (goal / reached.clamp(min=1e-6)).log2().round().clamp(max=MOST)

    def some(self, count: int) -> Tensor:
        """Return a few of so many units, or sometimes all."""
        number = count if self.rng.random() < 0.15 else self.rng.randint(1, max(1, count // 4))
        return torch.tensor(sorted(self.rng.sample(range(count), number)))

    def feed_forward(self, gated: bool) -> str:
        """Mostly divide what reads the activation by all that it is multiplied by, or by less."""
        known = [w for w in self.layout.feed_forwards if w.linear in self.ranges]  # no token may take an expert
        w = self.chosen([w for w in known if (w.gate if gated else not w.gate and w.activation != "relu")])
        rows = self.some(self.layout.tensors[f"{w.output}.weight"].shape[1])
        factors = self.factors(self.ranges[w.gate or w.linear].output.amax[rows])
        share = 2.0 ** self.rng.choice((0, 0, 0, -2)) if self.rng.random() < 0.8 else 1 / factors
        self.neurons(w, rows, factors, factors * share)
        return f"{'gate' if gated else 'plain'} {w.activation}"

    def scores(self) -> str:
        attentions = [w for w in self.layout.topology if isinstance(w, Attention)]
        seen = {w.at: self.ranges[w.at].scores for w in attentions if w.at in self.ranges}
        w = self.chosen([w for w in attentions if seen.get(w.at)])
        factor = self.factors(torch.tensor(seen[w.at].product))
        if w.query_norm:
            share = self.rng.choice((0, 0.5, 1))
            for norm, part in ((w.query_norm, share), (w.key_norm, 1 - share)):
                self.gain(norm, 2.0 ** (factor.log2() * part).round())
            return "gains of queries and keys"
        for head in self.some(self.layout.heads(w)).tolist():
            self.rows(w.query, self.head(w, head), factor)
        return "scores" + (" under a cap" if self.layout.cap(w) is not None else "")

    def keys(self) -> str:
        w = self.chosen(key_biases(self.layout))
        bias = self.model.get_submodule(w.key).bias
        bias.normal_().mul_(self.factors(self.ranges[w.query].output.amax.amax()))
        return "key bias"

    def logits(self) -> str:
        head = self.chosen([self.layout.head])
        last = head.linears[-1]
        if self.layout.tied:
            self.gain(self.layout.stacks()[-1].ends.norm, self.factors(self.ranges[last.at].output.amax.amax()))
            return "logits, tied"
        linear = self.rng.choice(head.linears)
        reached = self.ranges[linear.at].output.amax
        rows = self.some(len(reached))
        self.rows(linear.at, rows, self.factors(reached[rows].amax()))
        return "logits" if linear is last else "dense of a classifier"

    def routing(self) -> str:
        w = self.chosen([w for w in self.layout.topology if isinstance(w, Experts)])
        self.rows(w.classifier, slice(None), self.factors(self.ranges[w.classifier].output.amax.amax()))
        return "router"

    def possible(self) -> list[Callable[[], str]]:
        layout, gates, neurons = self.layout, partial(self.feed_forward, True), partial(self.feed_forward, False)
        gated = any(w.gate for w in layout.feed_forwards)
        plain = any(not w.gate and w.activation != "relu" for w in layout.feed_forwards)
        routed = any(isinstance(w, Experts) for w in layout.topology)
        uncapped = layout.head is not None and layout.cap(layout.head) is None
        kinds = [(self.scores, True), (gates, gated), (gates, gated), (neurons, plain), (neurons, plain)]
        kinds += [(self.routing, routed), (self.keys, bool(key_biases(layout))), (self.logits, uncapped)]
        return [each for each, there in kinds if there]


def key_biases(layout: Layout) -> list[Attention]:
    """Return the attentions with a key bias that may be any vector; the others have a table of position biases."""
    return [w for w in centrable(layout) if not tables_of(w)]


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
    observer = RangeObserver()
    with observer.watching(model):
        outputs(model)
    made = Saturation(model, layout, observer.ranges(), rng)
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
    work: Path
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def broken(self, seed: int, what: str) -> None:
        self.violations.append(f"seed {seed}: {what}")
        print(self.violations[-1], flush=True)

    def run(self, seed: int) -> None:
        kind, model, done, dtype = model_of(seed)
        source, out = tiny.save(model, self.work / f"{seed}", dtype), self.work / f"{seed}-fp16"
        try:
            report = convert(source, out).report
        except UserError as error:
            self.counts.update((name, "refused") for name in done)
            self.reasons[str(error).partition(":")[0][:80]] += 1
            return
        verdict = report["verdict"] if report["verdict"] == "unsafe" else report["proof"]
        self.counts.update((name, verdict) for name in done)
        if report["verdict"] == "safe":
            self.check_safe(seed, report, out)
            if report.get("inexact"):
                self.check_rare(seed, report, source, out)
        else:
            why = {f"{e['kind']}: {e['reason']}" if e["kind"] == "inexact" else e["kind"] for e in report["unsafe"]}
            self.reasons[f"unsafe: {'; '.join(sorted(why))}"] += 1
        if report["proof"] == "certified":
            self.check_certified(seed, out)
        print(f"{seed} {kind} [{', '.join(done)}] {verdict}", flush=True)

    def check_safe(self, seed: int, report: Any, out: Path) -> None:
        """No regime broke, none does on other inputs, and fp16 is no further from the source than bf16, or twice as far
        where it is proven."""
        close = report["fidelity"]
        if any(regime["nonfinite"] or regime["saturated"] for regime in report["regimes"].values()):
            self.broken(seed, "safe, and a regime broke")
        if audit(out, regimes=["half"], seed=seed + 1000)["verdict"] != "safe":
            self.broken(seed, "safe, and not on other inputs")
        most = MOST_FOR_A_PROOF if report["proof"] == "certified" else 1.0
        if not close["kl_fp16"] <= max(most * close["kl_bf16"], NOISE):
            self.broken(seed, f"safe, and fp16 at {close['kl_fp16']:.1e} from the source, bf16 {close['kl_bf16']:.1e}")

    def check_rare(self, seed: int, report: Any, source: Path, out: Path) -> None:
        """No id that stands in ordinary rows is harmed where the verdict is safe, and no pair where none is listed.
        What harms one row is judged by the mean and the median of AGAIN others."""
        config, layout = load_config(source), resolve(open_checkpoint(source))
        generator, vocabulary = torch.Generator().manual_seed(seed), vocabulary_of(config)

        def with_one(ids: Tensor) -> Tensor:
            lines = torch.randint(vocabulary, (len(ids), LENGTH), generator=generator)
            lines[:, ::3] = ids
            return lines

        def mixed(pairs: Tensor) -> Tensor:
            return pairs.gather(1, torch.randint(2, (len(pairs), LENGTH), generator=generator))

        models = [load(folder, torch.float32).eval() for folder in (source, out)]
        judged = partial(self.judged, config, layout, open_checkpoint(source), models)
        pairs = torch.randint(vocabulary, (DRAWN, 2), generator=generator)
        for inputs, rows in ((torch.arange(vocabulary)[:, None], with_one), (pairs, mixed)):
            if rows is mixed and report.get("exceptions"):
                continue
            kl, bf16 = judged(rows(inputs))
            for number in (kl > TIMES * bf16).nonzero().flatten()[:CONFIRMED].tolist():
                others = judged(rows(inputs[number].repeat(AGAIN, 1)), least=-math.inf)
                middles = [[float(middle(x)) for x in others] for middle in (torch.mean, torch.median)]
                if harm := next(((a, b) for a, b in middles if a > max(LEAST, TIMES * b)), None):
                    ids = inputs[number].tolist()
                    self.broken(seed, f"safe, and ids {ids}: {harm[0]:.1e} where bf16 has {harm[1]:.1e}")
                    break

    def judged(
        self, config: Any, layout: Layout, source: Checkpoint, models: list[Any], rows: Tensor, least: float = LEAST
    ) -> tuple[Tensor, Tensor]:
        """Return each row's divergence by what was written, and bf16's in the mean; inf where the first is at most
        ``least``. models: the source and what was written, in fp32."""
        batches = [whole_rows(config, part, "rare") for part in rows.split(64)]
        with torch.no_grad():
            expected, found = ([output_on(b, run_batch(m, b)) for b in batches] for m in models)
        kl = divergences(batches, expected, layout.gives_probabilities, found)
        bf16, over = torch.full_like(kl, math.inf), (kl > least).nonzero().flatten()
        if len(over):
            batches = [whole_rows(config, part, "rare") for part in rows[over].split(64)]
            bf16[over] = mean_bf16_divergence(source, batches, layout)
        return kl, bf16

    def check_certified(self, seed: int, out: Path) -> None:
        """No input of a norm, and no embedding that a search finds, passes a bound or gives inf."""
        half = load(out, torch.float16, half=True).eval()
        layout, certificate = certified(half)
        seen = observe(half, layout, adverse_inputs(load(out, torch.float32).eval(), layout, 8, seed))
        sites = {site.name for site in certificate.sites if site.kind not in FREE}
        wrong = broken(certificate, seen, FREE) + [n for n in sites & seen.keys() if not math.isfinite(seen[n])]
        if wrong or not certificate.holds:
            self.broken(seed, f"certified, and an adversary breaks {wrong[:3]}")
        if seed % SEARCHED == 0:
            found = attack(half, layout, steps=STEPS, seed=seed)
            if past := [site.name for site in found.sites if not site.worst <= site.limit]:
                self.broken(seed, f"certified, and a search breaks {past[:3]}")

    def table(self) -> None:
        columns = ("certified", "observed", "unsafe", "refused")
        print()
        print_header("saturated", *columns)
        for name in sorted({name for name, _ in self.counts}):
            print_row(name, *(self.counts[name, column] for column in columns))
        for reason, number in self.reasons.most_common():
            print(f"{number} {reason}")
        print(f"{len(self.violations)} violations", *self.violations, sep="\n  ")


def compare_random(asked: argparse.Namespace, work: Path) -> int:
    brief.draw_nothing(pytest.MonkeyPatch())
    tally = Tally(work)
    for seed in range(asked.first, asked.first + asked.models):
        try:
            tally.run(seed)
        except Exception:
            tally.broken(seed, f"failed\n{traceback.format_exc()}")
    tally.table()
    return 1 if tally.violations else 0


# ---- what one rare byte saturates ----------------------------------------------------------------------------------


RARE = 3 + ord("q")
GATE, HEADS = "DenseReluDense.wi_0", "SelfAttention.q"
SOME = (f"encoder.block.1.layer.0.{HEADS}", f"encoder.block.0.layer.1.{GATE}", f"encoder.block.2.layer.1.{GATE}")
ALL = [f"{stack}.layer.0.{HEADS}" for stack in ("encoder.block.0", "encoder.block.1", "decoder.block.0")]
CASES: dict[str, tuple[Path, Sequence[str], float, int]] = {
    "T5, 12 heads": (saturated.T5, ALL, 1e6, 1),
    "T5, 4 heads, 96 gates": (saturated.T5, (*SOME, f"decoder.block.1.layer.2.{GATE}"), 2e5, 10),
    "Gemma 3, all gates of 2 layers": (saturated.GEMMA, [f"model.layers.{i}.mlp.gate_proj" for i in (0, 1)], 1e6, 1),
}
"""By name: the demo, the query projections and gates that saturate, how far, and every how many neurons of a gate."""


@torch.no_grad()
def saturate(model: Any, paths: Sequence[str], target: float, step: int) -> None:
    """Make the rare byte's scores and gates pass 65504, in place."""
    table = model.get_input_embeddings().weight
    channel = int(table.square().mean(0).argmin())
    for name, weight in model.named_parameters():  # what writes the channel
        if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            weight[channel] = -1.0
        elif name.endswith((".o.weight", ".wo.weight")):
            weight[channel] = 0.0
    table[:, channel] = 0.0
    table[RARE, channel] = table.square().mean().sqrt() * 8
    batch = {name: ids.clone() for name, ids in next(saturated.batches(model, 16, 5)).items()}
    for name in {"input_ids", "decoder_input_ids"} & batch.keys():
        batch[name][:, ::29] = RARE
    for path in paths:
        weight, found = model.get_submodule(path).weight, list[Tensor]()
        key = model.get_submodule(f"{path[:-1]}k") if path.endswith(HEADS) else None
        hook = lambda _, inputs, output, found=found: found.append(output.flatten(0, 1))  # noqa: E731
        handles = [m.register_forward_hook(hook) for m in (model.get_submodule(path), key) if m is not None]
        for value in (0.0, 1.0, 0.0):
            weight[:, channel] = value
            saturated.loss_of(model, batch)
        for handle in handles:
            handle.remove()
        reads = (found[len(handles)] - found[0]).abs().amax()  # of the channel, behind the norm
        if key is None:
            some = weight[::step, channel]
            some.copy_(torch.linspace(0.4, 1.0, len(some)) * target / reads)
            continue
        heads = model.config.num_heads
        by_head = weight.unflatten(0, (heads, -1)), found[-1].unflatten(1, (heads, -1)).unbind(1)
        for rows, keys in zip(*by_head, strict=True):
            towards = torch.linalg.svd(keys - keys.mean(0), full_matrices=False).Vh[0]
            rows[:, channel] = towards * target / ((keys @ towards).abs().amax() * reads)


def compare_rare(asked: argparse.Namespace, work: Path) -> None:
    """``unlike`` are code, figures and other languages."""
    print_header("checkpoint", "bf16: text, unlike, random", "`convert`", "verdict", "edits")
    files = texts(), texts("unlike.txt")
    for name in asked.cases or CASES:
        demo, paths, target, step = CASES[name]
        model = saturated.load(demo)
        saturate(model, paths, target, step)
        saturated.write(model, demo, source := work / name / "source")
        report = convert(source, out := work / name / "out").report
        judged = [judge(source, out, file, SEED) for file in files]
        cells = []
        for dtype in ("bf16", "fp16"):
            kl = [getattr(each, f"kl_{dtype}_text") for each in judged]
            cells.append(", ".join(f"{x:.1e}" for x in (*kl, getattr(judged[0], f"kl_{dtype}_random"))))
        edits = (
            f"{'columns' if edit.get('columns') else 'rows'} {power(edit['exponent'])}" for edit in report["inexact"]
        )
        counted = ", ".join(f"{number} × {edit}" for edit, number in Counter(edits).items())
        print_row(name, *cells, f"{report['verdict']}, {report['proof']}", counted)


TABLES = {"saturated": compare_saturated, "random": compare_random, "rare": compare_rare}


def main() -> int | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--cases", nargs="+", choices=[*saturated.KINDS, *CASES], metavar="CASE")
    parser.add_argument("--models", type=int, default=300, help="how many random ones")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return TABLES[asked.table](asked, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
