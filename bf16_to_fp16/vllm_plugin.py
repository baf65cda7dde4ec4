"""A plugin that lets vLLM run converted folders in fp16 although it refuses fp16 for their model type. In vLLM 0.33
these types are gemma2, gemma3, gemma3_text and glm4.

vLLM calls ``register`` in each process. The refusal is lifted for a local folder whose report says safe, if its files
have the hashes in the report."""

from __future__ import annotations

import logging
from functools import cache, wraps
from pathlib import Path
from typing import Any

from .checkpoint.reader import open_checkpoint
from .conversion.file_checks import check_hashes, check_unread
from .errors import UserError
from .report.schema import REPORT
from .report.stored import read_written

LOG = logging.getLogger("vllm.bf16_to_fp16")  # below vLLM's own, whose handlers print it

REFUSED, DECIDES = "_FLOAT16_NOT_SUPPORTED_MODELS", "_get_and_verify_dtype"
"""Names in vLLM's module: its reasons for refusing a model type, and the function that reads them."""


def register() -> None:
    """Wrap vLLM's function that chooses a dtype, so that it accepts fp16 for safe folders. A second call, or a vLLM
    without this function, changes nothing."""
    from vllm.config import model as module

    if not (isinstance(getattr(module, REFUSED, None), dict) and callable(getattr(module, DECIDES, None))):
        LOG.warning("bf16_to_fp16 does not know how this version of vLLM refuses fp16, and changes nothing")
        return
    decide, refused = getattr(module, DECIDES), getattr(module, REFUSED)
    if hasattr(decide, "__wrapped__"):
        return

    @wraps(decide)
    def decide_by_report(model_id: Any, config: Any, dtype: Any, *rest: Any, **options: Any) -> Any:
        in_fp16 = str(dtype).removeprefix("torch.").lower() in ("auto", "half", "float16")
        if config.model_type not in refused or not in_fp16 or not (Path(model_id) / REPORT).is_file():
            return decide(model_id, config, dtype, *rest, **options)
        if (reason := objection(Path(model_id))) is not None:
            LOG.warning("%s: not treated as safe in fp16: %s", model_id, reason)
            return decide(model_id, config, dtype, *rest, **options)
        LOG.info("%s: safe in fp16 by its report, and its files match the hashes in the report", model_id)
        refusal = refused.pop(config.model_type)
        try:
            return decide(model_id, config, dtype, *rest, **options)
        finally:
            refused[config.model_type] = refusal

    setattr(module, DECIDES, decide_by_report)


@cache
def objection(folder: Path) -> str | None:
    """Return why a folder's report and hashes do not show it safe; None if they do. Each folder is checked once."""
    try:
        report = read_written(folder)
        checkpoint = open_checkpoint(folder)
    except UserError as error:
        return str(error)
    if not report.safe:
        return f"{REPORT} says {report.verdict}"
    for name, reason, *_ in (*check_hashes(folder, report), *check_unread(checkpoint, report)):
        return f"{name} {reason}"
    return None
