"""What stands behind the encoder in a folder of sentence-transformers: pooling, linears, normalisation.

``modules.json`` lists the modules in the order in which they run, each with a class and a sub-folder
(https://sbert.net/docs/package_reference). Their weights are in files of their own, safetensors or a pickle, in fp32
whatever the encoder is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from ..errors import UserError
from ..json_text import loads
from .folder import MODULES, side_modules
from .formats import SAFETENSORS_DTYPES, read_json
from .reader import collect, read_range, weight_files
from .shards import WEIGHTS

DENSE, POOLING, NORMALIZE = "Dense", "Pooling", "Normalize"
"""Classes of modules about which something is known."""


WITH_WEIGHTS = (DENSE, "LayerNorm")
"""Classes whose weights are written in fp16; what others have stays as it is."""


MODES = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
"""The ways to pool, in the order in which their results are joined, with the switch of each in an older config."""


VECTOR = "sentence_embedding"
"""What modules call the vector that they hand on, unless a linear's config says otherwise."""


@dataclass(frozen=True)
class SideModule:
    """One module behind the encoder: its sub-folder, the last part of its class's name, its config and its tensors."""

    name: str
    kind: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def modes(self) -> list[str]:
        """How a pooling pools, by name; a module that is none gives the mean."""
        chosen = self.config.get("pooling_mode")
        if chosen is None:
            chosen = [mode for mode, switch in MODES.items() if self.config.get(switch)] or ["mean"]
        return [chosen] if isinstance(chosen, str) else [str(mode) for mode in chosen]

    @property
    def activation(self) -> str:
        """The class of a linear's activation, by the last part of its name; none is the identity."""
        return str(self.config.get("activation_function") or "Identity").rpartition(".")[2]

    @property
    def is_aside(self) -> bool:
        """Whether it reads or gives anything but the sentence's vector, so that what follows does not read it alone."""
        return any(self.config.get(f"module_{end}_name") not in (None, VECTOR) for end in ("input", "output"))


def read_side_modules(folder: Path) -> list[SideModule]:
    """Return the modules behind the encoder in the order in which they run, with their tensors in the files' dtypes;
    none where there is no ``modules.json``.

    Raises UserError for a listing, config or weights that cannot be read.
    """
    if not side_modules(folder):
        return []
    listing = loads((folder / MODULES).read_text(encoding="utf-8"))
    found = []
    for entry in listing:
        place = folder / str(entry["path"])
        if not entry["path"]:
            continue
        described = place / "config.json"
        config = read_json(described, "config") if described.is_file() else {}
        kind = str(entry.get("type", "")).rpartition(".")[2]
        found.append(SideModule(place.name, kind, config, read_tensors(place) if kind in WITH_WEIGHTS else {}))
    return found


def read_tensors(place: Path) -> dict[str, Tensor]:
    """Return the tensors of a side module; raise UserError where its files are damaged."""
    files, index = weight_files(place)
    return {name: read_range(info, info.shape, 0) for name, info in collect(files, index, place).items()}


def write_in_fp16(folder: Path, out: Path) -> dict[str, str]:
    """Write the floating tensors of the side modules of ``folder`` in fp16 below ``out``, where their other files are,
    and return the dtypes that they had, in safetensors' spelling, by sub-folder and name.

    Raises UserError for one that fp16 cannot hold.
    """
    return rewritten(folder, out, lambda _, __: "F16")


def write_back(folder: Path, out: Path, dtypes: Mapping[str, str]) -> None:
    """Write the tensors of the side modules of a converted ``folder`` in the dtypes that ``write_in_fp16`` returned."""
    rewritten(folder, out, lambda name, own: dtypes.get(name, own))


def rewritten(folder: Path, out: Path, wanted: Any) -> dict[str, str]:
    """Write every floating tensor in the dtype that ``wanted(name, dtype)`` says; return those that changed, with the
    dtype that they had."""
    spelling = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
    changed: dict[str, str] = {}
    for module in read_side_modules(folder):
        tensors = {}
        for name, tensor in module.tensors.items():
            full, own = f"{module.name}/{name}", spelling[tensor.dtype]
            dtype = SAFETENSORS_DTYPES[wanted(full, own)] if tensor.is_floating_point() else tensor.dtype
            tensors[name] = tensor.to(dtype).contiguous()
            if not bool(tensors[name].isfinite().all()):
                raise UserError(
                    f"{folder / module.name}: {name} has weights up to {float(tensor.abs().max()):.3g} or not finite,"
                    " which fp16 cannot hold; use another revision of the checkpoint"
                )
            if dtype != tensor.dtype:
                changed[full] = own
        if tensors:
            place = out / module.name
            for old in (*place.glob("*.bin"), *place.glob("*.safetensors"), *place.glob("*.index.json")):
                old.unlink()
            (place / WEIGHTS).write_bytes(save(tensors, {"format": "pt"}))
    return changed
