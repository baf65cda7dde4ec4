"""Options, destination and provenance of a conversion. This module imports no torch, so that refusals are quick."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..bounds.arithmetic import Arithmetic
from ..checkpoint.naming import FOLDER_LAYOUT, LAYOUT_NAMES, LAYOUTS
from ..checkpoint.sources import shown_in_a_command
from ..checkpoint.staging import check_out
from ..errors import UserError, shortened
from ..numerics import MAX_LENGTH
from ..targets import AUTO, MARGIN_BITS, TARGETS

if TYPE_CHECKING:
    import torch

    from ..checkpoint.reader import Checkpoint
    from ..devices import Device
    from ..families.layout import Layout
    from ..report.schema import Lineage, Report
    from ..results import AttackEntry

MOST_EXPONENT = 24  # of the residual stream
MOST_MARGIN = 12  # bits; a signal then has room up to 65504·2⁻¹² = 16

OF_CONFIG, FIXED = EPS = ("config", "fixed")  # the norms' eps in the tool that reads the output


PATH = click.Path()

FOLDER = click.Path(path_type=Path)


@dataclass(frozen=True)
class Flag:
    """The command-line flag of a field of ``Options``. ``click``: further arguments of ``click.option``."""

    name: str
    help: str
    click: Mapping[str, Any]

    @property
    def switch(self) -> bool:
        return bool(self.click.get("is_flag"))


def option(default: Any, name: str, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"flag": Flag(name, help, more)})


def check_margin(bits: object) -> None:
    if not isinstance(bits, int | float) or not 0 <= bits <= MOST_MARGIN:
        raise UserError(f"a margin of {shortened(bits)} bits cannot be kept; give 0 to {MOST_MARGIN}")


def check_data(data: str | None, *, run_model: bool = True) -> None:
    from ..measuring.texts import local_file

    if data is not None and not run_model:
        raise UserError("--no-audit runs nothing, so --data has no use; leave out one of them")
    if data is not None:
        local_file(data)  # raises before the checkpoint is fetched


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a conversion; each flag's help says what its field does."""

    target: str = option(
        AUTO,
        "--target",
        "Where it must be safe. half: in PyTorch. auto: in PyTorch too, but --plan brings its own target."
        " norm-safe: also where norms compute in fp16 (ONNX, TensorRT). fp16-accumulate: also where every sum is made"
        " in fp16. train: in training, with room for weights that move.",
        type=click.Choice((AUTO, *TARGETS)),
        show_default=True,
    )
    data: str | None = option(
        None,
        "--data",
        "Text to run on besides the built-in probe: JSONL, CSV, Parquet, text (.gz too), or a Hub dataset.",
        type=PATH,
        metavar="FILE",
    )
    run_model: bool = option(
        True,
        "--no-audit",
        "Run nothing but a few short rows: the bounds make the plan, and the certificate decides.",
        is_flag=True,
        callback=lambda context, parameter, given: not given,
    )
    subfolder: str | None = option(
        None, "--subfolder", "Folder inside SOURCE (diffusers: text_encoder_2).", metavar="NAME"
    )
    as_class: str | None = option(
        None,
        "--as",
        "Convert for this transformers class. A class without a head returns the last states at the source's scale.",
        metavar="CLASS",
    )
    plan: str | Path | None = option(
        None, "--plan", "Replay the plan of a report instead of observing.", type=FOLDER, metavar="REPORT"
    )
    layout: str = option(
        FOLDER_LAYOUT,
        "--layout",
        "hf: OUT is a folder. wan: one file for Wan's tools. single: one file with the tensor names of transformers.",
        type=click.Choice(LAYOUT_NAMES),
        show_default=True,
    )
    eps: str = option(
        OF_CONFIG,
        "--eps",
        "config: the norms' eps is rescaled. fixed: it stays, for a tool that has an eps of its own.",
        type=click.Choice(EPS),
        show_default=True,
    )
    stream: int | None = option(
        None,
        "--stream",
        "Multiply the residual stream by 2^EXP, whatever that leaves unproven; 0 keeps the source's scale.",
        type=click.IntRange(-MOST_EXPONENT, MOST_EXPONENT),
        metavar="EXP",
    )
    margin_bits: float = option(
        MARGIN_BITS,
        "--margin",
        f"Bits kept between what is observed and each limit, 0 to {MOST_MARGIN}; default: {MARGIN_BITS}.",
        type=float,
        metavar="BITS",
    )
    max_length: int = option(
        MAX_LENGTH,
        "--max-length",
        f"Positions for which the certificate holds; default {MAX_LENGTH}.",
        type=int,
        metavar="N",
    )
    device: str | torch.device = option(
        "auto",
        "--device",
        "auto (CUDA where there is one, else the CPU), cpu, cuda, cuda:N or mps; default: auto.",
        metavar="DEVICE",
    )
    exact: bool = option(False, "--exact", "Make no edits: use only powers of two that cancel.", is_flag=True)
    max_kl: float | None = option(
        None,
        "--max-kl",
        "Accept a KL to the source of up to X nats, even if the KL of bf16 is smaller. If the model gives no"
        " probabilities, X is a relative squared error.",
        type=float,
        metavar="X",
    )
    prove: bool = False  # no flag: bring bounds under their limits even at a high cost of precision

    def check(self) -> None:
        for name, known in (("target", (AUTO, *TARGETS)), ("layout", LAYOUT_NAMES), ("eps", EPS)):
            if (value := getattr(self, name)) not in known:
                raise UserError(f"{name} {value!r} is unknown; choose one of {', '.join(known)}")
        check_margin(self.margin_bits)
        if self.stream is not None and not -MOST_EXPONENT <= self.stream <= MOST_EXPONENT:
            raise UserError(f"--stream is {self.stream}; give an exponent from -{MOST_EXPONENT} to {MOST_EXPONENT}")
        if self.max_kl is not None and not 0 < self.max_kl < math.inf:
            raise UserError(f"max_kl is {self.max_kl!r}; give a finite number over 0, such as 0.01")
        Arithmetic(self.max_length)  # raises for an unusable length
        check_data(self.data, run_model=self.run_model)
        for name, own in (
            ("--margin", self.margin_bits == MARGIN_BITS),
            ("--eps", self.eps == OF_CONFIG),
            ("--stream", self.stream is None),
        ):
            if self.plan is not None and not own:
                raise UserError(f"--plan already decides what {name} sets; leave out one of the two")
        if self.max_kl is not None and (self.exact or not self.run_model):
            other = "--exact" if self.exact else "--no-audit"
            raise UserError(f"--max-kl limits what edits cost, but {other} makes no edits; leave out one of the two")

    def check_layout(self, layout: Layout, where: str) -> None:
        chosen = LAYOUTS.get(self.layout)
        if chosen is None or chosen.model_type is None:
            return
        chosen.check_model(layout.family.model_type, where)
        if layout.stock.decodes or layout.head is not None:
            name = layout.family.giving_states(decodes=False)
            how = "give a folder of the encoder" if name is None else f"add --as {name}"
            raise UserError(
                f"{where}: {chosen.readers} can load only encoders without a head; {how}, or choose --layout single"
            )
        for name in layout.tensors:
            chosen.naming.from_stock(name)  # raises for a tensor without a name there

    def held_eps(self, layout: Layout) -> float | None:
        """Return the norms' eps in the program that will read the output; None if it reads the config's eps."""
        if layout.family.eps_key is None:
            return None
        own = LAYOUTS[self.layout].eps if self.layout in LAYOUTS else None
        return layout.eps if own is None and self.eps == FIXED else own

    def command(self, source: str | Path, out: Path) -> str:
        shown = shown_in_a_command(source)
        words = ["bf16-to-fp16", "convert", shown, out.name if out.name != shown else f"{shown}-fp16"]
        for name in PUBLISHED:
            flag, value = FLAGS[name], getattr(self, name)
            if value != getattr(Options, name):
                words += [flag.name] if flag.switch else [flag.name, shown_in_a_command(str(value))]
        return shlex.join(words)


FLAGS: Mapping[str, Flag] = {each.name: each.metadata["flag"] for each in fields(Options) if each.metadata}
"""The command-line flags, by the name of their field in ``Options``."""

PUBLISHED = tuple(name for name in FLAGS if name != "device")
"""The fields that are shown in a report's command line: all that change the output."""


@dataclass(frozen=True)
class Destination:
    out: Path
    force: bool = False
    dry_run: bool = False

    def check(self, *sources: str | Path | None) -> None:
        if not self.dry_run:
            check_out(self.out, *sources, force=self.force)


@dataclass(frozen=True)
class Provenance:
    """Where a trained checkpoint comes from. ``original``: the checkpoint before training. ``judge``: a function that
    adds the recipe's goals to the report. ``search``: a function that searches for inputs that overflow the named sites
    of the model in a folder."""

    command: str
    lineage: Lineage
    original: Checkpoint
    judge: Callable[[Report], Report] = lambda report: report
    search: Callable[[Path, list[str], Device], AttackEntry | None] = lambda folder, sites, device: None
