"""What ``make test`` leaves to ``make test-all``: the rest of a table of cases of which some show the same."""

import datetime
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

TODAY = datetime.date.today().toordinal()
"""Seed of what another part is tried of each day: whoever sees a failure finds the seed in the test's name."""


def of_today(cases: Sequence[Any], parts: int) -> list[Any]:
    """Return every ``parts``-th case, beginning with another each day."""
    return list(cases[TODAY % parts :: parts])


def beyond(few: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return all cases as parameters, a tuple as several, those that are not among the few marked ``exhaustive``."""
    rest = pytest.mark.exhaustive
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in few else rest)
        for case in cases
    ]
