"""Say what a plan means for later uses of a converted checkpoint. Under AdamW, a weight scaled by 2^r learns as if its
learning rate were multiplied by 2^-r; see benchmarks/rates.py."""

from __future__ import annotations

from ..families.known import named
from ..rescaling.plan import Plan, composed
from . import schema

TITLE = "What you can do with it"  # of the card's section


def whole_plan(plan: Plan, run: schema.FinetuneEntry | None) -> Plan:
    """Return the plan from the original to the output: a finetune's starting plan, if any, composed with ``plan``."""
    return plan if run is None or run.start is None else composed(run.start, plan)


def training(plan: Plan) -> str:
    if not plan.moves:
        return "`dtype=torch.float32` and `fp16=True`; no weight was rescaled, so keep your learning rate"
    return (
        "load with `dtype=torch.float32`, train with `fp16=True, max_grad_norm=0`, and `from bf16_to_fp16 import"
        " make_fp16_safe`: `safe = make_fp16_safe(model)`, `optimizer = safe.follow(optimizer, model)`. Your"
        " learning rate then holds. After training: `safe.undo(model)`, then save"
    )


def gains_round(plan: Plan) -> bool:
    """Return whether gains are stored as gain − 1 and the plan shrinks the gains. The stored numbers then come near −1,
    where bf16 is coarse."""
    family = named(plan.family)
    less_1 = family is not None and any(tensor.offset for tensor in family.encoder_output.tensors)
    return less_1 and plan.drift is not None and plan.eps is not None and any(r < 0 for r in plan.residual_exponents)
