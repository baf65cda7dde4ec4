"""What docs/losses.md says that the detector tells of each pattern, and that it does not."""

import sys
from pathlib import Path

import pytest

from bf16_to_fp16.losses.detector import events
from bf16_to_fp16.losses.events import Divergence, Event, Plateau, Spike
from bf16_to_fp16.losses.logs import read_log

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import loss_patterns  # noqa: E402

SEEDS = range(6)


def found(name: str, seed: int) -> list[Event]:
    return events(loss_patterns.synthetic(name, seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_spikes_divergence_a_slow_rise_and_a_plateau_are_told(seed: int) -> None:
    fast, slow = found("spikes", seed)
    assert isinstance(fast, Spike) and isinstance(slow, Spike)
    assert (fast.start, fast.recovery, slow.recovery) == (4210, "fast", "slow") and 8000 <= slow.start <= 8020
    (gone,) = found("divergence", seed)
    assert isinstance(gone, Divergence) and gone.end is None and 7000 <= gone.start <= 7020
    (rise,) = found("slow-rise", seed)
    assert isinstance(rise, Divergence) and rise.end is None and 5000 <= rise.start <= 6500
    (flat,) = [event for event in found("plateau", seed) if event.start < 5500]
    assert isinstance(flat, Plateau) and flat.end is not None and 8800 <= flat.end <= 9600


@pytest.mark.parametrize("seed", SEEDS)
def test_stairs_are_plateaus_to_the_detector_and_no_rise(seed: int) -> None:
    stairs = found("steps", seed)
    assert len(stairs) >= 2 and all(isinstance(event, Plateau) for event in stairs)


@pytest.mark.parametrize("seed", SEEDS)
def test_harder_shards_are_divergences_to_the_detector_at_their_borders(seed: int) -> None:
    rises = {event.start: event for event in found("shards", seed)}
    assert set(rises) == {2010, 4010, 8010}
    # On the early fall a shard that is a little harder comes back by itself.
    assert isinstance(rises[2010], Divergence) or rises[2010].recovery == "slow"  # type: ignore[attr-defined]
    assert isinstance(rises[4010], Divergence) and isinstance(rises[8010], Divergence)


def test_grokking_is_not_told_by_either_of_its_losses() -> None:
    rows = loss_patterns.real("training"), loss_patterns.real("loss")
    learnt = next(k for k, loss in enumerate(rows[0].losses) if loss < 0.01)
    # It is what it says: learnt by heart while the held-out loss is at its worst, which then falls below 0.2.
    assert rows[1].losses[learnt] > 7 and rows[1].losses[-1] < 0.2 and rows[0].steps[learnt] < 400
    # That nothing more happens to the training loss, and nothing at all of the other.
    assert [type(event) for event in events(rows[0])] == [Plateau] and not events(rows[1])
    assert read_log(loss_patterns.GROKKING).losses == rows[1].losses


def test_the_pictures_of_the_page_are_those_that_the_script_draws(tmp_path: Path) -> None:
    loss_patterns.main([str(tmp_path)])
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert {path.name for path in (ROOT / "docs" / "patterns").iterdir()} == set(drawn)
    page = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    for name, text in drawn.items():
        assert f"](patterns/{name})" in page and "prefers-color-scheme: dark" in text
