"""Make bf16 checkpoints of T5, Pegasus, Gemma and others safe in fp16: exactly rescaled, audited, loading in stock
libraries.

The names below are the whole public interface; they are imported when first used, so that the command line starts
fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import UserError

if TYPE_CHECKING:
    from .advise.formats import advise_format
    from .advise.initialisation import advise_init
    from .advise.updates import advise_updates
    from .bounds.findings import Certificate
    from .commands.adapter import convert_adapter
    from .commands.audit import audit
    from .commands.certify import certify
    from .commands.check import check
    from .commands.convert import Conversion, convert
    from .commands.make_safe import MadeSafe, make_fp16_safe
    from .commands.pipeline import PipelineConversion, convert_pipeline, undo_pipeline
    from .commands.publish import publish
    from .commands.rescale import rescale
    from .commands.undo import undo
    from .commands.verify import verify
    from .finetuning.callback import Fp16Callback
    from .finetuning.penalty import ActivationPenalty
    from .finetuning.run import finetune
    from .losses.report import advise_losses
    from .optim.adamw import Adam, AdamW
    from .rescaling.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "ActivationPenalty",
    "Adam",
    "AdamW",
    "Certificate",
    "Conversion",
    "Fp16Callback",
    "MadeSafe",
    "PipelineConversion",
    "Plan",
    "UserError",
    "advise_format",
    "advise_init",
    "advise_losses",
    "advise_updates",
    "audit",
    "certify",
    "check",
    "convert",
    "convert_adapter",
    "convert_pipeline",
    "finetune",
    "make_fp16_safe",
    "publish",
    "rescale",
    "undo",
    "undo_pipeline",
    "verify",
]

_HOMES = {
    "ActivationPenalty": "finetuning.penalty",
    "Adam": "optim.adamw",
    "AdamW": "optim.adamw",
    "advise_format": "advise.formats",
    "advise_init": "advise.initialisation",
    "advise_losses": "losses.report",
    "advise_updates": "advise.updates",
    "audit": "commands.audit",
    "certify": "commands.certify",
    "check": "commands.check",
    "Certificate": "bounds.findings",
    "convert": "commands.convert",
    "Conversion": "commands.convert",
    "convert_adapter": "commands.adapter",
    "PipelineConversion": "commands.pipeline",
    "convert_pipeline": "commands.pipeline",
    "undo_pipeline": "commands.pipeline",
    "finetune": "finetuning.run",
    "Fp16Callback": "finetuning.callback",
    "MadeSafe": "commands.make_safe",
    "make_fp16_safe": "commands.make_safe",
    "publish": "commands.publish",
    "rescale": "commands.rescale",
    "undo": "commands.undo",
    "Plan": "rescaling.plan",
    "verify": "commands.verify",
}


def __getattr__(name: str) -> Any:
    """Import a public name from the module that has it."""
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, which are there before they are imported."""
    return sorted({*globals(), *__all__})
