"""Read YAML with version 1.2's scalars (``1e-4`` is a number, ``off`` a word), unique keys and one-line errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from .errors import UserError, first_line, shortened


def read_yaml(path: Path) -> Any:
    """Return a recipe's data, None for an empty file. Raises UserError if the file is not readable UTF-8 YAML."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; save the recipe as UTF-8") from error
    except OSError as error:
        raise UserError(f"{shortened(path)}: {error.strerror}; give the recipe's YAML file") from error
    return parse_yaml(text, str(path))


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2's scalars and without duplicate keys. ruamel.yaml would need as much code."""


_SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+(?:_[0-9]+)*",
    "float": r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}
_Loader.yaml_implicit_resolvers = {}
for _scalar, _pattern in _SCALARS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_scalar}", re.compile(rf"(?:{_pattern})\Z"), None)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else ""
        if key.tag != "tag:yaml.org,2002:str":
            problem = f"the key {name or 'of a section'} is not a word"
            raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        if name in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {name} is given twice", key.start_mark)
        seen.add(name)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value.replace("_", ""), 10))
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse_yaml(text: str, name: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or first_line(error)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise UserError(f"{name}: not YAML{where} ({problem}); write `key: value` lines") from error
