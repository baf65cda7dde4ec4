"""Plans, certificates and bytes of two checkpoints are those that were recorded."""

import json
import sys

import pytest

sys.path.insert(0, "benchmarks")

import same


@pytest.mark.parametrize("name", ["llama, auto", "t5gemma, norm-safe"])
def test_a_conversion_gives_the_recorded_bounds_plan_and_bytes(name: str) -> None:
    said, now = json.loads(same.RECORD.read_text())[name], json.loads(json.dumps(same.result_of(name)))
    assert list(same.differences(said, now)) == []


def test_a_change_of_the_twelfth_digit_is_found_and_one_below_is_not() -> None:
    said = {"a": [1.0, 2]}
    assert list(same.differences(said, {"a": [1.0 + 1e-13, 2]})) == []
    for other in ({"a": [1.0 + 1e-11, 2]}, {"a": [1.0, 3]}, {"a": [1.0]}, {"a": [1.0, 2], "b": None, "c": 1}):
        assert len(list(same.differences(said, other))) == 1
