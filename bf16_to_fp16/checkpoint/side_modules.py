"""Check a sentence-transformers folder: ``modules.json`` and the configs beside it. A module that reads more than the
encoder's last states is refused (https://sbert.net/docs/package_reference)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from .contents import MODULES, listed_modules
from .files import nested_value, read_json

KNOWN = ("Dense", "Dropout", "LayerNorm", "Normalize", "Pooling")
"""Modules that read only the encoder's last states, or another such module's output."""

ENCODER, NAMESPACE = "Transformer", "sentence_transformers."

WHOLE_CONFIG, WHOLE = "config_sentence_transformers.json", "SentenceTransformer"

ENCODER_CONFIGS = tuple(  # configs of how the encoder is loaded; the first that is not empty counts
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)

PASSED_ON = ("config_args", "config_kwargs", "model_args", "model_kwargs")  # keys for the encoder's config or loading

HARMLESS = ("trust_remote_code", "use_cache")  # keyword arguments that change neither weights nor results

READ = {  # keys that choose the method and the output read, with the values that mean the last states
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
    "method": ("forward",),
    "method_output_name": ("last_hidden_state", ["last_hidden_state"]),
}


def check_sentence_encoder(folder: Path) -> None:
    """Raise UserError unless the encoder runs as its config.json says and other modules read only its last states."""
    entries = listed_modules(folder)
    if not (folder / MODULES).is_file():
        return
    listed = [(str(entry["path"]), str(entry.get("type", ""))) for entry in entries]
    names = [entry["name"] for entry in entries if "name" in entry]
    for again in (name for i, name in enumerate(names) if name in names[:i]):
        raise UserError(
            f"{folder / MODULES}: two modules have the name {again!r}, and sentence-transformers runs the second"
            " in the place of the first; give each a name of its own"
        )
    for i, (path, kind) in enumerate(listed):
        name, is_below = kind.rpartition(".")[2], bool(path.rstrip("/."))
        known = is_below and name in KNOWN if i else not is_below and name == ENCODER
        if not known or not kind.startswith(NAMESPACE):
            raise UserError(
                f"{folder / MODULES}: {kind or 'no class'!r} in {path or '.'!r} is not known: the first module must be"
                f" sentence-transformers' {ENCODER} in the folder itself, and the others {', '.join(KNOWN)}, each in a"
                f" folder of its own; convert the encoder alone, without {MODULES}"
            )
    whole = folder / WHOLE_CONFIG
    kind = read_json(whole, "config").get("model_type", WHOLE) if whole.is_file() else WHOLE
    if kind != WHOLE:
        raise UserError(
            f"{whole}: 'model_type' is {kind!r}, of which a {WHOLE} makes modules of its own; convert the encoder"
            f" alone, without {MODULES}"
        )
    check_encoder_config(*encoder_config(folder))


def encoder_config(folder: Path) -> tuple[Path, dict[str, Any]]:
    for name in ENCODER_CONFIGS:
        config = read_json(folder / name, "config") if (folder / name).is_file() else {}
        if config:
            return folder / name, config
    return folder / ENCODER_CONFIGS[0], {}


def check_encoder_config(file: Path, config: Mapping[str, Any]) -> None:
    text = nested_value(config, "modality_config", "text")
    chosen = [*config.items(), *(text.items() if isinstance(text, Mapping) else ())]
    for key, value in chosen:
        if key in READ and value is not None and value not in READ[key]:
            raise UserError(
                f"{file}: {key!r} is {value!r}, and only the encoder's last states keep their values,"
                f" {READ[key][0]!r}; remove the key if the vectors are made of those"
            )
    for key in PASSED_ON:
        passed = config.get(key) or {}
        changing = [passed] if not isinstance(passed, Mapping) else sorted(set(passed) - {*HARMLESS})
        if changing:
            raise UserError(
                f"{file}: {key!r} has {changing[0]!r}, which sentence-transformers gives to the encoder over what"
                " config.json says; write it into config.json, and remove it here"
            )
