"""Make bf16 checkpoints of T5, Pegasus, Gemma and others safe in fp16.

The names in ``__all__`` are the public interface. Each is imported at its first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import UserError

if TYPE_CHECKING:
    from .advise.initialisation import advise_init
    from .advise.losses import advise_losses
    from .advise.updates import advise_updates
    from .bounds.findings import Certificate
    from .conversion.adapter import convert_adapter
    from .conversion.audit import audit
    from .conversion.certify import certify
    from .conversion.convert import Conversion, convert
    from .conversion.made_safe import MadeSafe
    from .conversion.make_safe import make_fp16_safe, rescale
    from .conversion.pipeline import PipelineConversion, convert_pipeline
    from .conversion.publish import publish
    from .conversion.undo import undo
    from .conversion.verify import verify
    from .finetuning.callback import Fp16Callback
    from .finetuning.penalty import ActivationPenalty
    from .finetuning.run import finetune
    from .optim.adamw import AdamW
    from .rescaling.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "ActivationPenalty", "AdamW", "Certificate", "Conversion", "Fp16Callback", "MadeSafe",
    "PipelineConversion", "Plan", "UserError", "advise_init", "advise_losses", "advise_updates",
    "audit", "certify", "convert", "convert_adapter", "convert_pipeline", "finetune", "make_fp16_safe",
    "publish", "rescale", "undo", "verify",
]  # fmt: skip

_HOMES = {
    "advise.initialisation": ("advise_init",),
    "advise.losses": ("advise_losses",),
    "advise.updates": ("advise_updates",),
    "bounds.findings": ("Certificate",),
    "conversion.adapter": ("convert_adapter",),
    "conversion.audit": ("audit",),
    "conversion.certify": ("certify",),
    "conversion.convert": ("Conversion", "convert"),
    "conversion.made_safe": ("MadeSafe",),
    "conversion.make_safe": ("make_fp16_safe", "rescale"),
    "conversion.pipeline": ("PipelineConversion", "convert_pipeline"),
    "conversion.publish": ("publish",),
    "conversion.undo": ("undo",),
    "conversion.verify": ("verify",),
    "finetuning.callback": ("Fp16Callback",),
    "finetuning.penalty": ("ActivationPenalty",),
    "finetuning.run": ("finetune",),
    "optim.adamw": ("AdamW",),
    "rescaling.plan": ("Plan",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{home}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
