"""Mutated files of every kind lead to a result or to one error line."""

import resource

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import fuzzing

EXAMPLES = {"safetensors": 40, "pickle": 30, "index": 25, "config": 25, "side files": 6, "report": 20}
EXAMPLES |= {"recipe": 80, "data": 60}
"""By what a run of each costs: together some 20 seconds with ``make test-all``, a third of that with ``make test``."""

MEMORY = 512 << 20  # bytes beyond what this process had


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> fuzzing.Originals:
    return fuzzing.originals(tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize("what", EXAMPLES)
def test_mutated_input_is_taken_or_refused_in_one_line(
    what: str, good: fuzzing.Originals, request: pytest.FixtureRequest
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seen: set[str] = set()

    @settings(
        max_examples=EXAMPLES[what] if request.config.getoption("--exhaustive") else EXAMPLES[what] // 3,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def mutate(data: st.DataObject) -> None:
        seen.add(fuzzing.run(good, data.draw(fuzzing.cases(good)[what])))

    mutate()
    assert "refused" in seen
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < before + MEMORY


def test_what_is_not_mutated_is_accepted(good: fuzzing.Originals) -> None:
    """The control: the same runs on sound input succeed, so that a refusal above is the mutation's."""
    for folder, file in (("t5", fuzzing.WEIGHTS), ("sharded", fuzzing.INDEX), ("pickled", fuzzing.PICKLE)):
        assert fuzzing.run(good, (folder, file, (good.folders[folder] / file).read_bytes())) == "accepted"
    report = (good.folders["converted"] / fuzzing.REPORT).read_bytes()
    assert fuzzing.run(good, ("converted", fuzzing.REPORT, report)) == "accepted"
    assert fuzzing.run(good, ("recipe", "yaml", fuzzing.as_yaml(dict(good.recipe)))) == "accepted"
