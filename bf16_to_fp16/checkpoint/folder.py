"""Copy a checkpoint's files other than its weights. Weights in other formats stay behind: they are not converted."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Collection
from pathlib import Path

from ..errors import UserError
from .contents import side_modules
from .files import FULL_OR_FAILING, sha256_of
from .sources import contained

OTHER_WEIGHTS = (  # endings of weight files and indexes, which are never copied
    *(".safetensors", ".bin", ".h5", ".msgpack", ".ot", ".onnx", ".pt"),
    *(".pth", ".ckpt", ".gguf", ".npz", ".tflite", ".index.json"),
)

CODE = (  # endings of files that run, or that run code when they are read
    *(".py", ".pyc", ".pyd", ".pyw", ".so", ".dll", ".dylib", ".exe", ".sh"),
    *(".bat", ".cmd", ".ps1", ".ipynb", ".pkl", ".pickle", ".joblib", ".dill"),
)

OWN_FILES = ("config.json", "README.md", "fp16_report.json", "fp16_report.html", ".gitattributes")

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "spiece.model", "sentencepiece.bpe.model"),
    *("tokenizer.model", "vocab.json"),
)

TEMPLATES = "additional_chat_templates"  # a tokenizer's folder


def carry_over(
    source: Path, target: Path, *, tokenizer: Path | None = None, back: bool = False
) -> tuple[list[str], list[str]]:
    """Copy the files of ``source`` that are neither weights nor code; return the names of those copied and those left
    out. ``OWN_FILES``, which a conversion writes itself, are skipped. The model card is renamed to
    ``SOURCE_README.md``. back: rename it to ``README.md`` again. tokenizer: the tokenizer's folder, if elsewhere."""
    carried, left_out = [], []
    folders = {*side_modules(source), TEMPLATES}
    renamed = {"SOURCE_README.md": "README.md"} if back else {"README.md": "SOURCE_README.md"}
    for entry in sorted(source.iterdir()):
        if entry.is_dir():
            if entry.name in folders:
                for path in sorted(p for p in entry.rglob("*") if not p.is_dir()):
                    if is_code(path.name):
                        left_out.append(path.relative_to(source).as_posix())
                    else:
                        copy(path, target / path.relative_to(source), source)
                carried.append(f"{entry.name}/")
            elif not entry.name.startswith("."):
                left_out.append(f"{entry.name}/")
        elif entry.name in renamed:
            copy(entry, target / renamed[entry.name], source)
            carried.append(entry.name)
        elif entry.name in OWN_FILES:
            continue
        elif is_weights(entry.name) or is_code(entry.name) or entry.name.casefold() in (*OWN_FILES, "readme.md"):
            left_out.append(entry.name)
        else:
            copy(entry, target / entry.name, source)
            carried.append(entry.name)
    if tokenizer is not None and tokenizer.is_dir():
        for entry in sorted(tokenizer.iterdir()):
            ours = (target / entry.name).exists() or entry.name in OWN_FILES or is_code(entry.name)
            if entry.is_file() and not ours:
                copy(entry, target / entry.name, tokenizer)
                carried.append(entry.name)
    return carried, left_out


def is_weights(name: str) -> bool:
    name = name.casefold()
    return name.endswith(OTHER_WEIGHTS) or (".index." in name and name.endswith(".json"))


def is_code(name: str) -> bool:
    return name.casefold().endswith(CODE)


def copy(file: Path, place: Path, folder: Path) -> None:
    """Copy a file of ``folder`` to ``place``. Raises UserError for a link to a file outside, which may be private."""
    contained(folder, file.relative_to(folder).as_posix())
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if not file.is_file():
            raise OSError(errno.EINVAL, "not a regular file" if file.exists() else "a link to nowhere")
        shutil.copyfile(file, place)
    except OSError as error:
        if error.errno in FULL_OR_FAILING:
            raise
        raise UserError(f"{file}: {error.strerror or error}; restore it from the original checkpoint") from error


def records(folder: Path, known: Collection[str] = ()) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in known:
            entries.append({"name": name, "nbytes": path.stat().st_size, "sha256": sha256_of(path)})
    return entries


def tokenizer_beside(folder: Path, subfolder: str | None) -> Path | None:
    """Return the tokenizer folder of a diffusers text encoder, such as ``tokenizer_2``; None for another subfolder."""
    if subfolder is None or "text_encoder" not in subfolder:
        return None
    return folder.parent / folder.name.replace("text_encoder", "tokenizer")


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def check_tokenizer(*folders: Path | None) -> None:
    if not any(folder is not None and has_tokenizer(folder) for folder in folders):
        # Without them stock code makes an empty tokenizer, which turns every text into unknown tokens.
        raise UserError(f"{folders[0]}: no tokenizer files, and text needs them; put the original's tokenizer there")


def converted_already(source: Path) -> UserError:
    if source.is_file():
        return UserError(f"{source} is converted already, as its metadata show; give the source that it was made from")
    return UserError(
        f"{source} is converted already, as its report shows; get its source with bf16-to-fp16 undo, check it with"
        " verify, or train it with finetune"
    )
