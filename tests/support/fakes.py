"""Reports built by hand, as large as those of real checkpoints, for the tests of what is made from them."""

import math
import re
from typing import Any

from bf16_to_fp16.families.places import Place, block_of, places_by_name, stack_of

BROKEN = "encoder.block.2.layer.1.DenseReluDense.wo"

LIMIT = {"signal": f"{BROKEN} (output)", "kind": "limit", "excess_bits": 2.5, "remedy": "finetune it"}
COMMAND = "bf16-to-fp16 finetune r.yaml"

OPERATIONS = (
    *("layer_norm:pow", "layer_norm:mul", "SelfAttention.q", "SelfAttention.k", "SelfAttention.v"),
    *("SelfAttention:scores", "SelfAttention:softmax", "SelfAttention.o", ":add"),
)
FEED_FORWARD = (
    *("layer_norm:mul", "DenseReluDense.wi_0", "DenseReluDense.wi_1", "DenseReluDense:mul"),
    *("DenseReluDense.wo", ":add", ":clamp"),
)


def site(name: str, amax: float, **changes: Any) -> dict[str, Any]:
    fields = {"nonfinite": 0, "saturated": 0, "benign": None, "dtype": "float16", "limit": 65504.0}
    kept = math.log2(65504 / amax) if amax else 39.999
    return {"name": name, "amax": amax, "headroom_bits": kept, **fields, **changes}


def placed(name: str) -> dict[str, Any]:
    behind = re.search(r"layer\.[12]\.(layer_norm|DenseReluDense)|fc2|mlp", name)
    return Place(stack_of(name), block_of(name), "feed-forward" if behind else "attention").to_json()


def sites(blocks: int, stacks: tuple[str, ...]) -> list[dict[str, Any]]:
    names = [
        f"{stack}.block.{i}.layer.{j}.{op}".replace(".:", ":")
        for stack in stacks
        for i in range(blocks)
        for j, ops in enumerate((OPERATIONS, FEED_FORWARD))
        for op in ops
    ]
    found = [site(name, 2.0 ** (14 - 20 * k / len(names))) for k, name in enumerate(names)]
    found.append(site("encoder.block.0:mask", 1e9, limit=None, headroom_bits=None, benign="the mask's minimum"))
    return sorted(found, key=lambda s: math.inf if s["headroom_bits"] is None else s["headroom_bits"])


def regime(found: list[dict[str, Any]]) -> dict[str, Any]:
    totals = {key: sum(s[key] for s in found) for key in ("nonfinite", "saturated")}
    tight, places = found[0], places_by_name(s["name"] for s in found)
    least = {key: tight[key] for key in ("amax", "headroom_bits")}
    return {**totals, **least, "nonfinite_logits": 0, "sites": [s | places[s["name"]].to_json() for s in found]}


def signals(blocks: int, stacks: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return what a model with a growing residual stream shows before and after a factor 1/8."""
    rows = []

    def row(module: str, side: str, kind: str, before: float, factor: float = 0.125) -> None:
        rows.append({"module": module, "side": side, "kind": kind, "before": before, "after": before * factor})
        rows[-1] |= placed(module)

    for stack in stacks:
        row(f"{stack}.final_layer_norm", "input", "residual", 2.9e5)
        for i in range(blocks):
            at, level = f"{stack}.block.{i}.layer", 2.0 ** min(18, 3 + 16 * i / max(1, blocks))
            row(f"{at}.0.layer_norm", "input", "residual", level)
            row(f"{at}.0.SelfAttention.o", "output", "residual", level / 8)
            row(f"{at}.1.layer_norm", "input", "residual", level)
            row(f"{at}.1.DenseReluDense.wo", "output", "residual", level * 1.2)
            row(f"{at}.1.DenseReluDense.wo", "input", "neuron", level / 5, 0.5)
    return rows


def conversion(
    *, blocks: int = 9, stacks: tuple[str, ...] = ("encoder", "decoder"), safe: bool = True
) -> dict[str, Any]:
    """Return the report of a conversion: about 300 sites in each regime by default; encoders have no KL."""
    regimes = {name: regime(sites(blocks, stacks)) for name in ("stock", "amp", "half")}
    if not safe:
        broken = site(BROKEN, 65536.0, nonfinite=1200, saturated=34, headroom_bits=math.log2(65504 / 65536))
        regimes["half"] = regime([broken] + [s for s in regimes["half"]["sites"] if s["name"] != BROKEN])
    kl = "decoder" in stacks
    source: dict[str, Any] = {"path": "someone/summariser-large", "revision": "0" * 40, "dtype": "BF16", "dtypes": {}}
    source |= {"sha256": {"model.safetensors": "ab" * 32}, "made": [], "dropped": {}}
    source |= {"config_changes": {"layer_norm_epsilon": {"before": 1e-6, "after": 1.5625e-8}}}
    source |= {"carried_over": ["spiece.model", "generation_config.json"], "left_out": ["model.safetensors"]}
    fidelity: dict[str, Any] = {"measure": "kl" if kl else "relative squared error", "reference": "fp32 source"}
    fidelity |= {"kl_bf16": 2.4e-4, "kl_fp16": 6.0e-6, "max_logit_error_bf16": 0.58, "max_logit_error_fp16": 0.083}
    fidelity |= {"top1_bf16": 0.977 if kl else None, "top1_fp16": 0.998 if kl else None, "positions": 4096}
    weights: dict[str, Any] = {"elements": 783_150_080, "lossless_fraction": 0.99999987, "normal_fraction": 0.9996}
    weights |= {"flushed_to_zero": 0, "nonfinite": 0, "amax": 432.0}
    exponents = {
        "encoder.block.0.layer.0.SelfAttention.value": [0] * 500 + [1] * 9 + [-2] * 3,
        "encoder.block.2.layer.1.DenseReluDense.neuron": [0] * 1000 + [-1] * 20 + [-4] * 4,
        "decoder.block.1.layer.0.layer_norm": -2,
    }
    plan: dict[str, Any] = {"family": "t5", "residual_exponent": -3, "exponents": exponents, "untied_head": False}
    plan |= {"eps": 1.5625e-8, "gain_correction": {}, "drift": None, "margin_bits": 1.25}
    report: dict[str, Any] = {"schema": 1, "verdict": "safe" if safe else "unsafe", "proof": "observed", "family": "t5"}
    report |= {"source": source, "regimes": regimes, "fidelity": fidelity, "weights": weights, "plan": plan}
    report |= {"output": {"files": [{"name": "model.safetensors", "nbytes": 4_000_000, "sha256": "cd" * 32}]}}
    report |= {"signals": signals(blocks, stacks), "unsafe": [] if safe else [LIMIT]}
    report |= {"next": "" if safe else f"finetune it: {COMMAND}"}
    report |= {"command": "bf16-to-fp16 convert someone/summariser-large out"}
    versions = {"torch": "2.13.0", "safetensors": None}
    return report | {"environment": {"versions": versions, "python": "3.11.7", "device": "cpu"}}


def audit() -> dict[str, Any]:
    """Return the report of an audit of a checkpoint that breaks: no plan, weights, fidelity or signals."""
    report = conversion(safe=False)
    for key in ("plan", "weights", "fidelity", "signals", "unsafe", "output", "command"):
        del report[key]
    report["source"] = {key: report["source"][key] for key in ("path", "revision", "sha256")}
    return report | {"train_mode": True, "next": "convert it: bf16-to-fp16 convert SOURCE OUT"}
