"""Load stock models: the transformers class that a config names, from a folder, without remote code or network. What a
class does is known from its family's declaration, else from its signature, else from the config's flags."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import cache, partial
from pathlib import Path
from textwrap import shorten
from typing import Any
from unittest.mock import patch

import torch

from ..checkpoint.formats import SAFETENSORS_DTYPES
from ..checkpoint.reader import VIEWS, Checkpoint
from ..errors import UserError, first_line
from ..families.experts import experts_apart
from ..families.from_config import check_ids, in_folder
from ..families.known import class_named, may_be_absent, of_model_type, placed_family, stock_class
from ..families.layout import NOT_A_CHOICE, Layout
from ..families.types import Part, StockClass
from ..progress import Progress

STOCK_LOCK = threading.RLock()
"""The lock that is held while stock code loads a model and during a ``Walk``. Both change settings of the whole
process, such as torch's default dtype."""


@cache
def by_signature(name: str) -> StockClass | None:
    """Return a ``StockClass`` made from the signature of a transformers class, or None for an unknown name. The class
    counts as a language model if its ``can_generate`` is true."""
    import transformers

    kind: Any = getattr(transformers, name, None)
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not is_model:
        return None
    decodes = "decoder_input_ids" in inspect.signature(kind.forward).parameters
    of_rows = name.endswith("ForSequenceClassification")  # with a decoder they read its last state at a row's end token
    return StockClass(
        (name,),
        decodes=decodes,
        takes_decoder_ids=decodes and not of_rows,
        end=None if kind.can_generate() else Part(),
        reads_end_token=decodes and of_rows,
    )


def load_config(folder: Path) -> Any:
    config = any_config(folder)
    with in_folder(folder):
        stock_class({"model_type": config.model_type, "architectures": config.architectures})
        check_ids(partial(setting, config), vocabulary_of(config))
    return config


def any_config(folder: Path) -> Any:
    import transformers

    if not (Path(folder) / "config.json").is_file():
        raise UserError(f"{folder}: no config.json; give the folder of a checkpoint")
    try:
        return transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each field has its own validation, with exceptions of its own
        raise UserError(f"{folder}/config.json: {shorten(str(error), 500, placeholder=' …')}; mend the file") from error


def setting(config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    return getattr(getattr(config, "text_config", None), name, None) if value is None else value


def vocabulary_of(config: Any) -> int:
    inside = getattr(getattr(config, "text_config", None), "vocab_size", None)  # None if it is a plain mapping
    return int(config.vocab_size if inside is None else inside)


def load(folder: Path, dtype: torch.dtype, *, half: bool = False, attention: str = "eager") -> Any:
    """Return the stock model in a checkpoint's folder, in eval mode on the CPU. half: cast every weight to fp16. Raises
    UserError for unreadable files or a missing tensor."""
    config = load_config(folder).to_dict()
    model, missing = from_files(folder, stock_class(config), dtype, attention)
    check_complete(folder, config, missing)
    return all_half(model).eval() if half else model.eval()


def ready(model: Any) -> Any:
    """Prepare a stock model in place and return it. Fused experts are split if the family's files store each expert
    apart. A classifier without a pad token gets ``NO_PADDING``, so that it can run several rows."""
    if takes_one_row(model):
        model.config.get_text_config().pad_token_id = NO_PADDING
    return experts_apart(model, of_model_type(model.config.model_type))


NO_PADDING = -1
"""A padding token that is no id. Stock code that reads the last token of a row refuses several rows without a padding
token. With this one it reads the last token of each row."""


def takes_one_row(model: Any) -> bool:
    stock = class_named(type(model).__name__)
    return stock is not None and stock.reads_last_token and model.config.get_text_config().pad_token_id is None


def several_rows(model: Any) -> AbstractContextManager[Any]:
    changed = patch.object(model.config.get_text_config(), "pad_token_id", NO_PADDING)
    return changed if takes_one_row(model) else nullcontext()


def all_half(model: Any) -> Any:
    """Cast parameters and stored buffers to fp16 in place, including T5's ``wo``. ``.half()`` would also cast rotary
    frequencies, and so change the function."""
    kept = [(m, {name: m._buffers[name] for name in m._non_persistent_buffers_set}) for m in model.modules()]
    model.half()
    for module, buffers in kept:
        module._buffers.update(buffers)
    return model


def from_files(folder: Path, name: str, dtype: torch.dtype, attention: str) -> tuple[Any, list[str]]:
    import transformers

    seen = VIEWS.get(Path(folder))
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(folder)}
    if seen is not None:  # one file of weights, which stock code could not read under its names
        weights = {tensor: seen.read(tensor) for tensor in seen.tensors}
        source = {"pretrained_model_name_or_path": None, "config": any_config(folder), "state_dict": weights}
    try:
        with STOCK_LOCK:
            model, info = getattr(transformers, name).from_pretrained(
                **source, dtype=dtype, attn_implementation=attention, local_files_only=True, output_loading_info=True
            )
    except Exception as error:  # safetensors, pickle and transformers each raise their own kinds
        raise cannot_be_loaded(folder, error) from error
    return ready(model), sorted(info["missing_keys"])


def structure(checkpoint: Checkpoint, dtype: torch.dtype, *, half: bool = False) -> Any:
    """Return the stock model of a checkpoint on the meta device, with eager attention. Only buffers, and tensors that
    no file holds, have values. Tensors that are stored apart stay separate even if equal. Raises UserError for
    unreadable files or a missing tensor."""
    folder = checkpoint.folder
    config = load_config(folder)
    try:
        model, info = without_values(checkpoint, config, dtype)
        if model.can_generate():
            model.adjust_generation_fn(None, False, None, str(folder), local_files_only=True, **NOTHING_REMOTE)
    except Exception as error:  # as in ``load``
        raise cannot_be_loaded(folder, error) from error
    check_complete(folder, config.to_dict(), info["missing_keys"])
    model.config.name_or_path = str(folder)
    fill_in(model, checkpoint)
    return all_half(model).eval() if half else model.eval()


def attentions_of(name: str, wanted: Sequence[str], progress: Progress | None = None) -> tuple[str, ...]:
    import transformers

    if getattr(transformers, name)._supports_sdpa or "sdpa" not in wanted:
        return tuple(wanted)
    kept = tuple(kind for kind in wanted if kind != "sdpa")
    if not kept:
        raise UserError(f"{name} has no sdpa attention; give --attention eager")
    if progress is not None:
        progress.say(f"{name} has no sdpa attention; only {' and '.join(kept)} is run")
    return kept


def set_attention(model: Any, implementation: str) -> None:
    """Set the attention implementation of a stock model and its stacks. Raises stock code's error if one lacks it."""
    model.set_attn_implementation(implementation)
    # Some versions of transformers 5, such as 5.17, do not change a stack's own config.
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(module, "set_attn_implementation") and config._attn_implementation != implementation:
            module.set_attn_implementation(implementation)


NOTHING_REMOTE: dict[str, Any] = dict.fromkeys(("cache_dir", "proxies", "token", "revision"))
NOTHING_REMOTE |= {"force_download": False, "subfolder": "", "trust_remote_code": False}
"""Arguments with which stock code reads the settings of a generation from the folder alone."""


def without_values(
    checkpoint: Checkpoint, config: Any, dtype: torch.dtype, *, any_shape: bool = False
) -> tuple[Any, Mapping[str, Any]]:
    """Return the stock model of a checkpoint on the meta device, and the loader's report about the weights. any_shape:
    report unexpected shapes instead of raising."""
    import transformers

    weights = {
        name: torch.empty(info.shape, dtype=SAFETENSORS_DTYPES[info.dtype], device="meta")
        for name, info in checkpoint.tensors.items()
    }
    # Drawing weights without values takes no time, but Pegasus computes its positions one by one.
    with STOCK_LOCK, patch.object(transformers.PreTrainedModel, "initialize_weights"):
        model, info = getattr(transformers, stock_class(checkpoint.config)).from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=dtype,
            attn_implementation="eager",
            device_map={"": "meta"},
            ignore_mismatched_sizes=any_shape,
            output_loading_info=True,
        )
    return ready(model), info


def run_everywhere(model: Any, layout: Layout, **inputs: Any) -> None:
    """Run a stock model. A head that reads only end tokens runs at every position, because rows may have none."""
    stock, head = layout.stock, layout.head
    if not stock.reads_end_token or head is None:
        model(**inputs)
        return
    if "decoder_input_ids" not in inputs and "decoder_inputs_embeds" not in inputs:
        inputs["decoder_input_ids"] = model._shift_right(inputs["input_ids"])
    model.get_submodule(head.at)(model.get_submodule(stock.body)(**inputs)[0])


def fill_in(model: Any, checkpoint: Checkpoint) -> None:
    from transformers import PreTrainedModel

    stored = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in checkpoint.tensors}
    drawn = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        if id(tensor) in stored:
            continue
        value = torch.empty(tensor.shape, dtype=tensor.dtype)
        if name in checkpoint.tensors and attribute not in module._non_persistent_buffers_set:
            value.copy_(checkpoint.read(name))
        else:
            drawn[path] = module
        if attribute in module._buffers:
            module._buffers[attribute] = value
        else:
            module._parameters[attribute] = torch.nn.Parameter(value)
    with torch.random.fork_rng(devices=[]):
        for path, module in drawn.items():
            # By the innermost model around it: each has rules of its own.
            around = [each for name, each in model.named_modules() if not name or f"{path}.".startswith(f"{name}.")]
            models = [each for each in around if isinstance(each, PreTrainedModel)]
            models[-1]._init_weights(module)


def check_complete(folder: Path, config: Mapping[str, object], not_found: Iterable[str]) -> None:
    missing = sorted(set(not_found) - may_be_absent(placed_family(config)))
    if missing:
        raise UserError(
            f"{folder}: tensor {missing[0]} is missing, and transformers would fill it at random; take the whole"
            " checkpoint"
        )


def cannot_be_loaded(folder: Path, error: Exception) -> UserError:
    return UserError(f"{folder}: cannot be loaded ({first_line(error)}); check its files")


def class_in(config: Any) -> StockClass | None:
    names = getattr(config, "architectures", None) or ()
    return next((stock for look in (class_named, by_signature) for name in names if (stock := look(name))), None)


def config_of(model: Any) -> Any:
    """Return a copy of a model's config that names the class in ``architectures``, as a saved config does."""
    config = copy(model.config)
    config.architectures = [type(model).__name__]
    return config


def takes_decoder_ids(config: Any) -> bool:
    """Return whether a model needs decoder ids. The config's ``is_encoder_decoder`` is often true for encoders too."""
    stock = class_in(config)
    return bool(config.is_encoder_decoder) if stock is None else stock.takes_decoder_ids


def predicts_tokens(config: Any) -> bool:
    stock = class_in(config)
    return takes_decoder_ids(config) if stock is None else stock.is_language_model


def is_causal(config: Any) -> bool:
    return predicts_tokens(config) and not takes_decoder_ids(config)


def gives_probabilities(config: Any) -> bool:
    stock = class_in(config)
    if stock is None or stock.is_language_model:
        return predicts_tokens(config)
    choices = config.num_labels > 1 and config.problem_type not in NOT_A_CHOICE
    return stock.gives == ("logits",) and choices


def longest_sequence(config: Any) -> int:
    positions = setting(config, "max_position_embeddings")
    return int(positions) if positions else 2**30


def decoder_start(config: Any) -> int:
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    return next((token for name in names for token in _named(config, name)), 0)


def pad_id(config: Any) -> int:
    return next(iter(_named(config, "pad_token_id")), 0)


def special_ids(config: Any) -> list[int]:
    """Return the config's special ids and the vocabulary's last id, sorted."""
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id", "decoder_start_token_id")
    return sorted({vocabulary_of(config) - 1, *(i for name in names for i in _named(config, name))})


def end_ids(config: Any) -> list[int]:
    return _named(config, "eos_token_id")[:1]


def first_ids(config: Any) -> list[int]:
    """Return a list with a causal model's start token; [] if there is none, and for other models."""
    return _named(config, "bos_token_id")[:1] if is_causal(config) else []


def _named(config: Any, name: str) -> list[int]:
    value = setting(config, name)
    several = value if isinstance(value, list) else [value]
    return [i for i in several if isinstance(i, int) and 0 <= i < vocabulary_of(config)]
