"""The layouts that ``convert`` writes: a folder, or one file. Wan's code has an eps in fp32 that no file can change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UserError
from .naming import STOCK, WAN, Naming

FOLDER_LAYOUT = "hf"  # a folder with stock names; every other layout is one file


@dataclass(frozen=True)
class FileLayout:
    """A one-file layout. ``model_type``, ``eps``, ``activation``: fixed in its reader, None for stock code."""

    name: str
    readers: str
    naming: Naming = STOCK
    model_type: str | None = None
    eps: float | None = None
    activation: str = ""

    def check_model(self, model_type: object, where: str) -> None:
        if self.model_type not in (None, model_type):
            raise UserError(
                f"{where}: {self.readers} read the encoder of {self.model_type}, and this is {model_type!r}; leave out"
                " --layout, and give --eps fixed if its reader has an eps of its own"
            )


LAYOUTS: Mapping[str, FileLayout] = {
    "wan": FileLayout("wan", "Wan's tools", WAN, "umt5", 1e-6, "gelu_new"),
    "single": FileLayout("single", "any tool, stock names"),
}

LAYOUT_NAMES = (FOLDER_LAYOUT, *LAYOUTS)  # values of ``--layout``
