"""The layouts that ``convert`` writes: a folder, or one file with stock names or with those of Wan's own code.

Wan's code computes UMT5's encoder with a class of its own, whose norms are fp32 with an eps that no file can change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UserError
from .naming import STOCK, WAN, Naming

FOLDER_LAYOUT = "hf"  # a folder of stock names, the only layout that is not one file


@dataclass(frozen=True)
class FileLayout:
    """A layout of one file, and who reads it, as a card says.

    Of a tool with a class of its own: the ``model_type`` of the encoders that it computes, how it names their tensors,
    the ``eps`` of its norms, and its ``activation``, by stock names.
    """

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
"""The layouts of one file, by the names that ``--layout`` has for them."""

LAYOUT_NAMES = (FOLDER_LAYOUT, *LAYOUTS)  # what ``--layout`` takes
