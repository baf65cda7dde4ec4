"""Silence other libraries. Their settings are global to the process, so they are restored afterwards."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Hide other libraries' progress bars, advice and warnings inside a ``with`` block or a decorated function."""
    from transformers.utils import logging as stock

    bars, level = stock.is_progress_bar_enabled(), stock.get_verbosity()
    with ExitStack() as before:
        before.enter_context(quiet_downloads())
        # torch.distributed warns once for each process and function.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        # The name that transformers 5 and 4 both have.
        warnings.filterwarnings(
            "ignore", message="`gradient_checkpointing_enable` is deprecated", category=FutureWarning
        )
        before.callback(stock.set_verbosity, level)
        stock.set_verbosity(logging.CRITICAL)
        before.callback(stock.enable_progress_bar if bars else stock.disable_progress_bar)  # sets downloads' bars too
        stock.disable_progress_bar()
        # torchao, which transformers imports where it is installed, lists other machines' kernels and torch's news.
        for logger in map(logging.getLogger, ("torchao", "torch.utils._pytree")):
            before.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        # DeepSpeed logs to standard output, among data. Its import sets its logger's level, so only a filter lasts.
        deepspeed = logging.getLogger("DeepSpeed")
        if _is_error not in deepspeed.filters:  # else an outer call has set it
            deepspeed.addFilter(_is_error)
            before.callback(deepspeed.removeFilter, _is_error)
        yield


@contextmanager
def quiet_downloads() -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    restore = disable_progress_bars if are_progress_bars_disabled() else enable_progress_bars
    client = logging.getLogger("huggingface_hub")
    with warnings.catch_warnings(), ExitStack() as before:
        warnings.filterwarnings("ignore", message="Cannot disable progress bars")  # HF_HUB_DISABLE_PROGRESS_BARS=0
        before.callback(restore)
        before.callback(client.setLevel, client.level)
        client.setLevel(logging.ERROR)
        disable_progress_bars()
        yield


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
