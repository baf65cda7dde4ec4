"""The variant fp16 of weights: ``model.fp16.safetensors``, which ``from_pretrained(variant="fp16")`` loads."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path

from .contents import INDEX, WEIGHTS
from .folder import copy

NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}

VARIANT = "fp16"


def variant_of(name: str) -> str | None:
    pieces = re.sub(r"-\d+-of-\d+", "", name).split(".")[1:]
    return next((piece for piece in pieces if piece not in ("safetensors", "bin", "index", "json")), None)


def variant_name(name: str) -> str:
    if name == INDEX:
        return f"{INDEX.removesuffix('.json')}.{VARIANT}.json"
    stem, shard = re.match(r"([^.-]+)(-\d+-of-\d+)?", name).groups("")  # type: ignore[union-attr]
    return f"{stem}.{VARIANT}{shard}.safetensors"


def has_variant(names: Iterable[str], folder: str = "") -> bool:
    own = (name.removeprefix(f"{folder}/") for name in names if not folder or name.startswith(f"{folder}/"))
    return any(variant_of(n) == VARIANT for n in own if n.startswith("model") and n.endswith(".safetensors"))


def linked_to(file: Path, place: Path) -> bool:
    try:
        os.link(file.resolve(), place)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        return False
    return True


def name_variants(folder: Path) -> list[str]:
    """Link the weights in a folder, and their index, under the names of the variant fp16; return these names."""
    names = []
    for path in sorted((*folder.glob("model-*-of-*.safetensors"), *folder.glob(WEIGHTS))):
        names.append(variant_name(path.name))
        if not linked_to(path, folder / names[-1]):
            copy(path, folder / names[-1], folder)
    if (folder / INDEX).is_file():
        names.append(variant_name(INDEX))
        text = (folder / INDEX).read_text(encoding="utf-8")
        renamed = re.sub(r'"(model-\d+-of-\d+\.safetensors)"', lambda m: f'"{variant_name(m[1])}"', text)
        (folder / names[-1]).write_text(renamed, encoding="utf-8", newline="\n")
    return names
