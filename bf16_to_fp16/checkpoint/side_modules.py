"""What stands behind the encoder in a folder of sentence-transformers: pooling, linears, normalisation.

``modules.json`` lists the modules in the order in which they run, each with a class and a folder for its weights, in
fp32 whatever the encoder is in (https://sbert.net/docs/package_reference). ``sentence_bert_config.json`` says how the
encoder is loaded and which output is read: what would make another model of it than config.json describes is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from ..errors import UserError
from .contents import MODULES, WEIGHTS, listed_modules
from .files import nested_value, read_json
from .formats import SAFETENSORS_DTYPES, SAFETENSORS_NAMES, read_range
from .reader import collect, weight_files

DENSE, DROPOUT, LAYER_NORM, NORMALIZE, POOLING = "Dense", "Dropout", "LayerNorm", "Normalize", "Pooling"
BOUNDED = (DENSE, DROPOUT, LAYER_NORM, NORMALIZE, POOLING)
"""Classes of modules that have a bound; a folder with any other behind its encoder is refused."""

WITH_WEIGHTS = (DENSE, LAYER_NORM)  # classes that have weights, which are written in fp16
NORM = "norm"  # what a LayerNorm calls the module that has its weights

ENCODER, NAMESPACE = "Transformer", "sentence_transformers."
"""The class of the first module, and how the names of all classes begin that run no code from a repository."""

WHOLE_CONFIG, WHOLE = "config_sentence_transformers.json", "SentenceTransformer"
"""The file that names the class of the whole, and the one that runs the modules as they are listed."""

ENCODER_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Files that say how the encoder is loaded: of those that are there the first that is not empty counts."""

PASSED_ON = ("config_args", "config_kwargs", "model_args", "model_kwargs")
"""Their keys with what goes to the encoder's config and to its loading."""

HARMLESS = ("trust_remote_code", "use_cache")
"""What may go there: it changes no weight and nothing of what the encoder computes."""

READ = {
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
    "method": ("forward",),
    "method_output_name": ("last_hidden_state", ["last_hidden_state"]),
}
"""Their keys that choose what runs and which output is read, each with the values that mean the last states."""

MODES = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
"""The ways to pool, in the order in which their results are joined, with the switch of each in an older config."""

VECTOR = "sentence_embedding"  # what modules call the vector that they hand on, unless a linear's config says otherwise


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
    def includes_prompt(self) -> bool:
        return self.config.get("include_prompt", True) is True

    @property
    def activation(self) -> str:
        """The class of a linear's activation: of torch's by the last part of its name, Tanh where none is named."""
        namespace, _, name = str(self.config.get("activation_function", "torch.Tanh")).rpartition(".")
        return name if namespace.partition(".")[0] == "torch" else ""

    @property
    def is_aside(self) -> bool:
        """Whether it reads or gives anything but the sentence's vector, so that what follows does not read it alone."""
        return any(self.config.get(f"module_{end}_name") not in (None, VECTOR) for end in ("input", "output"))


def check_sentence_encoder(folder: Path) -> None:
    """Raise UserError where sentence-transformers would run anything but the folder's own encoder as config.json
    describes it, followed by modules that have a bound; says nothing without a ``modules.json``."""
    entries = listed_modules(folder)
    if not (folder / MODULES).is_file():
        return
    listed = [(str(entry["path"]), str(entry.get("type", ""))) for entry in entries]
    names = [entry["name"] for entry in entries if "name" in entry]
    for again in (name for i, name in enumerate(names) if name in names[:i]):
        raise UserError(
            f"{folder / MODULES}: two modules have the name {again!r}, and sentence-transformers runs the second"
            " in the place of the first; give each a name of its own"
        )
    for i, (path, kind) in enumerate(listed):
        name = kind.rpartition(".")[2]
        if i == 0 and (path.rstrip("/.") or name != ENCODER or not kind.startswith(NAMESPACE)):
            raise UserError(
                f"{folder / MODULES}: begins with {kind or 'no class'!r} in {path or '.'!r}, and what is converted is a"
                f" {ENCODER} in the folder itself; give the folder of each encoder by itself, without {MODULES}"
            )
        if i and (name not in BOUNDED or not kind.startswith(NAMESPACE) or not path.rstrip("/.")):
            raise UserError(
                f"{folder / MODULES}: {kind or 'no class'!r} in {path or '.'!r} has no bound, only"
                f" {', '.join(BOUNDED)} of sentence-transformers have, each in a folder of its own; convert the encoder"
                f" alone, without {MODULES}"
            )
    whole = folder / WHOLE_CONFIG
    kind = read_json(whole, "config").get("model_type", WHOLE) if whole.is_file() else WHOLE
    if kind != WHOLE:
        raise UserError(
            f"{whole}: 'model_type' is {kind!r}, of which a {WHOLE} makes modules of its own; convert the encoder"
            f" alone, without {MODULES}"
        )
    check_encoder_config(*encoder_config(folder))


def encoder_config(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the config with which sentence-transformers loads a folder's encoder, and its file; an empty one where
    there is none."""
    for name in ENCODER_CONFIGS:
        config = read_json(folder / name, "config") if (folder / name).is_file() else {}
        if config:
            return folder / name, config
    return folder / ENCODER_CONFIGS[0], {}


def check_encoder_config(file: Path, config: Mapping[str, Any]) -> None:
    """Raise UserError where a config of sentence-transformers changes the model or reads anything but its last
    states."""
    text = nested_value(config, "modality_config", "text")
    chosen = [*config.items(), *(text.items() if isinstance(text, Mapping) else ())]
    for key, value in chosen:
        if key in READ and value is not None and value not in READ[key]:
            raise UserError(
                f"{file}: {key!r} is {value!r}, and what has a bound are the last states of the encoder,"
                f" {READ[key][0]!r}; remove the key if the vectors are made of those"
            )
    for key in PASSED_ON:
        passed = config.get(key) or {}
        changing = [passed] if not isinstance(passed, Mapping) else sorted(set(passed) - {*HARMLESS})
        if changing:
            raise UserError(
                f"{file}: {key!r} has {changing[0]!r}, which sentence-transformers gives to the encoder over what"
                " config.json says; write it into config.json, and remove it here"
            )


def read_side_modules(folder: Path) -> list[SideModule]:
    """Return the modules behind the encoder in the order in which they run, with their tensors in the files' dtypes;
    none where there is no ``modules.json``. Raises UserError as ``check_sentence_encoder`` does, and for damage."""
    check_sentence_encoder(folder)
    modules = []
    for entry in listed_modules(folder)[1:]:
        place = folder / str(entry["path"])
        described = place / "config.json"
        config = read_json(described, "config") if described.is_file() else {}
        kind = str(entry["type"]).rpartition(".")[2]
        modules.append(SideModule(place.name, kind, config, read_tensors(place) if kind in WITH_WEIGHTS else {}))
    return modules


def read_tensors(place: Path) -> dict[str, Tensor]:
    """Return the tensors of a side module; raise UserError where its files are damaged."""
    files, index = weight_files(place)
    return {name: read_range(info, info.shape, 0) for name, info in collect(files, index, place).items()}


def write_in_fp16(folder: Path, out: Path, back: Mapping[str, str] | None = None) -> dict[str, str]:
    """Write the floating tensors of the side modules of ``folder`` in fp16 below ``out``, where their other files are,
    and return the dtypes that they had, in safetensors' spelling, by sub-folder and name. back: dtypes as returned
    here, in which to write those of a converted folder. Raises UserError for a tensor that fp16 cannot hold."""
    changed: dict[str, str] = {}
    for module in read_side_modules(folder):
        tensors = {}
        for name, tensor in module.tensors.items():
            full, own = f"{module.name}/{name}", SAFETENSORS_NAMES[tensor.dtype]
            wanted = "F16" if back is None else back.get(full, own)
            dtype = SAFETENSORS_DTYPES[wanted] if tensor.is_floating_point() else tensor.dtype
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
