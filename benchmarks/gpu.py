"""Everything that only a GPU can show, on one card of 80 GB or more, in less than nine minutes, without a network.

    make gpu                                                     # or, the same:
    python benchmarks/gpu.py --device cuda --out gpu.json
    python benchmarks/gpu.py --device cuda --only audit attack   # some parts
    python benchmarks/gpu.py --device cpu                        # what a CPU can run of it, at tiny shapes

It needs torch, transformers, accelerate and what the package imports; not datasets, deepspeed, wandb or torchao. Parts
run one after the other. One that fails is reported with its reason, the others go on, and the exit status is 1, as
where a value passed its bound.

finetune: the hard checkpoint by its recipe under CUDA autocast and the run's loss scale. kernels: fp16 products of many
shapes against what the certificate assumes of them. audit: converted checkpoints in every regime, and random models
whose norms read what gradient ascent found, on fp16 kernels with split sums allowed and not, against every bound.
attack: the search for the worst inputs. half: `.half()` beside what stock code loads in fp16, at the XXL encoder's
shape. `make gpu` then runs optimizer.py and penalty.py on the card, and the tests marked `gpu` launch the finetune.

The file, written anew after each part, is one JSON object: ``device``, ``torch``, ``transformers``, ``accelerate``
(versions), ``command``, ``seconds``, ``failed`` (names of parts), ``violations`` (lines, each a value beyond its bound)
and ``parts``: name → {``seconds``, ``failed`` (a line, or null), ``rows``: [{``what``, ``value`` (number or text),
``unit``, ``target`` (text, or null)}]}.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import accelerate
import synthetic
import torch
import transformers
from ascent import aims, ascend, certified, forward, watch
from certify_soundness import Tally
from models import random_model
from support.adversary import free_norms
from support.contract import FREE
from torch import Tensor

from bf16_to_fp16.auditing.attack import attack
from bf16_to_fp16.auditing.regimes import REGIMES, RegimeResult, audit_folder
from bf16_to_fp16.bounds.arithmetic import SPLITS, Arithmetic
from bf16_to_fp16.bounds.certificate import bound, fp16_weights
from bf16_to_fp16.bounds.findings import Certificate
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.commands.convert import convert
from bf16_to_fp16.errors import UserError, first_line
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.finetuning.recipe import read_recipe
from bf16_to_fp16.finetuning.run import finetune
from bf16_to_fp16.numerics import FP16_STEP
from bf16_to_fp16.rescaling.weights import ModelTensors
from bf16_to_fp16.run.stock import load, set_attention

ROOT = Path(__file__).parents[1]
DEMOS = ("t5-gated-bytes", "pegasus-bytes")
HARD = ROOT / "recipes" / "demo" / "t5-hard-bytes"
UNIT = 2.0**-11


@dataclass(frozen=True)
class Sizes:
    """How much each part does."""

    steps: int  # of the hard checkpoint's finetune
    products: tuple[tuple[int, int, int], ...]  # rows, inner dimension, columns
    demos: tuple[str, ...]
    models: int  # random ones
    attack_steps: int
    rounds: int
    encoder: synthetic.Shape
    batches: tuple[tuple[int, int], ...]  # rows and tokens for the encoder


XXL = synthetic.SHAPES["t5-v1_1-xxl-encoder"]
ON_A_CARD = Sizes(
    steps=180,
    products=(
        *((m, 10240, 4096) for m in (1, 16, 128, 2048)),
        *((m, 4096, 10240) for m in (1, 16, 2048)),
        *((m, 65536, 64) for m in (1, 32, 256)),
        *((m, 131072, m) for m in (8, 64)),
        (64, 16384, 64),
        (512, 64, 512),
    ),
    demos=DEMOS,
    models=10,
    attack_steps=24,
    rounds=9,
    encoder=XXL,
    batches=((1, 512), (8, 512)),
)
TINY = Sizes(
    steps=1,
    products=((4, 600, 8),),
    demos=("tiny",),
    models=1,
    attack_steps=1,
    rounds=1,
    encoder=synthetic.t5("T5EncoderModel", 32, 48, 2, 64, 2, d_kv=16),
    batches=((2, 16),),
)


@dataclass
class Part:
    """What one part has shown."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    failed: str | None = None

    def add(self, what: str, value: float | str, unit: str = "", target: str | None = None) -> None:
        """Add a figure."""
        self.rows.append({"what": what, "value": value, "unit": unit, "target": target})


@dataclass
class Session:
    """The device, the sizes, a folder for files, and every value beyond its bound."""

    device: torch.device
    sizes: Sizes
    folder: Path
    violations: list[str] = field(default_factory=list)
    finetuned: Path | None = None
    converted: dict[str, Path] = field(default_factory=dict)

    @property
    def on_cuda(self) -> bool:
        """Whether the device is a card."""
        return self.device.type == "cuda"

    def demo(self, name: str) -> Path:
        """Return a demo checkpoint, or a tiny one, as convert leaves it on the device."""
        if name not in self.converted:
            out, source = self.folder / name, ROOT / "bf16_to_fp16" / "demo_data" / name
            if not source.is_dir():
                source = self.folder / f"{name}-source"
                synthetic.write(source, self.sizes.encoder)
            convert(source, out, device=self.device, run_model=self.on_cuda)
            self.converted[name] = out
        return self.converted[name]

    def wait(self) -> None:
        """Wait for the device."""
        if self.on_cuda:
            torch.cuda.synchronize()

    def timed(self, action: Callable[[], object], rounds: int) -> float:
        """Return the median seconds of an action, after one that does not count."""
        taken = []
        for _ in range(rounds + 1):
            self.wait()
            begin = time.perf_counter()
            action()
            self.wait()
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken[1:])

    def splits(self) -> Sequence[bool]:
        """Whether kernels may round partial sums to fp16: both ways on a card, on a CPU none does."""
        return (True, False) if self.on_cuda else (False,)


@contextmanager
def split_sums(allowed: bool) -> Iterator[None]:
    """Let cuBLAS round the partial sums of a split product to fp16, or not."""
    backend = torch.backends.cuda.matmul
    before = backend.allow_fp16_reduced_precision_reduction
    backend.allow_fp16_reduced_precision_reduction = allowed
    try:
        yield
    finally:
        backend.allow_fp16_reduced_precision_reduction = before


def shown(allowed: bool) -> str:
    """Return the words for whether split sums are allowed."""
    return "split-K on" if allowed else "split-K off"


# ---- finetunes -------------------------------------------------------------------------------------------------------


def hard_recipe(session: Session, out: Path, *changes: str) -> Any:
    """Return the hard checkpoint's recipe on the device."""
    there = {
        "source": HARD,
        "out": out,
        "data.path": ROOT / "bf16_to_fp16" / "demo_data" / "python-topics.txt.gz",
        "data.held_out_path": ROOT / "bf16_to_fp16" / "demo_data" / "held_out.txt",
        "device": session.device,
        "evaluation.every": 100_000,
    }
    given = [f"{key}={json.dumps(str(value)) if not isinstance(value, int) else value}" for key, value in there.items()]
    return read_recipe(ROOT / "recipes" / "demo" / "hard.yaml", [*given, *changes])


def logged(out: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log that are steps."""
    rows = map(json.loads, out.with_name(f"{out.name}.run").joinpath("log.jsonl").read_text().splitlines())
    return [row for row in rows if "loss" in row]


def run_finetune(session: Session, part: Part) -> None:
    """The hard checkpoint by its recipe."""
    out = session.folder / "hard-fp16"
    steps = session.sizes.steps
    tiny = [] if session.on_cuda else ["data.batch_size=2", "rescale=false"]
    result = finetune(hard_recipe(session, out, f"schedule.steps={steps}", *tiny))
    assert result is not None
    rows, evaluations = logged(out), result.report["finetune"]["evaluations"]
    narrow = [row for row in rows if row["precision"] == "fp16"]
    part.add("steps", len(rows))
    part.add("of which under fp16 autocast", len(narrow))
    part.add("skipped", rows[-1]["skipped"])
    if narrow:
        part.add("loss scale at the end", narrow[-1]["loss_scale"])
    part.add("held-out loss before", evaluations[0]["held_out_loss"], "nats")
    part.add("held-out loss after", evaluations[-1]["held_out_loss"], "nats", "at most 1.01 times before")
    for name, regime in result.report["regimes"].items():
        part.add(f"headroom of what was written, {name}", regime["headroom_bits"], "bits", "above 0")
    part.add("device of the training", ", ".join(result.report["finetune"]["devices"]))
    session.finetuned = out


# ---- soundness -------------------------------------------------------------------------------------------------------


def run_kernels(session: Session, part: Part) -> None:
    """The error of fp16 products beside what the certificate allows one of them."""
    generator = torch.Generator().manual_seed(0)
    for allowed in session.splits():
        worst, differing = 0.0, 0
        arithmetic = Arithmetic(splits=SPLITS if allowed else 0)
        for rows, inner, columns in session.sizes.products:
            for signed in (True, False):
                a, b = (torch.randn(shape, generator=generator) for shape in ((rows, inner), (columns, inner)))
                # Of one sign, partial sums are as large as the result, and every loss counts.
                a, b = ((x if signed else x.abs()).mul_(0.3).half().to(session.device) for x in (a, b))
                with split_sums(allowed):
                    made = torch.nn.functional.linear(a, b).double()
                with split_sums(False):
                    differing += int((torch.nn.functional.linear(a, b).double() != made).sum())
                exact, whole = (x @ y.t() for x, y in ((a.double(), b.double()), (a.abs().double(), b.abs().double())))
                room = whole * arithmetic.gamma(inner)
                room += (exact.abs() + room) * UNIT + arithmetic.splits * FP16_STEP + FP16_STEP / 2
                share = float(((made - exact).abs() / room).max())
                worst = max(worst, share)
                if not share <= 1:
                    session.violations.append(
                        f"kernels, {shown(allowed)}: a product of {rows} × {inner} and {inner} × {columns} is off by"
                        f" {share:.3f} times what is allowed"
                    )
        part.add(f"{shown(allowed)}: largest error of a product", worst, "of what is allowed", "at most 1")
        if allowed:
            part.add("elements that split-K changes", differing)


def limited(result: RegimeResult) -> dict[str, float]:
    """Return the largest value of every site that has a limit, those that compute in fp16."""
    return {site.name: site.amax for site in result.sites if site.limit is not None}


def compare(session: Session, part: Part, where: str, certificate: Certificate, seen: Mapping[str, float]) -> None:
    """Compare the largest value at every site that has a bound with it."""
    shares = []
    for name, amax in seen.items():
        limit = certificate.at(name)
        if limit is not None:
            shares.append(amax / limit if limit > 0 else float(amax > 0))
            if not amax <= limit:
                session.violations.append(f"{where}: {name} reached {amax!r} past its bound of {limit!r}")
    part.add(f"{where}: largest value of {len(shares)} sites", max(shares), "of its bound", "at most 1")
    part.add(f"{where}: median", statistics.median(shares), "of its bound")


def run_audit(session: Session, part: Part) -> None:
    """Every regime of converted checkpoints, and random models under an adversary, against every bound."""
    folders = {name: session.demo(name) for name in session.sizes.demos}
    if session.finetuned is not None and session.on_cuda:
        folders["t5-hard-bytes, finetuned"] = session.finetuned
    for name, folder in folders.items():
        checkpoint = open_checkpoint(folder)
        layout = resolve(checkpoint)
        for allowed in session.splits():
            arithmetic = Arithmetic(splits=SPLITS if allowed else 0)
            certificate = bound(layout, fp16_weights(checkpoint, layout), arithmetic)
            regimes = REGIMES if session.on_cuda else ("half",)
            with split_sums(allowed):
                results = audit_folder(folder, regimes=regimes, device=session.device)
            for regime, result in results.items():
                where = f"{name}, {regime}, {shown(allowed)}"
                compare(session, part, where, certificate, limited(result))
                if not result.safe:
                    part.add(f"{where}: verdict", "unsafe", "", "safe")
    tally = Tally()
    for seed in range(session.sizes.models):
        adverse(session, seed, tally)
    session.violations += tally.violations
    for way, count in tally.values.items():
        most = max(share for (each, _), share in tally.largest.items() if each == way)
        part.add(
            f"{session.sizes.models} random models, {way}: largest value", most, f"of its bound, {count} sites", "1"
        )


def adverse(session: Session, seed: int, tally: Tally) -> None:
    """Compare one random model in pure fp16 on the device, its norms reading what ascent found."""
    r = random.Random(seed)
    kind, wide = random_model(seed)
    lengths, batch = ((9, 7), 12) if session.on_cuda else ((4, 3), 2)
    half, double = copy.deepcopy(wide).half(), copy.deepcopy(wide).double().requires_grad_(False)
    layout = resolve(ModelTensors(half))
    certificates = {
        allowed: certified(half, Arithmetic(max(lengths), splits=SPLITS if allowed else 0)) for allowed in (True, False)
    }
    set_attention(double, "eager")
    steps = 25 if session.on_cuda else 2
    inputs = ascend(double, layout, aims(layout, certificates[True], batch, lengths, r, 0.5), lengths, seed, steps)
    placed = {path: x.to(session.device, torch.float16) for path, x in inputs.items()}
    half.to(session.device)

    def run() -> None:
        with free_norms(half, placed):
            forward(half, layout, batch, lengths)

    for allowed in session.splits():
        for attention in ("eager", "sdpa"):
            with split_sums(allowed):
                seen = watch(half, run, attention)
            tally.compare(f"{attention}, {shown(allowed)}", f"seed {seed} {kind}", certificates[allowed], seen, FREE)


def run_attack(session: Session, part: Part) -> None:
    """The search for the worst inputs of the first demo checkpoint."""
    name = session.sizes.demos[0]
    checkpoint = open_checkpoint(session.demo(name))
    layout = resolve(checkpoint)
    certificate = bound(layout, fp16_weights(checkpoint, layout))
    model = load(checkpoint.folder, torch.float16, half=True).to(session.device)
    begin = time.perf_counter()
    length = 16 if session.on_cuda else 3
    sites = None if session.on_cuda else ["encoder.block.0.layer.1.DenseReluDense.wo"]
    found = attack(model, layout, steps=session.sizes.attack_steps, length=length, sites=sites)
    part.add(f"{name}: {session.sizes.attack_steps} steps", time.perf_counter() - begin, "s")
    compare(session, part, f"{name}, worst found", certificate, found.worst)
    part.add(f"{name}: headroom at the worst", found.worst_headroom_bits, "bits", "above 0")


# ---- cost ------------------------------------------------------------------------------------------------------------


def run_half(session: Session, part: Part) -> None:
    """`.half()` beside what stock code loads in fp16, and beside bf16: seconds and memory of one forward."""
    shape = session.sizes.encoder
    config = shape.made_of
    for name, dtype in (("half", torch.float16), ("stock fp16", torch.float16), ("bf16", torch.bfloat16)):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with session.device:
                model = transformers.T5EncoderModel(config).eval()
        finally:
            torch.set_default_dtype(before)
        model.to(dtype)
        if name == "stock fp16":
            # As from_pretrained(dtype=torch.float16) leaves it.
            for path, module in model.named_modules():
                if path.rpartition(".")[2] in (model._keep_in_fp32_modules or ()):
                    module.float()
        held = sum(p.numel() * p.element_size() for p in {id(p): p for p in model.parameters()}.values())
        part.add(f"{name}: weights", held / 1e9, "GB")
        for rows, tokens in session.sizes.batches:
            ids = torch.randint(1, shape.values["vocab_size"], (rows, tokens), device=session.device)

            @torch.no_grad()
            def encode(model: Any = model, ids: Tensor = ids) -> None:
                model(input_ids=ids)

            if session.on_cuda:
                torch.cuda.reset_peak_memory_stats()
            seconds = session.timed(encode, session.sizes.rounds)
            part.add(f"{name}: {rows} × {tokens} tokens", 1e3 * seconds, "ms")
            if session.on_cuda:
                part.add(f"{name}: {rows} × {tokens}, peak memory", torch.cuda.max_memory_allocated() / 1e9, "GB")
        del model
        if session.on_cuda:
            torch.cuda.empty_cache()


PARTS: dict[str, Callable[[Session, Part], None]] = {
    "finetune": run_finetune,
    "kernels": run_kernels,
    "audit": run_audit,
    "attack": run_attack,
    "half": run_half,
}


def run_parts(session: Session, names: Sequence[str], save: Callable[[Mapping[str, Part]], None]) -> dict[str, Part]:
    """Run parts one after the other and print their figures; one that fails says so and the others go on.

    save: is called with what there is after each part.
    """
    parts = {}
    print("| part | what | figure | target |\n|---|---|---|---|")
    for name in names:
        part = parts[name] = Part()
        begin = time.perf_counter()
        try:
            PARTS[name](session, part)
            session.wait()
        except (Exception, UserError) as error:
            part.failed = f"{type(error).__name__}: {first_line(error)}"
        part.seconds = time.perf_counter() - begin
        print_rows(name, part)
        save(parts)
        if session.on_cuda:
            torch.cuda.empty_cache()
    return parts


def print_rows(name: str, part: Part) -> None:
    """Print every figure of a part as a row of a Markdown table."""
    for row in part.rows:
        value = row["value"] if isinstance(row["value"], (str, int)) else f"{row['value']:.4g}"
        figure = f"{value} {row['unit']}".strip()
        print(f"| {name} | {row['what']} | {figure} | {row['target'] or ''} |")
    end = f"failed: {part.failed}" if part.failed else "the whole part"
    print(f"| {name} | {end} | {part.seconds:.1f} s | |", flush=True)


def main() -> None:
    """Run the parts, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device that torch can use; give --device cpu for what runs without one")
    if options.device == "cpu":
        torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="bf16_to_fp16-gpu-") as scratch:
        sizes = ON_A_CARD if options.device == "cuda" else TINY
        session = Session(torch.device(options.device), sizes, Path(scratch))
        card = torch.cuda.get_device_name() if session.on_cuda else "cpu"

        def save(parts: Mapping[str, Part]) -> None:
            found = {
                "device": card,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "accelerate": accelerate.__version__,
                "command": " ".join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
                "seconds": time.perf_counter() - begin,
                "failed": [name for name, part in parts.items() if part.failed],
                "violations": session.violations,
                "parts": {name: asdict(part) for name, part in parts.items()},
            }
            if options.out is not None:
                options.out.write_text(json.dumps(found, indent=1) + "\n")

        parts = run_parts(session, [name for name in PARTS if name in options.only], save)
    print(
        f"\n{card}, torch {torch.__version__}, transformers {transformers.__version__},"
        f" {time.perf_counter() - begin:.0f} s"
    )
    for line in session.violations:
        print(f"PAST ITS BOUND: {line}", file=sys.stderr)
    raise SystemExit(1 if session.violations or any(part.failed for part in parts.values()) else 0)


if __name__ == "__main__":
    main()
