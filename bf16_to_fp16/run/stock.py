"""Stock models: the class that a config names, loaded from a folder with no remote code and no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..errors import UserError, first_line
from ..families.known import family_of, may_be_absent, stock_class


def load_config(folder: Path) -> Any:
    """Return the transformers configuration in ``folder``; ``UserError`` where it is unusable or of no known class."""
    import transformers

    if not (Path(folder) / "config.json").is_file():
        raise UserError(f"{folder}: no config.json; give the folder of a checkpoint")
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each field has its own validation, with exceptions of its own
        raise UserError(f"{folder}/config.json: {' '.join(str(error).split())}; mend the file") from error
    try:
        stock_class(config.to_dict())
    except UserError as error:
        raise UserError(f"{folder}/{error}") from None
    for key in ("decoder_start_token_id", "pad_token_id"):
        token = getattr(config, key, None)
        if token is not None and not (isinstance(token, int) and 0 <= token < config.vocab_size):
            raise UserError(
                f"{folder}/config.json: {key} is {token!r}, not an id of the vocabulary of {config.vocab_size};"
                " take it from the original config.json"
            )
    return config


def load(folder: Path, dtype: torch.dtype, *, half: bool = False, attention: str = "eager") -> Any:
    """Return the stock model in ``folder`` as ``from_pretrained(dtype=dtype)`` loads it, in eval mode on the CPU.

    With ``half`` every parameter is then cast to fp16 (stock keeps T5's ``wo`` in fp32). Nothing is fetched and
    no remote code runs. Raises ``UserError`` where files cannot be read or a tensor is missing (stock fills it
    at random).
    """
    import transformers

    config = load_config(folder).to_dict()
    name = stock_class(config)
    try:
        model, info = getattr(transformers, name).from_pretrained(
            str(folder),
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # safetensors, pickle and transformers each raise their own kinds
        raise UserError(f"{folder}: cannot be loaded ({first_line(error)}); check its files") from error
    missing = sorted(set(info["missing_keys"]) - may_be_absent(family_of(config)))
    if missing:
        raise UserError(
            f"{folder}: tensor {missing[0]} is missing, and stock code would fill it at random; complete the checkpoint"
        )
    return model.half().eval() if half else model.eval()


def eps_attribute(norm: torch.nn.Module) -> str:
    """Return the name under which a norm keeps its eps: torch's and apex's have another than those of transformers."""
    return "eps" if hasattr(norm, "eps") else "variance_epsilon"
