"""What finetunes of tests do less of than those of users."""

from collections.abc import Iterator

import pytest
from support import brief


@pytest.fixture(scope="package", autouse=True)
def brief_evaluations() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        brief.evaluate_briefly(patch)
        yield
