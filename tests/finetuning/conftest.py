"""What finetunes of tests do less of than those of users."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import pytest

from bf16_to_fp16.finetuning.evaluation import Evaluator

FEW = 2


@pytest.fixture(scope="package", autouse=True)
def brief_evaluations() -> Iterator[None]:
    """Let an evaluation look at two batches of the probe and of texts of other kinds: with all of them the first and
    the last evaluation take as long as the steps between them."""
    batches_by_kind = vars(Evaluator)["_others"].func

    def few(evaluator: Evaluator) -> dict[str, Any]:
        return {kind: each if kind == "class" else each[:FEW] for kind, each in batches_by_kind(evaluator).items()}

    with pytest.MonkeyPatch.context() as patch:
        brief = cached_property(few)
        brief.__set_name__(Evaluator, "_others")
        patch.setattr(Evaluator, "_others", brief)
        yield
