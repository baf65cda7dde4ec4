"""The modules that follow the encoder in a folder of sentence-transformers, run by that package if it is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..checkpoint.contents import check_sentence_encoder, listed_modules
from ..errors import UserError


class SentenceVectors(nn.Module):
    def __init__(self, folder: Path) -> None:
        from sentence_transformers.util import import_from_string

        super().__init__()
        check_sentence_encoder(folder)  # no class but the package's own is loaded
        self.order = []
        for entry in listed_modules(folder)[1:]:
            place = folder / str(entry["path"])
            self.order.append(place.name)
            try:
                kind: Any = import_from_string(str(entry["type"]))
                self.add_module(place.name, kind.load(str(place)))
            except Exception as error:  # for damage of every kind
                raise unusable(place, error) from error

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        seen = mask.bool().any(1)  # a row without any position has no vector
        features = {"token_embeddings": states[seen], "attention_mask": mask[seen]}
        for name in self.order:
            try:
                features = self.get_submodule(name)(features)
            except RuntimeError as error:
                raise unusable(Path(name), error) from error
        return features["sentence_embedding"]


def unusable(place: Path, error: Exception) -> UserError:
    problem = next(iter(str(error).splitlines()), type(error).__name__)
    return UserError(f"{place}: sentence-transformers cannot run it ({problem}); fetch the whole checkpoint again")


def runs_behind(folder: Path) -> bool:
    return bool(listed_modules(folder)[1:]) and find_spec("sentence_transformers") is not None
