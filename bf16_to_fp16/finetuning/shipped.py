"""The recipes that this package brings along: a file of YAML each, which runs as it stands."""

from __future__ import annotations

from pathlib import Path

from ..errors import UserError, shortened

FOLDER = Path(__file__).parents[1] / "recipes"


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def recipe_text(name: str | None) -> str:
    if name not in names():
        said = "no recipe is named" if name is None else f"there is no recipe {shortened(name)!r}"
        raise UserError(f"{said}; choose {', '.join(names())}")
    return (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
