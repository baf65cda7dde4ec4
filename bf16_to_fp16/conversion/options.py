"""How a conversion is done, where it goes, and what it comes from: the frozen values that ``convert`` begins with."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..bounds.arithmetic import MAX_LENGTH, Arithmetic
from ..bounds.certificate import TARGETS
from ..bounds.tiers import TIERS
from ..checkpoint.folder import MODULES
from ..checkpoint.layouts import FOLDER_LAYOUT, LAYOUTS
from ..checkpoint.naming import WAN_MODELS
from ..checkpoint.reader import Checkpoint, own_name
from ..checkpoint.side_modules import encoder_config
from ..checkpoint.staging import check_out
from ..errors import UserError
from ..families.layout import Layout
from ..report.remedies import NORMALISE_IN_FP32, finetuning_of, normalising_is_all
from ..report.schema import Lineage, Report
from ..rescaling.planner import MARGIN_BITS
from ..wording import counted

AUTO = "auto"
"""Asks for the strictest tier's target that costs next to nothing."""


if TYPE_CHECKING:
    import torch

TOOLS = {"comfy": "ComfyUI", "wan": "Wan"}
"""The tools with a T5 of their own, by layout."""


TOOL_EPS = 1e-6
"""The eps of the norms in these tools, which no file can change."""


MOST_MARGIN = 12
"""Bits of margin that leave a signal any room: 65504·2⁻¹² is 16."""


@dataclass(frozen=True)
class Options:
    """How a conversion is done, apart from where: one field for each of the command's options.

    target: one of ``TARGETS``, or ``auto`` for the strictest tier that costs next to nothing. data: text to
    observe and audit on besides the built-in probe.
    run_model: False plans from the bounds and lets the certificate decide; a few short rows are compared with the
    source's, block by block, and the whole model is never in memory. plan: a
    report whose plan is replayed instead of observing. margin_bits: kept between what is observed and each limit.
    max_length: positions for which the certificate holds. max_shard_size: bytes, else sharded like the source.
    sweep: have the probe run every id of the vocabulary. device: auto, cpu, cuda,
    cuda:N or mps. prove: hold every signal for every input where an exponent does it, whatever precision that costs.
    config: the config.json of a source that is one file of weights, else told from its tensors. layout: ``hf`` for a
    folder, or one of ``LAYOUTS`` for one file. variant: give the weights the names of the variant fp16 as well, as is
    done where the source has them.
    """

    target: str = AUTO
    data: str | None = None
    run_model: bool = True
    subfolder: str | None = None
    plan: str | Path | None = None
    margin_bits: float = MARGIN_BITS
    max_length: int = MAX_LENGTH
    max_shard_size: int | None = None
    seed: int = 0
    sweep: bool = False
    device: str | torch.device = "auto"
    prove: bool = False
    config: str | Path | None = None
    layout: str = FOLDER_LAYOUT
    variant: bool = False

    def check(self) -> None:
        """Raise UserError for a value that cannot be used, or for two that do not go together."""
        if self.target not in (AUTO, *TARGETS):
            raise UserError(f"target {self.target!r} is unknown; choose one of {', '.join((AUTO, *TARGETS))}")
        if not 0 <= self.margin_bits <= MOST_MARGIN:
            raise UserError(f"a margin of {self.margin_bits} bits cannot be kept; give 0 to {MOST_MARGIN}")
        if self.layout not in (FOLDER_LAYOUT, *LAYOUTS):
            raise UserError(f"layout {self.layout!r} is unknown; choose one of {', '.join((FOLDER_LAYOUT, *LAYOUTS))}")
        if self.layout != FOLDER_LAYOUT and self.max_shard_size is not None:
            raise UserError("--layout writes one file; leave out either it or --max-shard-size")
        Arithmetic(self.max_length)  # of which it is one
        if self.data is not None and not self.run_model:
            raise UserError("data is of no use where nothing is run; leave out either --data or --no-audit")
        if self.sweep and not self.run_model:
            raise UserError("nothing is run to sweep; leave out either --sweep or --no-audit")

    def check_layout(self, layout: Layout, where: str) -> None:
        """Raise UserError for a model that the tool of the layout has no class for."""
        if self.layout not in TOOLS:
            return
        if layout.stock.decodes or layout.head is not None:
            raise UserError(
                f"{where}: {TOOLS[self.layout]} reads encoders alone; give the encoder, or choose --layout single"
            )
        if self.layout == "wan" and (layout.family.model_type not in WAN_MODELS or not layout.gates):
            reads = " or ".join(WAN_MODELS.values())
            raise UserError(
                f"{where}: Wan reads the encoder of {reads}; for {layout.family.title} choose --layout comfy"
            )
        if layout.eps != TOOL_EPS:
            raise UserError(f"{where}: {TOOLS[self.layout]} has {TOOL_EPS:g} for eps, and the config {layout.eps:g}")

    def given(self) -> dict[str, object]:
        """Return the options of the command line that asks for this, None where it has none; "" for a switch."""
        return {
            "--target": None if self.target == AUTO else self.target,
            "--no-audit": None if self.run_model else "",
            "--margin": None if self.margin_bits == MARGIN_BITS else f"{self.margin_bits:g}",
            "--data": self.data,
            "--sweep": "" if self.sweep else None,
            "--plan": self.plan,
            "--subfolder": self.subfolder,
            "--config": self.config,
            "--layout": None if self.layout == FOLDER_LAYOUT else self.layout,
            "--max-shard-size": None if self.max_shard_size is None else f"{self.max_shard_size}B",
            "--seed": self.seed or None,
            "--max-length": None if self.max_length == MAX_LENGTH else self.max_length,
        }

    def command(self, source: str | Path, out: Path) -> str:
        """Return the command line that does the same again; of local paths only the last part, since it is
        published."""
        shown = shown_in_a_command(source)
        words = ["bf16-to-fp16", "convert", shown, out.name if out.name != shown else f"{shown}-fp16"]
        for option, value in self.given().items():
            if value is not None:
                words += [option] if value == "" else [option, shown_in_a_command(value)]
        return shlex.join(words)

    def next(self, report: Report, source: str, out: str) -> str:
        """Return how to go on where a conversion of ``source`` to ``out`` ended unsafe, with both named so."""
        broken = report.broken_regimes
        if not broken and not report.unsafe and normalising_is_all(report.uncertified):
            return NORMALISE_IN_FP32
        return finetuning_of(
            source,
            f"{out}-finetuned",
            [name for name in report.regimes if name not in broken] if broken else (),
            certify=not report.regimes,
            target=None if self.target in (AUTO, TIERS[0].target) else self.target,
            subfolder=self.subfolder,
        )


SWITCHES = ("--no-audit", "--sweep")
"""Options without a value."""


def read_command(line: str) -> tuple[list[str], dict[str, str]] | None:
    """Return source and output of a command line that ``Options.command`` wrote, and its options; None for any other
    line, such as one that a shell would run something else for."""
    try:
        words = shlex.split(line)
    except ValueError:
        return None
    if words[:2] != ["bf16-to-fp16", "convert"] or shlex.join(words) != line:
        return None
    known, names, given, rest = Options().given(), [], dict[str, str](), words[2:]
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            names.append(word)
        elif word not in known or word in given or (word not in SWITCHES and not rest):
            return None
        else:
            given[word] = "" if word in SWITCHES else rest.pop(0)
    return (names, given) if len(names) == 2 else None


def shown_in_a_command(value: object) -> str:
    """Return a word of a command line as it is published: of a local path the last part."""
    return own_name(value) if isinstance(value, (str, Path)) and Path(value).exists() else str(value)


@dataclass(frozen=True)
class Destination:
    """Where the output goes, whether it may replace what is there, and whether it is written at all."""

    out: Path
    force: bool = False
    dry_run: bool = False

    def check(self, *sources: str | Path | None) -> None:
        """Raise UserError unless the folder can be made, apart from the ``sources`` that are here."""
        if not self.dry_run:
            check_out(self.out, *sources, force=self.force)


@dataclass(frozen=True)
class Provenance:
    """What a report says of a checkpoint that was trained: the command that made it, where it comes from, the
    original, with which the output is compared besides its source, and what the report becomes by what was asked.

    attack_steps: gradient steps of the search for inputs that break what the certificate does not prove; 0 for none.
    """

    command: str
    lineage: Lineage
    original: Checkpoint
    judge: Callable[[Report], Report] = lambda report: report
    attack_steps: int = 0


def shorter_than_its_own(checkpoint: Checkpoint, layout: Layout, max_length: int) -> str:
    """Return the line that says that a proof for ``max_length`` positions is for less than the model's own config
    names; "" where it is not."""
    own = own_length(checkpoint.folder, layout.config)
    if own is None or max_length >= own:
        return ""
    return (
        f"the proof is for {counted(max_length, 'position')} at most, and {checkpoint.name} takes {own:,} by its"
        " config; longer inputs are not covered"
    )


def own_length(folder: Path, config: Mapping[str, object]) -> int | None:
    """Return the most positions that a config, one inside it or that of a sentence encoder names; None where none
    does."""
    configs = (config, *(part for part in config.values() if isinstance(part, Mapping)))
    named = [part.get(key) for part in configs for key in ("max_position_embeddings", "n_positions")]
    if (folder / MODULES).is_file():
        named.append(encoder_config(folder)[1].get("max_seq_length"))
    return max((n for n in named if isinstance(n, int) and not isinstance(n, bool) and n > 0), default=None)
