"""The layouts that ``convert`` can write: a stock folder, or one file for a tool, with all that is known of each.

The command line reads the names before anything heavy is imported, so nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .naming import STOCK, TOKENIZER_WITH_WEIGHTS, WAN, WAN_MODELS, Naming

FOLDER_LAYOUT = "hf"  # a folder of stock names, the only layout that is not one file


@dataclass(frozen=True)
class FileLayout:
    """A layout of one file: how its tensors are named, and who reads it, as a card says. ``tool``: the tool that has a
    T5 of its own for it. ``eps``: of that tool's norms, which no file can change. ``models``: the model types, with
    their titles, that it has a class for; None for all. ``tokenizers``: those whose tokenizer it takes from the file of
    weights."""

    name: str
    naming: Naming
    readers: str
    tool: str | None = None
    eps: float | None = None
    models: Mapping[str, str] | None = None
    tokenizers: tuple[str, ...] = ()


LAYOUTS: Mapping[str, FileLayout] = {
    layout.name: layout
    for layout in (
        FileLayout("comfy", STOCK, "ComfyUI, Forge", "ComfyUI", 1e-6, tokenizers=TOKENIZER_WITH_WEIGHTS),
        FileLayout("wan", WAN, "Wan's tools", "Wan", 1e-6, models=WAN_MODELS),
        FileLayout("single", STOCK, "any tool, stock names"),
    )
}
"""The layouts of one file, by the names that ``--layout`` has for them."""

LAYOUT_NAMES = (FOLDER_LAYOUT, *LAYOUTS)  # what ``--layout`` takes
