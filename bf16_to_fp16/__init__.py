"""Make bf16-pretrained T5-family and Pegasus checkpoints safe in fp16: exactly rescaled, audited, loading in stock
libraries.

The names below are the whole public interface; they are imported when first used, so that the command line starts
fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import UserError

if TYPE_CHECKING:
    from .auditing import audit
    from .certificate import Certificate, certify
    from .conversion import Conversion, convert, rescale, undo
    from .finetuning import finetune
    from .formats import advise_format
    from .initialisation import advise_init
    from .lossreport import advise_losses
    from .optimizer import AdamW
    from .penalty import ActivationPenalty
    from .publishing import publish
    from .rescaling import Plan
    from .updates import advise_updates
    from .verifying import verify

__version__ = "0.1.0"

__all__ = [
    "ActivationPenalty",
    "AdamW",
    "Certificate",
    "Conversion",
    "Plan",
    "UserError",
    "advise_format",
    "advise_init",
    "advise_losses",
    "advise_updates",
    "audit",
    "certify",
    "convert",
    "finetune",
    "publish",
    "rescale",
    "undo",
    "verify",
]

_HOMES = {
    "ActivationPenalty": "penalty",
    "AdamW": "optimizer",
    "advise_format": "formats",
    "advise_init": "initialisation",
    "advise_losses": "lossreport",
    "advise_updates": "updates",
    "audit": "auditing",
    "certify": "certificate",
    "Certificate": "certificate",
    "convert": "conversion",
    "Conversion": "conversion",
    "finetune": "finetuning",
    "publish": "publishing",
    "rescale": "conversion",
    "undo": "conversion",
    "Plan": "rescaling",
    "verify": "verifying",
}


def __getattr__(name: str) -> Any:
    """Import a public name from the module that has it."""
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
