"""What several tests of commands are given."""

from typing import Any

import pytest

from bf16_to_fp16.run.probe import checkpoint_batches


@pytest.fixture
def first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the probe the first batch only, which is enough where the question is not what is run."""

    def one(*given: Any, **options: Any) -> Any:
        return checkpoint_batches(*given, **options)[:1]

    monkeypatch.setattr("bf16_to_fp16.conversion.planning.checkpoint_batches", one)
