"""The uses of a converted checkpoint, by what its plan moved. For AdamW a weight times 2^r has 2^-r times the learning
rate; adapters, quantisers and readers of states meet the same factor. benchmarks/rates.py measures each."""

from __future__ import annotations

from ..families.known import named
from ..rescaling.plan import Plan, composed
from ..wording import listed
from . import facts, schema

TITLE = "What you can do with it"
PAGE = "docs/training.md, “A converted folder”"
ALPHA = 16  # the lora_alpha of the example


def powers(exponents: dict[str, int]) -> str:
    by_exponent: dict[int, list[str]] = {}
    for name, exponent in exponents.items():
        by_exponent.setdefault(exponent, []).append(name)
    return ", ".join(f"2^{exponent} for {listed(names)}" for exponent, names in sorted(by_exponent.items()))


def training(report: schema.Report) -> str:
    how = dict(uses(report)).get("train", "").replace("`", "")
    return f"{how} ({PAGE})" if how else ""


def whole_plan(plan: Plan, run: schema.FinetuneEntry | None) -> Plan:
    """Return the plan from the original's weights: that of a finetune's start, and then the conversion's."""
    return plan if run is None or run.start is None else composed(run.start, plan)


def harm(report: schema.Report) -> str:
    if report.plan is None or not report.safe or not (plan := whole_plan(report.plan, report.finetune)).moves:
        return ""
    loading = ", nor if you load it in bf16" if gains_round(plan) else ""
    return (
        f"nothing warns you if you use a LoRA, prompt or merge partner of the source unchanged{loading}: see the"
        f" folder's {schema.CARD}, “{TITLE}”"
    )


def gains_round(plan: Plan) -> bool:
    """Return whether gains stored less 1 have moved close to −1, where bf16 is coarse."""
    family = named(plan.family)
    less_1 = family is not None and any(tensor.offset for tensor in family.encoder_output.tensors)
    return less_1 and plan.drift is not None and plan.eps is not None and any(r < 0 for r in plan.residual_exponents)


def uses(report: schema.Report) -> list[tuple[str, str]]:
    if report.plan is None or not report.safe:
        return []
    plan = whole_plan(report.plan, report.finetune)
    if not plan.moves:
        return [
            ("train", "`dtype=torch.float32` and `fp16=True`; no weight was moved, so your learning rate holds"),
            ("adapters, quantisers, merges", "as with the source"),
        ]
    rows = [
        (
            "train",
            "load with `dtype=torch.float32`, train with `fp16=True, max_grad_norm=0`, and `from bf16_to_fp16 import"
            " make_fp16_safe`: `safe = make_fp16_safe(model)`, `optimizer = safe.follow(optimizer, model)`. Your"
            " learning rate then holds. After training: `safe.undo(model)`, then save",
        )
    ]
    if moved := report.moved.linears | report.moved.others:
        besides = "" if plan.moves_streams_alone else "; this does not correct single channels"
        rows.append(("AdamW without `follow`", f"multiply the rate by {powers(moved)}{besides}"))
    what = "the untrained source again" if report.finetune is None else "these weights at the original's scale"
    rows.append((what, "`bf16-to-fp16 undo DIR OUT`"))
    rows.append(
        (
            "a LoRA or soft prompt of the source",
            "`bf16-to-fp16 convert DIR OUT --adapter ADAPTER`; unchanged it loads and can be badly off."
            " IA3 works as it is",
        )
    )
    if plan.moves_streams_alone and (linears := report.moved.linears):
        scales = ", ".join(f'"{name}": {ALPHA * 2.0**exponent:g}' for name, exponent in linears.items())
        rows.append(("a LoRA trained here", f"`LoraConfig(lora_alpha={ALPHA}, alpha_pattern={{{scales}}})`"))
    rows += [
        ("merge", "merge sources, then convert; or convert the other one with `--plan DIR/fp16_report.json` first"),
        ("quantise, prune by magnitude", "compare with the source first: which of the two loses less differs"),
    ]
    if gains_round(plan):
        rows.append(("bf16", "use the source: these gains, stored less 1, lie near −1, where bf16 is coarse"))
    if states := facts.scaled_outputs(report):
        rows.append(("states", states.replace("_", r"\_")))
    if factor := plan.residual_exponent:
        rows.append(("`inputs_embeds` that another module makes", f"multiply them by 2^{factor}"))
    rows.append(("new tokens", "`resize_token_embeddings(mean_resizing=True)`, the default; others are too large"))
    rows.append(("save it again, at this scale", f"copy `{schema.REPORT}` along: `undo` and `make_fp16_safe` read it"))
    return rows
