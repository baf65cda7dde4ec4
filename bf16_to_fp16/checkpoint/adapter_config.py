"""Check a PEFT adapter's files, and whether it is for the original or the converted checkpoint. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import UserError
from .files import read_json
from .recorded import recorded

CONFIG, TENSORS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
NOTE = "fp16_adapter.json"  # in a converted adapter's folder, the checkpoint that it is for; PEFT ignores the file

OTHER_FORMS = (  # config keys of adapters that do something else than add B·A to a named weight
    *("arrow_config", "ensure_weight_tying", "kasa_config", "layer_replication", "megatron_config"),
    *("monteclora_config", "target_parameters", "use_bdlora", "use_dora", "use_qalora", "velora_config"),
)


def adapter_config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder}: no {CONFIG}; give the folder of an adapter, as PEFT's save_pretrained writes it")
    config = read_json(folder / CONFIG, "config")
    if (kind := config.get("peft_type")) != "LORA":
        raise UserError(f"{folder / CONFIG}: peft_type is {kind!r}; only LoRA adapters can be rescaled")
    used = [key for key in OTHER_FORMS if config.get(key)]
    if used:
        raise UserError(f"{folder / CONFIG}: {used[0]} does more than add B·A to a weight; train plain LoRA")
    begun = config.get("init_lora_weights", True)
    if begun not in (True, False, "gaussian", "orthogonal", "eva"):  # these change no weights
        raise UserError(
            f"{folder / CONFIG}: init_lora_weights {begun!r} changes the checkpoint's weights, too; save the adapter"
            " with path_initial_model_for_weight_conversion, which makes it plain LoRA"
        )
    if not (folder / TENSORS).is_file():
        words = f"no {TENSORS}; save the adapter with save_pretrained"
        if (folder / PICKLE).is_file():
            words = f"{PICKLE} is a pickle, which is not read; load it with peft and save it as {TENSORS}"
        raise UserError(f"{folder}: {words}")
    return config


def config_for(adapter: Path, base: Path, *, back: bool) -> dict[str, Any]:
    """Return an adapter's config for the converted checkpoint ``base`` or, if ``back``, for its original. Raises
    UserError if the adapter is for that checkpoint already, or cannot be rescaled."""
    origin, config = recorded(base)["source"], adapter_config(adapter)
    side, name = "original" if back else "converted", config.get("base_model_name_or_path")
    there = same_place(name, origin.get("path")) if back else same_place(name, base)
    if (adapter / NOTE).is_file():
        there = read_json(adapter / NOTE, "note").get("for") == side
    if there:
        command, other = ("convert", "converted") if back else ("undo", "original")
        raise UserError(f"{adapter} is for the {side} checkpoint already; to fit it to the {other} one, use {command}")
    return config


def same_place(one: object, other: object) -> bool:
    if not one or not other:
        return False
    a, b = Path(str(one)), Path(str(other))
    return str(one) == str(other) or (a.exists() and b.exists() and a.resolve() == b.resolve())
