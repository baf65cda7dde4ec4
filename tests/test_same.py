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
