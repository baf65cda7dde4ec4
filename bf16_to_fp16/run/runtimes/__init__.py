"""Other people's runtimes: a checkpoint exported the way each wants it, run there in fp16, and what really computed it.

A runtime that is asked for fp16 may compute in fp32 all the same, where the processor or the library has no kernel.
Then finite outputs prove nothing, so each runtime here also says in which format its operations ran.

Each module here is one runtime, ``RUNTIME``, under the module's name. To add one, add its module, and its package to
the extra ``runtimes`` in pyproject.toml with its pin in constraints.txt; ``check``'s option and its tests follow.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ...environment import how_to_install
from ...errors import UserError

if TYPE_CHECKING:
    from ..runtime import Runtime

NAMES = tuple(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))
"""The names of the runtimes, known before any is imported."""


def runtime_named(name: str) -> Runtime:
    """Return a runtime by its name; raise UserError where there is none, or it is not installed."""
    if name not in NAMES:
        raise UserError(f"no runtime {name!r}; the known ones are {', '.join(NAMES)}")
    runtime: Runtime = import_module(f".{name.replace('-', '_')}", __name__).RUNTIME
    if find_spec(runtime.package) is None:
        raise UserError(f"{name} is not installed ({runtime.package} is missing); {how_to_install('runtimes')}")
    return runtime
