"""Read a checkpoint as another transformers class of its family does: the same weights under that class's names."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from ..checkpoint.folder import carry_over, tokenizer_beside
from ..checkpoint.naming import names_in_files
from ..checkpoint.reader import VIEWS, Checkpoint
from ..checkpoint.single_file import SCRATCH
from ..json_text import write_json
from .from_config import in_folder
from .known import architectures, class_by_tensor_names, class_of, family_of, naming_class
from .llama import STACK


def read_as(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """Return a view of a checkpoint for the transformers class ``name``; the checkpoint itself if that is its class."""
    with in_folder(checkpoint.source):
        config = naming_class(checkpoint.config, name)
    if name in architectures(checkpoint.config)[:1]:
        return checkpoint
    names = names_under(checkpoint.config, checkpoint.tensors, name)
    tensors = {names[n]: info for n, info in checkpoint.tensors.items()}
    stored = names_in_files(checkpoint.stored_names.values(), str(checkpoint.name), [name])
    SCRATCH.append(tempfile.TemporaryDirectory(prefix="bf16-to-fp16-"))
    view = Path(SCRATCH[-1].name).resolve()
    carry_over(checkpoint.folder, view, tokenizer=tokenizer_beside(checkpoint.folder, checkpoint.subfolder))
    write_json(view / "config.json", config)
    VIEWS[view] = replace(
        checkpoint,
        folder=view,
        own_folder=checkpoint.folder,
        config=config,
        tensors=dict(sorted(tensors.items())),
        stored_names=stored,
    )
    return VIEWS[view]


def names_under(config: Mapping[str, object], tensors: Collection[str], name: str) -> dict[str, str]:
    config = {**config, "architectures": [name]}
    family, stock, other = family_of(config), class_of(config), class_by_tensor_names(config, tensors)
    if other is None:
        return {each: each for each in tensors}
    around = (body.removesuffix(STACK).rstrip(".") for body in (other.body, stock.body))  # an image tower moves too
    before, after = (f"{body}." if body else "" for body in around)
    inside = {each for each in tensors if each.startswith(before) and each != family.head}
    return {each: after + each.removeprefix(before) if each in inside else each for each in tensors}


def headless(config: Mapping[str, object]) -> str | None:
    """Return the name of the class without a head that ``AutoModel`` loads for a causal model's config, or None."""
    family, own = family_of(config), architectures(config)[:1]
    stock = next((each for each in family.classes if own and own[0] in each.names), None)
    if stock is None or not stock.is_language_model or stock.decodes:
        return None
    return family.giving_states(decodes=False)
