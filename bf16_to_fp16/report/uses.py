"""What a converted checkpoint is good for next: to train, adapt, merge, quantise, by what its plan moved.

An optimizer's step is absolute, so a weight times 2^r sees the source's learning rate 2^-r times as large; adapters,
quantisers and readers of states meet the same factor. benchmarks/rates.py measures each.
"""

from __future__ import annotations

from ..rescaling.plan import Plan
from ..wording import listed
from . import facts, schema

IN_FP32 = "load it with dtype=torch.float32 and train under fp16=True"
FOLLOW = "safe = make_fp16_safe(model), then safe.follow(optimizer, model)"


def powers(exponents: dict[str, int]) -> str:
    """Return names by their power of two, in words."""
    by_exponent: dict[int, list[str]] = {}
    for name, exponent in exponents.items():
        by_exponent.setdefault(exponent, []).append(name)
    return ", ".join(f"2^{exponent} for {listed(names)}" for exponent, names in sorted(by_exponent.items()))


def finetuning(report: schema.Report) -> str:
    """Return how to finetune the folder; empty where nothing was converted, or the result is unsafe."""
    plan = report.plan
    if plan is None or not report.safe:
        return ""
    if not plan.moves:
        return f"{IN_FP32}, at the source's learning rates"
    other = "without it, lower the rate of the weights that were moved"
    if moved := report.moved.linears | report.moved.others:
        other = f"without it, multiply the learning rate by {powers(moved)}"
        other += "" if plan.moves_streams_alone else ", though single channels were moved besides"
    return f"{IN_FP32}; {FOLLOW} takes the source's learning rates; {other}"


def harm(report: schema.Report) -> str:
    """Return what would do silent harm to the folder; empty where nothing was moved."""
    plan = report.plan
    if plan is None or not plan.moves or not report.safe:
        return ""
    parts = ["a LoRA, prompt or merge partner of the source used unchanged", "quantising or pruning it by magnitude"]
    if gains_round(plan):
        parts.append("loading it in bf16")
    return f"{listed(parts)}: see {schema.CARD}, “What you can do with it”"


def gains_round(plan: Plan) -> bool:
    """Return whether gains that are stored less 1 have moved, to where bf16 is coarse."""
    return plan.drift is not None and plan.eps is not None and any(r < 0 for r in plan.residual_exponents)


def uses(report: schema.Report) -> list[tuple[str, str]]:
    """Return what can be done with the folder, as pairs of what and how."""
    plan = report.plan
    if plan is None or not report.safe:
        return []
    rows = [("train", finetuning(report))]
    if not plan.moves:
        return [*rows, ("adapters, quantisers, merges", "as with the source: no weight's scale was changed")]
    rows.append(("bring the result back", "safe.undo(model), or for this folder: bf16-to-fp16 undo DIR OUT"))
    rows.append(
        (
            "a LoRA or soft prompt of the source",
            "bf16-to-fp16 convert DIR OUT --adapter ADAPTER; unchanged it is wrong (IA3 works as it is)",
        )
    )
    if plan.moves_streams_alone and (linears := report.moved.linears):
        scales = ", ".join(f'"{name}": alpha * 2**{exponent}' for name, exponent in linears.items())
        rows.append(("a LoRA trained here", f"LoraConfig(alpha_pattern={{{scales}}}) gives the source's curve"))
    rows += [
        ("merge", "merge sources, then convert; or convert the other one with --plan DIR/fp16_report.json first"),
        ("quantise, prune by magnitude", "the source, not this"),
    ]
    if gains_round(plan):
        rows.append(("bf16", "not this: its gains, stored less 1, lie near −1, where bf16 is coarse; use the source"))
    if states := facts.scaled_outputs(report):
        rows.append(("states", states))
    rows.append(
        ("new tokens", "resize_token_embeddings(mean_resizing=True), the default; other new rows are too large")
    )
    rows.append(("save again", f"copy {schema.REPORT} along, or verify, undo and make_fp16_safe do not know its plan"))
    return rows
