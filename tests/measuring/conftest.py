"""What several tests of runs are given."""

from pathlib import Path

import pytest
from support import words

from bf16_to_fp16.measuring import attack


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return words.save(tmp_path_factory.mktemp("source"))


@pytest.fixture
def few_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a search run a tiny model on fewer and larger batches, of which it costs next to nothing."""
    for name, number in {"GROUP": 128, "POOL": 1, "FLIPS": 1}.items():
        monkeypatch.setattr(attack, name, number)
