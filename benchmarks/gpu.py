"""Everything that only a GPU can show, on one card of 80 GB or more, in less than nine minutes, without a network.

    make gpu                                                     # or, the same:
    python benchmarks/gpu.py --device cuda
    python benchmarks/gpu.py --device cuda --only audit kernels  # some parts
    python benchmarks/gpu.py --device cpu                        # what a CPU can run of it, at tiny shapes

It needs torch, transformers, accelerate and what the package imports; not datasets, deepspeed, wandb or torchao. Parts
run one after the other. One that fails is reported with its reason, the others go on, and the exit status is 1, as
where a value passed its bound.

kernels: fp16 products of many shapes against what the certificate assumes of them. audit: converted checkpoints in
every regime, and random models whose norms read what gradient ascent found, on fp16 kernels with split sums allowed and
not, against every bound. half: `.half()` beside what stock code loads in fp16, at the XXL encoder's shape. `make gpu`
then runs optimizer.py and penalty.py on the card, and the tests marked `gpu` launch the finetune.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))  # where nothing is installed
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import accelerate
import synthetic
import torch
import transformers
from ascent import attacked, certified, reading, watch
from certify_soundness import Tally
from models import DEMO, random_model
from optimizer import seconds, transient_megabytes
from results import print_header, print_row
from support.contract import FREE, layout_of
from support.inside import Whole, bound

from bf16_to_fp16.bounds.arithmetic import MAX_LENGTH, SPLITS, UNIT, Arithmetic
from bf16_to_fp16.bounds.certificate import fp16_weights
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.conversion.convert import convert
from bf16_to_fp16.errors import UserError, first_line
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.measuring.probe import audit_batches
from bf16_to_fp16.measuring.regimes import REGIMES, audit_folder
from bf16_to_fp16.measuring.stock import load_config
from bf16_to_fp16.numerics import FP16_STEP


@dataclass(frozen=True)
class Sizes:
    products: tuple[tuple[int, int, int], ...] = (  # rows, inner dimension, columns
        *((m, 10240, 4096) for m in (1, 16, 128, 2048)),
        *((m, 4096, 10240) for m in (1, 16, 2048)),
        *((m, 65536, 64) for m in (1, 32, 256)),
        *((m, 131072, m) for m in (8, 64)),
        (64, 16384, 64),
        (512, 64, 512),
    )
    demos: tuple[str, ...] = ("t5-gated-bytes", "pegasus-bytes")
    models: int = 10  # random ones
    ascent: tuple[tuple[int, int], int, int] = (9, 7), 12, 25  # lengths, rows and steps
    rounds: int = 9
    encoder: synthetic.Shape = synthetic.SHAPES["t5-v1_1-xxl-encoder"]
    batches: tuple[tuple[int, int], ...] = ((1, 512), (8, 512))  # rows and tokens for the encoder


TINY_ENCODER = synthetic.t5("T5EncoderModel", 32, 48, 2, 64, 2, d_kv=16)
TINY = Sizes(((4, 600, 8),), ("tiny",), 1, ((4, 3), 2, 2), 1, TINY_ENCODER, ((2, 16),))


@dataclass
class Session:
    """The device, the sizes, a folder for files, the part that runs, and every value beyond its bound."""

    device: torch.device
    sizes: Sizes
    folder: Path
    part: str = ""
    violations: list[str] = field(default_factory=list)
    converted: dict[str, Path] = field(default_factory=dict)

    def row(self, what: str, value: float | str, unit: str = "", target: str = "") -> None:
        shown = value if isinstance(value, (str, int)) else f"{value:.4g}"
        print_row(self.part, what, f"{shown} {unit}".strip(), target)

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def demo(self, name: str) -> Path:
        """Return a demo checkpoint, or a tiny one, as convert leaves it on the device."""
        if name not in self.converted:
            out, source = self.folder / name, DEMO / name
            if not source.is_dir():
                source = self.folder / f"{name}-source"
                synthetic.write(source, self.sizes.encoder)
            convert(source, out, device=self.device, run_model=self.on_cuda)
            self.converted[name] = out
        return self.converted[name]

    def ways(self, longest: int = MAX_LENGTH) -> Iterator[tuple[str, Arithmetic]]:
        """Let kernels round partial sums to fp16, and then not, and give the arithmetic that bounds take for that; on a
        CPU none does."""
        for allowed in (True, False) if self.on_cuda else (False,):
            with split_sums(allowed):
                yield f"split-K {'on' if allowed else 'off'}", Arithmetic(longest, SPLITS if allowed else 0)


@contextmanager
def split_sums(allowed: bool) -> Iterator[None]:
    backend = torch.backends.cuda.matmul
    before = backend.allow_fp16_reduced_precision_reduction
    backend.allow_fp16_reduced_precision_reduction = allowed
    try:
        yield
    finally:
        backend.allow_fp16_reduced_precision_reduction = before


def run_kernels(session: Session) -> None:
    """The error of fp16 products beside what the certificate allows one of them."""
    generator = torch.Generator().manual_seed(0)
    for way, arithmetic in session.ways():
        worst, differing = 0.0, 0
        for rows, inner, columns in session.sizes.products:
            for signed in (True, False):
                a, b = (torch.randn(shape, generator=generator) for shape in ((rows, inner), (columns, inner)))
                # Of one sign, partial sums are as large as the result, and every loss counts.
                a, b = ((x if signed else x.abs()).mul_(0.3).half().to(session.device) for x in (a, b))
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
                        f"kernels, {way}: a product of {rows} × {inner} and {inner} × {columns} is off by {share:.3f}"
                        " times what is allowed"
                    )
        session.row(f"{way}: largest error of a product", worst, "of what is allowed", "at most 1")
        if arithmetic.splits:
            session.row("elements that split-K changes", differing)


def compare(session: Session, where: str, certificate: Whole, seen: Mapping[str, float]) -> None:
    """Compare the largest value at every site that has a bound with it."""
    shares = []
    for name, amax in seen.items():
        limit = certificate.at(name)
        if limit is not None:
            shares.append(amax / limit if limit > 0 else float(amax > 0))
            if not amax <= limit:
                session.violations.append(f"{where}: {name} reached {amax!r} past its bound of {limit!r}")
    session.row(f"{where}: largest value of {len(shares)} sites", max(shares), "of its bound", "at most 1")
    session.row(f"{where}: median", statistics.median(shares), "of its bound")


def run_audit(session: Session) -> None:
    for name in session.sizes.demos:
        session.demo(name)
    for name, folder in session.converted.items():
        checkpoint = open_checkpoint(folder)
        layout = resolve(checkpoint)
        for way, arithmetic in session.ways():
            certificate = bound(layout, fp16_weights(checkpoint, layout), arithmetic)
            regimes = REGIMES if session.on_cuda else ("half",)
            inputs = audit_batches(load_config(folder), folder, None)
            results = audit_folder(folder, inputs=inputs, regimes=regimes, device=session.device)
            for regime, result in results.items():
                where = f"{name}, {regime}, {way}"
                limited = {site.name: site.amax for site in result.sites if site.limit is not None}  # those in fp16
                compare(session, where, certificate, limited)
                if result.broken:
                    session.row(f"{where}: verdict", "unsafe", "", "safe")
    tally, models = Tally(), session.sizes.models
    for seed in range(models):
        adverse(session, seed, tally)
    session.violations += tally.violations
    for way, count in tally.values.items():
        most = max(share for (each, _), share in tally.largest.items() if each == way)
        session.row(f"{models} random models, {way}: largest value", most, f"of its bound, {count} sites", "1")


def adverse(session: Session, seed: int, tally: Tally) -> None:
    """Compare one random model in pure fp16 on the device, its norms reading what ascent found."""
    kind, wide = random_model(seed)
    lengths, batch, steps = session.sizes.ascent
    on_cpu = copy.deepcopy(wide).half()
    _, inputs = attacked(wide, on_cpu, batch, lengths, random.Random(seed), seed, steps)
    placed = {path: x.to(session.device, torch.float16) for path, x in inputs.items()}
    half = copy.deepcopy(on_cpu).to(session.device)
    run = reading(half, layout_of(on_cpu), placed, lengths)
    for way, arithmetic in session.ways(max(lengths)):
        certificate = certified(on_cpu, arithmetic)
        for attention in ("eager", "sdpa"):
            tally.compare(f"{attention}, {way}", f"seed {seed} {kind}", certificate, watch(half, run, attention), FREE)


@torch.no_grad()
def run_half(session: Session) -> None:
    """`.half()` beside what stock code loads in fp16, and beside bf16: seconds and memory of one forward."""
    shape, device = session.sizes.encoder, session.device.type
    for name, dtype in (("half", torch.float16), ("stock fp16", torch.float16), ("bf16", torch.bfloat16)):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with session.device:
                model = transformers.T5EncoderModel(shape.made_of).eval()
        finally:
            torch.set_default_dtype(before)
        model.to(dtype)
        if name == "stock fp16":
            # As from_pretrained(dtype=torch.float16) leaves it.
            for path, module in model.named_modules():
                if path.rpartition(".")[2] in (model._keep_in_fp32_modules or ()):
                    module.float()
        held = sum(p.numel() * p.element_size() for p in {id(p): p for p in model.parameters()}.values()) / 1e9
        session.row(f"{name}: weights", held, "GB")
        for rows, tokens in session.sizes.batches:
            ids = torch.randint(1, shape.values["vocab_size"], (rows, tokens), device=session.device)

            def encode(model: Any = model, ids: torch.Tensor = ids) -> None:
                model(input_ids=ids)

            _, *taken = (seconds(encode, device) for _ in range(session.sizes.rounds + 1))
            session.row(f"{name}: {rows} × {tokens} tokens", 1e3 * statistics.median(taken), "ms")
            peak = held + transient_megabytes(encode, device) / 1e3
            session.row(f"{name}: {rows} × {tokens}, peak memory", peak, "GB")
        del model, encode
        if session.on_cuda:
            torch.cuda.empty_cache()


PARTS = {"kernels": run_kernels, "audit": run_audit, "half": run_half}


def run_part(session: Session, name: str) -> bool:
    session.part, begin, failed = name, time.perf_counter(), ""
    try:
        PARTS[name](session)
        if session.on_cuda:
            torch.cuda.synchronize()
    except (Exception, UserError) as error:
        failed = f"failed: {type(error).__name__}: {first_line(error)}"
    session.row(failed or "the whole part", f"{time.perf_counter() - begin:.1f} s")
    if session.on_cuda:
        torch.cuda.empty_cache()
    return not failed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    options = parser.parse_args()
    on_cuda = options.device == "cuda"
    if on_cuda and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device that torch can use; give --device cpu for what runs without one")
    if not on_cuda:
        torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    begin = time.perf_counter()
    print_header("part", "what", "figure", "target")
    with tempfile.TemporaryDirectory(prefix="bf16_to_fp16-gpu-") as scratch:
        session = Session(torch.device(options.device), Sizes() if on_cuda else TINY, Path(scratch))
        passed = [run_part(session, name) for name in PARTS if name in options.only]
    device = torch.cuda.get_device_name() if on_cuda else "cpu"
    versions = ", ".join(f"{library.__name__} {library.__version__}" for library in (torch, transformers, accelerate))
    print(f"\n{device}, {versions}, {time.perf_counter() - begin:.0f} s")
    for line in session.violations:
        print(f"PAST ITS BOUND: {line}", file=sys.stderr)
    raise SystemExit(1 if session.violations or not all(passed) else 0)


if __name__ == "__main__":
    main()
