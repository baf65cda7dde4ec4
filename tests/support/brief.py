"""What runs of tests do less of than those of users, and few tests look at.

Programs of ``warm``'s interpreter leave it out as well, but where the environment says ``WHOLE_RUNS``.
"""

import json
from functools import cached_property
from typing import Any

import pytest

from bf16_to_fp16.checkpoint.reader import Checkpoint
from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.finetuning.distillation import Evaluator
from bf16_to_fp16.measuring import agreement, batch, probe, soft_side
from bf16_to_fp16.measuring.fidelity import compared
from bf16_to_fp16.report import figures, page

PICTURES = ("before_and_after", "bound_and_observed")
WHOLE_PROBE = probe._probe
LEFT_OUT = (batch.LONG, batch.REPEATED)
NOT_AUDITED = (batch.RANDOM, batch.SHORT, batch.GENERATE)  # by conversions and audits
AUDITED = probe.audit_batches
TOKENISED = probe.tokenised
ALL_BATCHES = vars(Evaluator)["_others"].func
FEW = 2


def draw_nothing(patch: pytest.MonkeyPatch) -> None:
    """Let pages have no pictures, whose drawing takes as long as a tiny model's plan, and no row for each site."""
    for name in PICTURES:
        patch.setattr(figures, name, lambda _: [])
    patch.setattr(page, "site_rows", lambda _: [])


def agree_once(patch: pytest.MonkeyPatch) -> None:
    """Let the stock model of the same config and tensors be built once in a process, a sixth of a conversion."""
    check, agreed = agreement.check_agreement, set[str]()

    def once(checkpoint: Checkpoint, layout: Layout) -> None:
        tensors = sorted((name, info.shape, info.dtype) for name, info in checkpoint.tensors.items())
        if (key := json.dumps([checkpoint.config, tensors])) not in agreed:
            check(checkpoint, layout)
            agreed.add(key)

    patch.setattr(agreement, "check_agreement", once)


def probe_briefly(patch: pytest.MonkeyPatch) -> None:
    """Let the probe have one batch of each kind, a generation of one step, and fewer rows for edits."""

    def brief(*given: Any, **options: Any) -> list[Any]:
        first = {each.kind: each for each in reversed(WHOLE_PROBE(*given, **options))}
        return [each for kind, each in reversed(first.items()) if kind not in LEFT_OUT]

    def audited(*given: Any, **options: Any) -> list[Any]:
        return [each for each in AUDITED(*given, **options) if each.kind not in NOT_AUDITED]

    patch.setattr(probe, "_probe", brief)
    patch.setattr(probe, "audit_batches", audited)
    patch.setattr(probe, "tokenised", lambda *given, **options: TOKENISED(*given, **options)[:1])
    patch.setattr(soft_side, "MOST_ROWS", 128)
    patch.setattr(soft_side, "DRAWS", 2)
    patch.setattr(batch, "GENERATED_TOKENS", 2)


def audit_first_batch(patch: pytest.MonkeyPatch) -> None:
    """Of the probe the first batch whose outputs are compared, and images: enough where what is run is no question."""
    gather = probe.audit_batches

    def first(*given: Any, **options: Any) -> list[batch.Batch]:
        every = gather(*given, **options)
        return [each for each in every if each is compared(every)[0] or each.image]

    patch.setattr(probe, "audit_batches", first)


def evaluate_briefly(patch: pytest.MonkeyPatch) -> None:
    """Let an evaluation look at two batches of the probe and of texts of other kinds."""

    def few(evaluator: Evaluator) -> dict[str, Any]:
        return {kind: each[:FEW] for kind, each in ALL_BATCHES(evaluator).items()}

    others = cached_property(few)
    others.__set_name__(Evaluator, "_others")
    patch.setattr(Evaluator, "_others", others)


def all_runs() -> None:
    for each in (draw_nothing, probe_briefly, evaluate_briefly, agree_once):
        each(pytest.MonkeyPatch())
