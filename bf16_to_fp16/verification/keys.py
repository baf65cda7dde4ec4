"""Every key of a report, and how ``verify`` comes to believe it or says that it does not.

A key that is in none of the rows would be believed unseen, so a test holds this table against the schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from ..report.schema import Report, dump
from .comparing import is_table


class How(Enum):
    """How a key is checked. Its value: why it is not, where it is not."""

    ALWAYS = ""  # computed again from the files, or made again from keys that are
    RUN = "needs a run (leave out --no-audit)"  # measured again when the checkpoint is run
    ORIGINAL = "needs the original (--original)"  # made or measured again on the original
    BOTH = "needs the original and a run (--original, without --no-audit)"  # measured again on the original
    BESIDE = "needs the same text; give --data"  # what was run on the user's text, where there was one
    NEVER = "taken on trust: nobody else can know it"  # taken as it is


def row(how: How, path: str, keys: str) -> dict[str, How]:
    """Return the keys below a path, as words, each with how it is checked."""
    return {f"{path}.{key}" if path else key: how for key in keys.split()}


KEYS: Mapping[str, How] = {
    **row(
        How.ALWAYS, "", "schema verdict proof family target train_mode model_class padding older attention next command"
    ),
    **row(How.ALWAYS, "", "max_kl inexact.site inexact.exponent"),
    **row(How.ALWAYS, "outputs", "factor_log2"),
    **row(How.BOTH, "outputs", "error error_bf16"),
    **row(How.ALWAYS, "tiers", "holds proof runtimes reason"),
    **row(How.ALWAYS, "output", "files.name files.nbytes files.sha256 card_edited"),
    **row(How.ALWAYS, "source", "adapter"),
    **row(How.ORIGINAL, "source", "sha256 other_sha256 dtype dtypes made dropped config_changes"),
    **row(How.ORIGINAL, "source", "carried_over left_out side_dtypes card replaced.values replaced.sha256"),
    **row(How.NEVER, "source", "path subfolder revision"),
    **row(How.RUN, "inputs", "seed sha256 batches.kind batches.batches batches.rows"),
    **row(How.RUN, "inputs", "batches.encoder batches.decoder"),
    **row(How.BESIDE, "inputs", "data.name data.rows"),
    **row(How.BOTH, "inputs", "chosen"),
    **row(How.RUN, "regimes", "nonfinite saturated amax headroom_bits nonfinite_logits same_as"),
    **row(How.RUN, "regimes", "underflow.name underflow.amax runs.attention runs.batches runs.kinds"),
    **row(How.RUN, "regimes", "gradients.loss_scale"),
    **row(How.NEVER, "regimes", "gradients.flushed gradients.largest.name gradients.largest.amax"),
    **row(How.NEVER, "regimes", "gradients.largest.flushed"),
    **row(How.NEVER, "regimes.gradients.sites", "name amax flushed"),
    **row(
        How.RUN, "regimes.sites", "name stack block role amax limit headroom_bits nonfinite saturated benign dtype fp32"
    ),
    **row(How.ALWAYS, "certificate", "holds headroom_bits max_length splits train_mode"),
    **row(
        How.ALWAYS, "certificate.sites", "name kind stack block role bound partial limit headroom_bits observed holds"
    ),
    **row(How.NEVER, "certificate", "cost_bits"),
    **row(How.ALWAYS, "uncertified", "name bound limit excess_bits reason remedy"),
    **row(How.NEVER, "inexact", "predicted"),
    **row(How.BOTH, "inexact", "measured"),
    **row(How.NEVER, "attack", "steps seed worst_headroom_bits median_gain"),
    **row(How.NEVER, "attack.sites", "name worst random tokens embeddings half covered limit headroom_bits gain ids"),
    **row(How.BOTH, "fidelity", "measure kl_bf16 kl_fp16 kl_fp32 squared_error_fp32 max_logit_error_bf16"),
    **row(How.BOTH, "fidelity", "max_logit_error_fp16 top1_bf16 top1_fp16 positions reference"),
    **row(How.ORIGINAL, "weights", "elements lossless_fraction normal_fraction flushed_to_zero nonfinite amax"),
    **row(How.ALWAYS, "plan", "family untied_head eps eps_held"),
    **row(How.ORIGINAL, "plan", "residual_exponent exponents gain_correction centred_keys"),
    **row(How.BOTH, "plan.drift", "predicted_kl predicted_max_logit_error measured_kl measured_max_logit_error"),
    **row(How.NEVER, "plan", "drift.relative_error margin_bits"),
    **row(How.BOTH, "signals", "module stack block role side kind before after"),
    **row(How.BOTH, "precision", "module stack block role bits"),
    **row(How.ALWAYS, "unsafe", "signal kind regimes nonfinite saturated excess_bits reason remedy"),
    **row(How.NEVER, "close", "signal kind regimes nonfinite saturated excess_bits reason remedy"),
    **row(How.NEVER, "finetune", "recipe settled data processes devices steps tokens skipped rewinds"),
    **row(How.NEVER, "finetune", "evaluations curves kept next start_outputs"),
    **row(How.NEVER, "finetune.fidelity", "measure kl_bf16 kl_fp16 kl_fp32 squared_error_fp32 max_logit_error_bf16"),
    **row(How.NEVER, "finetune.fidelity", "max_logit_error_fp16 top1_bf16 top1_fp16 positions reference"),
    **row(How.NEVER, "environment", "versions python device devices dtype"),
}
"""How each key is checked, by its dotted name; those of lists' entries and of what goes by names without these."""


def not_checked(report: Report, *, ran: bool, original: bool, same_text: bool) -> dict[str, str]:
    """Return the keys of a report that hold something and were not checked, with the reason, those below one key drawn
    together where none of them was.

    ran: whether the checkpoint was run. original: whether it was made from the original again. same_text: whether what
    was run is what the report says.
    """
    done = {How.ALWAYS} | ({How.ORIGINAL} if original else set())
    if ran and same_text:
        done |= {How.RUN, How.BESIDE} | ({How.BOTH} if original else set())
    data = dump(report)
    result: dict[str, str] = {}
    for key, how in KEYS.items():
        if how not in done and holds(data, key):
            other_text = ran and not same_text and how in (How.RUN, How.BOTH)
            first = key.partition(".")[0]
            alike = {KEYS[other] for other in KEYS if other.partition(".")[0] == first}
            missing = How.BESIDE if other_text else How.ORIGINAL if ran and how is How.BOTH else how
            result[first if len(alike) == 1 else key] = missing.value
    if report.finetune is not None:
        trained = "follows from weights that were trained, which nobody else has"
        result |= dict.fromkeys((k for k, v in result.items() if v in (How.ORIGINAL.value, How.BOTH.value)), trained)
    return result


def holds(data: Any, key: str) -> bool:
    """Return whether a report says anything under a dotted key, in any entry of a list or of what goes by names."""
    if is_table(data):
        return any(holds(entry, key) for entry in data)
    if not key:
        return data is not None  # an empty list says that there is none
    if not isinstance(data, Mapping):
        return False
    name, _, rest = key.partition(".")
    if name in data:
        return holds(data[name], rest)
    return any(holds(entry, key) for entry in data.values() if isinstance(entry, Mapping))
