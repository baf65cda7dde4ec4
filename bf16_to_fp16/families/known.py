"""The supported families, and look-up of a config's family and stock class."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from ..errors import UserError
from .configs import full_config
from .gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_WITH_IMAGES
from .gemma4 import GEMMA4, GEMMA4_WITH_IMAGES
from .glm4 import GLM, GLM4, GLM4_MOE
from .granite import GRANITE
from .llama import ERNIE4_5, LLAMA, MISTRAL, QWEN2, QWEN3, SEED_OSS, SMOLLM3
from .mistral3 import MINISTRAL3, MISTRAL3
from .moe import MIXTRAL, OLMOE, QWEN3_MOE
from .nested import family_inside
from .olmo import EXAONE4, OLMO2, OLMO3
from .pegasus import BIGBIRD_PEGASUS, MBART, PEGASUS
from .phi3 import PHI3
from .qwen_vl import QWEN2_5_VL, QWEN2_5_VL_TEXT, QWEN2_VL, QWEN2_VL_TEXT, QWEN3_VL, QWEN3_VL_TEXT
from .switch import SWITCH
from .t5 import LONGT5, MT5, T5, UMT5
from .t5gemma import T5GEMMA
from .types import INNER, Family, StockClass
from .wiring import Attention

FAMILIES: tuple[Family, ...] = (
    *(T5, MT5, UMT5, LONGT5, SWITCH, PEGASUS, MBART, BIGBIRD_PEGASUS),
    *(GEMMA3, GEMMA3_WITH_IMAGES, GEMMA4, GEMMA4_WITH_IMAGES, GEMMA2, GEMMA),
    *(LLAMA, MISTRAL, MISTRAL3, MINISTRAL3, QWEN2, QWEN3, SEED_OSS, SMOLLM3, ERNIE4_5, PHI3, GRANITE),
    *(QWEN2_VL, QWEN2_VL_TEXT, QWEN2_5_VL, QWEN2_5_VL_TEXT, QWEN3_VL, QWEN3_VL_TEXT, GLM4, GLM, OLMO2, OLMO3, EXAONE4),
    *(MIXTRAL, QWEN3_MOE, OLMOE, GLM4_MOE, T5GEMMA),
)


def names_of(family: Family) -> tuple[str, ...]:
    return tuple(name for stock in family.classes for name in stock.names)


def family_of(config: Mapping[str, object]) -> Family:
    model_type = model_type_of(config)
    family = of_model_type(model_type)
    if family is None:
        known = ", ".join(each.model_type for each in FAMILIES)
        raise UserError(
            f"config.json: model_type {model_type!r} is not supported; the known ones are {known}; to measure a"
            " text model of another type, use audit"
        )
    for name in architectures(config):
        if name not in names_of(family):
            known = ", ".join(names_of(family))
            raise UserError(f"config.json: architecture {name} is not supported; those of {model_type} are {known}")
    return family.flat if family.flat is not None and not isinstance(config.get(INNER), Mapping) else family


def naming_class(config: Mapping[str, object], name: str) -> dict[str, object]:
    family = family_of(config)
    if name not in names_of(family):
        raise UserError(
            f"config.json: {name} is no class that reads a {family.model_type} checkpoint; those that do are"
            f" {', '.join(names_of(family))}"
        )
    return {**config, "architectures": [name]}


def class_named(name: str) -> StockClass | None:
    return next((stock for family in FAMILIES for stock in family.classes if name in stock.names), None)


def loading_class(name: str) -> str:
    stock = class_named(name)
    if stock is not None and (stock.auto or not stock.is_language_model):
        return stock.auto or stock.names[0]
    return "AutoModelForSeq2SeqLM" if stock is None or stock.decodes else "AutoModelForCausalLM"


def class_of(config: Mapping[str, object]) -> StockClass:
    """Return the stock class that a config's ``architectures`` names first; raise UserError if it names none."""
    family, names = family_of(config), architectures(config)
    if not names:
        choices = " or ".join(f'["{stock.names[0]}"]' for stock in family.classes)
        raise UserError(f'config.json names no class; add "architectures": {choices}')
    return next(stock for stock in family.classes if names[0] in stock.names)


def placed_family(config: Mapping[str, object]) -> Family:
    """Return a config's family, with module paths as in the transformers class that the config names."""
    return family_inside(family_of(config), class_of(config).body)


def class_by_tensor_names(config: Mapping[str, object], tensors: Collection[str]) -> StockClass | None:
    """Return another class of the config's family whose name for the embedding is in ``tensors``, or None."""
    plain, own = family_of(config), class_of(config)
    for stock in plain.classes:
        family = family_inside(plain, stock.body)
        # A class with the same ``body`` has the same name for the embedding.
        if stock.body != own.body and any(name in tensors for name in (family.embedding, *family.copies)):
            return stock
    return None


def is_known(config: Mapping[str, object]) -> bool:
    """Return whether ``model_type`` and any ``architectures[0]`` are known. Raises UserError if a type is wrong."""
    family = of_model_type(model_type_of(config))
    return family is not None and all(name in names_of(family) for name in architectures(config)[:1])


def named(name: object) -> Family | None:
    return next((family for family in FAMILIES if family.name == name), None)


def model_type_of(config: Mapping[str, object]) -> str | None:
    model_type = config.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise UserError(f"config.json: 'model_type' is {model_type!r}, which is not a name; write \"t5\" or the like")
    return model_type


def of_model_type(model_type: object) -> Family | None:
    return next((family for family in FAMILIES if family.model_type == model_type), None)


def spare_padding(config: Mapping[str, object]) -> float:
    """Return the least number of padding tokens with which a padded encoder row stays finite in fp16. The number is 0
    if any padding will do, and inf if none will. Padding is on the right."""
    family = of_model_type(config.get("model_type"))
    if family is None:
        return 0
    full = full_config(family, config)
    windows = (part.topology for part in family.encoder.block(full, 0))
    windowed = next((windowed for windowed in windows if isinstance(windowed, Attention) and windowed.radius), None)
    if windowed is None:
        return 0
    # Under a mask of −inf, a padding position that attends to nothing becomes NaN, and so do positions that attend to
    # it. If a layer also sums up blocks of positions, padding positions can attend to the sum of a block of padding.
    return int(str(full[windowed.block])) if windowed.block else math.inf


def padding_entry(config: Mapping[str, object]) -> int | None:
    """Return ``spare_padding`` as reports store it, with None instead of inf."""
    spare = spare_padding(config)
    return None if spare == math.inf else int(spare)


def may_be_absent(family: Family) -> frozenset[str]:
    """Return the names of tensors that transformers computes or sets to 0 if a file lacks them."""
    parts = (*family.ends, family.tied_head, family.untied_head)
    return frozenset(t.name for part in parts for t in part.tensors if t.absent)


def stock_class(config: Mapping[str, object]) -> str:
    return class_of(config).names[0]


def architectures(config: Mapping[str, object]) -> list[str]:
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise UserError(
            "config.json: 'architectures' is not a list; write [\"T5ForConditionalGeneration\"] or the like"
        )
    return [str(name) for name in names]
