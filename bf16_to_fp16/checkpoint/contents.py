"""Find the config and the weight files that stock code would read in a checkpoint's folder. Also check the modules that
sentence-transformers runs after an encoder (https://sbert.net/docs/package_reference). Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from .files import read_json
from .sources import RESTORE, check_not_gguf, contained, leaves, shown

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

SINGLE_OR_SHARDED = (WEIGHTS, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files in which stock code looks for weights; it takes the first that exists."""


def read_config(folder: Path) -> dict[str, Any]:
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"{folder} is an adapter (adapter_config.json);"
            " merge it into its base model with peft's merge_and_unload and give the result"
        )
    file = folder / "config.json"
    if not file.exists():
        if (folder / "model_index.json").exists():
            models = sorted(path.parent.name for path in folder.glob("*/config.json"))
            names = " or ".join([name for name in models if "text_encoder" in name] or models) or "its folder"
            raise UserError(f"{folder} is a pipeline of several models; name one with --subfolder: {names}")
        check_not_gguf(weights_in(folder))
        files = sorted(folder.glob("*.safetensors"))
        alone = f", or its file alone: {files[0]}" if len(files) == 1 else ""
        raise UserError(
            f"{folder}: no config.json; give the folder of a checkpoint, or --subfolder for one below it{alone}"
        )
    config = read_json(contained(folder, "config.json"), "config")
    if config.get("quantization_config"):
        raise UserError(
            f"{file}: the checkpoint is quantised (quantization_config); give the one it was quantised from"
        )
    if config.get("auto_map"):
        raise UserError(
            f"{file}: the model runs code of its own (auto_map), which this program does not know;"
            " give a checkpoint of a transformers class"
        )
    return config


def weights_in(folder: Path) -> list[Path]:
    endings = (".safetensors", ".bin", ".h5", ".msgpack", ".gguf", ".ckpt", ".pt", ".ot")
    return sorted(file for file in folder.iterdir() if file.name.endswith(endings))


def weight_files(folder: Path) -> tuple[tuple[Path, ...], dict[str, Any] | None]:
    """Return the weight files that stock code would read in a folder, and the content of their index. The latter is
    None for a single file. Raises UserError if no such files are there or the index is damaged."""
    weights = next((name for name in SINGLE_OR_SHARDED if (folder / name).exists()), None)
    if weights is None:
        check_not_gguf(weights_in(folder))
        others = [file.name for file in weights_in(folder)]
        if (variant := next((n for n in others if re.fullmatch(r"model\.[^.]+\.safetensors", n)), None)) is not None:
            raise UserError(f"{folder}: has its weights only as a variant; rename {variant} to model.safetensors")
        hint = f" (it has {', '.join(others[:3])})" if others else ""
        raise UserError(
            f"{folder}: no model.safetensors, pytorch_model.bin or index of shards{hint};"
            " load and save the model with transformers to get one"
        )
    if not weights.endswith(".index.json"):
        return (contained(folder, weights),), None
    index = read_json(contained(folder, weights), "index")
    placed = index.get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise UserError(f"{folder / weights}: no weight_map; {RESTORE}")
    for name, shard in placed.items():
        if not isinstance(shard, str):
            raise UserError(f"{folder / weights}: weight_map has no file name for {shown(name)}; {RESTORE}")
    return tuple(contained(folder, shard) for shard in sorted(set(placed.values()))), index


def is_converted(folder: Path) -> bool:
    return (Path(folder) / "fp16_report.json").is_file()


MODULES = "modules.json"  # the file in which sentence-transformers lists the modules of a folder


def listed_modules(source: Path) -> list[Mapping[str, Any]]:
    listing = source / MODULES
    if not listing.is_file():
        return []
    try:
        listed = list(json.loads(listing.read_text(encoding="utf-8")))
        kinds = {str(m["path"]): str(m.get("type", "")).rpartition(".")[2] for m in listed if m["path"]}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{listing}: not a list of modules with paths; restore it from the original checkpoint"
        ) from error
    for name, kind in sorted(kinds.items()):
        if leaves(name) or len(Path(name).parts) != 1:
            raise UserError(
                f"{listing}: module path {name!r} is not the name of a folder; restore it from the original checkpoint"
            )
        if not (source / name).is_dir() and kind != "Normalize":  # which has no files
            raise UserError(f"{listing}: the folder of module {name!r} is not in {source}; fetch the whole checkpoint")
    return listed


def side_modules(source: Path) -> set[str]:
    # The path may be ./1_Pooling or 1_Pooling/.
    return {Path(str(entry["path"])).name for entry in listed_modules(source) if entry["path"]}


KNOWN_MODULES = ("Dense", "Dropout", "LayerNorm", "Normalize", "Pooling")
"""Modules that read only the encoder's last hidden states, or the output of another such module."""

ENCODER, NAMESPACE = "Transformer", "sentence_transformers."


def check_sentence_encoder(folder: Path) -> None:
    """Raise UserError unless ``modules.json``, if any, lists the encoder first and then only ``KNOWN_MODULES``."""
    for i, entry in enumerate(listed_modules(folder)):
        path, kind = str(entry["path"]), str(entry.get("type", ""))
        name, is_below = kind.rpartition(".")[2], bool(path.rstrip("/."))
        known = is_below and name in KNOWN_MODULES if i else not is_below and name == ENCODER
        if not known or not kind.startswith(NAMESPACE):
            wanted = f"{', '.join(KNOWN_MODULES)} in its own folder" if i else f"{ENCODER} in the folder itself"
            raise UserError(
                f"{folder / MODULES}: module {i} is {kind or 'no class'!r} in {path or '.'!r}, but only"
                f" sentence-transformers' {wanted} can be converted; remove {MODULES} to convert the encoder alone"
            )
