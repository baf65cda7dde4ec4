"""What several tests of runs are given."""

from pathlib import Path

import pytest
from support import words


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return words.save(tmp_path_factory.mktemp("source"))
