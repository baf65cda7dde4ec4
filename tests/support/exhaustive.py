"""What ``make test`` leaves to ``make test-all``: the rest of a table of cases of which some show the same."""

import datetime
from collections.abc import Collection, Iterable
from typing import Any

import pytest

TODAY = datetime.date.today().toordinal()
"""Seed of what another part is tried of each day: whoever sees a failure finds the seed in the test's name."""


def beyond(few: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return all cases as parameters, a tuple as several, those that are not among the few marked ``exhaustive``."""
    rest = pytest.mark.exhaustive
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in few else rest)
        for case in cases
    ]
