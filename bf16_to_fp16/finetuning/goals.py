"""Check whether a finetune reached its recipe's goals: headroom, quality and a certificate. If not, name the next
command."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from ..report.facts import Distance, distances
from ..report.judgement import FP16_RANGE_BITS
from ..report.remedies import tower_alone, with_next
from ..report.schema import FinetuneEntry, Report, UnsafeEntry
from ..wording import bits, counted, excess, scientific
from .recipe import Recipe

TOLERANCE_BITS = 0.005  # what headroom may lack: less than its two digits show


@dataclass(frozen=True)
class Command:
    """The command line that started a finetune. ``line`` returns it with changed settings, to suggest the next run."""

    recipe: str = "recipe.yaml"
    overrides: tuple[str, ...] = ()  # values of ``--set``, such as "schedule.steps=100"
    begun: tuple[str, ...] = ("bf16-to-fp16", "finetune")  # the words before the recipe
    is_public: bool = False  # show only the names of absolute paths

    def line(self, **settings: object) -> str:
        changed = tuple(f"{key.replace('__', '.')}={value}" for key, value in settings.items())
        names = {part.partition("=")[0] for part in changed}
        kept = tuple(part for part in self.overrides if part.partition("=")[0].strip() not in names)
        pairs = [part.partition("=") for part in kept + changed]
        words = [word for key, equals, value in pairs for word in ("--set", f"{key}{equals}{self._shown(value)}")]
        return shlex.join([*map(self._shown, (*self.begun, self.recipe)), *words, *(["--force"] if changed else [])])

    def _shown(self, value: str) -> str:
        path = value.strip().strip("\"'")
        return Path(path).name if self.is_public and Path(path).is_absolute() else value

    def published(self) -> Command:
        return replace(self, is_public=True)


def next_command(recipe: Recipe, steps: int, *, more: bool, command: Command) -> str:
    """Return a sentence with the command to run next. more: whether it continues to twice ``steps``; otherwise it
    begins a new run at half the learning rate."""
    if more:
        return f"go on: {command.line(schedule__steps=2 * steps)}"
    folder = (recipe.checkpointing.folder or f"{recipe.out}.run") + "-2"
    while Path(folder).exists():
        folder += "-2"
    # What training holds is held to its last step; the rest was held by the exponents of its start.
    slower = f"{recipe.schedule.learning_rate / 2:g}"
    line = command.line(schedule__learning_rate=slower, checkpointing__folder=folder)
    return f"begin another run that stays nearer to its start: {line}"


def goal(what: str, missing: float, reason: str) -> UnsafeEntry:
    return UnsafeEntry(signal=what, kind="goal", excess_bits=missing, reason=reason, remedy="")


def lost_quality(recipe: Recipe, run: FinetuneEntry) -> list[UnsafeEntry]:
    most = recipe.quality.max_kl
    _, unit, measures = distances(run)
    if most is None or not measures:
        return []
    far = max(measures, key=lambda each: times_over(each, most))
    if (over := times_over(far, most)) <= 1:
        return []
    allowed = f"at most {max(most, far.bf16):.3g} (quality.max_kl)"
    reason = f"{scientific(far.value)}{unit} from the original on {far.where}, {allowed}"
    return [goal("divergence from the original", math.log2(over) if over < math.inf else FP16_RANGE_BITS, reason)]


def times_over(distance: Distance, most: float) -> float:
    value = distance.value
    return value / max(most, distance.bf16) if value is not None and value < math.inf else math.inf


def with_goals(report: Report, recipe: Recipe, command: Command) -> Report:
    run = report.finetune
    assert run is not None and report.regimes  # convert audits what was finetuned
    tightest = min(report.regimes.values(), key=lambda regime: regime.headroom_bits)
    delivered, asked = tightest.headroom_bits, recipe.penalty.headroom_bits
    penalised, missed = recipe.penalty.form != "none", lost_quality(recipe, run)
    if recipe.penalty.certify and report.uncertified and not report.proven:
        worst = max(report.uncertified, key=lambda site: site.excess_bits)
        over = f"{counted(len(report.uncertified), 'bound')} over the limit"
        most = f"most by {excess(worst.excess_bits, 2)} bits at {worst.name}"
        missed.append(goal("certificate", worst.excess_bits, f"no certificate (penalty.certify), {over}, {most}"))
    more = penalised and not missed
    if penalised and not delivered >= asked - TOLERANCE_BITS:  # NaN lacks it too
        reason = f"{bits(delivered)} bits of headroom, of {asked:g} (penalty.headroom_bits), at {tightest.tightest}"
        missed, more = [goal("headroom", asked - delivered, reason), *missed], True
    if report.safe and not missed:
        return report
    advice = next_command(recipe, run.steps, more=more, command=command)
    return with_next(report, missed, tower_alone(report.family, report.regimes) or advice)
