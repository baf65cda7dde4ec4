"""A plan that centres keys from folder to folder: written, verified, undone, in memory and with adapters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import tiny
from support.contract import outputs, random_plan

from bf16_to_fp16 import UserError, convert, undo, verify
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.families.types import Kind
from bf16_to_fp16.json_text import loads
from bf16_to_fp16.report.schema import REPORT
from bf16_to_fp16.rescaling.centred import centrable, centred_bias, key_biases
from bf16_to_fp16.rescaling.plan import Plan, describe_plan
from bf16_to_fp16.rescaling.weights import source_weights
from bf16_to_fp16.run.stock import load

pytestmark = pytest.mark.usefixtures("no_pictures")

DTYPES = {"pegasus": torch.bfloat16, "mbart": torch.float32}


def plan_of(source: Path, folder: Path) -> tuple[Path, Plan]:
    """Write and return a plan that moves queries, keys and norms and centres all keys but those of one attention."""
    layout = resolve(open_checkpoint(source))
    plan = random_plan(layout, (Kind.NORM, Kind.QUERY_KEY))
    plan = plan.model_copy(update={"centred_keys": [w.at for w in centrable(layout)[1:]]})
    path = folder / "plan.json"
    path.write_text(json.dumps({"schema": 1, "target": "half", "plan": describe_plan(plan)}))
    return path, plan


@pytest.fixture(scope="module", params=sorted(DTYPES))
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Plan]:
    """Return a source, its conversion by a hand-made plan that centres keys, and that plan."""
    root, kind = tmp_path_factory.mktemp(request.param), request.param
    source = tiny.save(tiny.small(kind, factor=1.0, dtype=DTYPES[kind]), root / "source", DTYPES[kind])
    path, plan = plan_of(source, root)
    assert convert(source, root / "out", plan=path).safe
    return source, root / "out", plan


Converted = tuple[Path, Path, Plan]


def copied(folder: Path, place: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Return a copy of a converted folder whose report was changed."""
    shutil.copytree(folder, place)
    report = loads((place / REPORT).read_bytes())
    change(report)
    (place / REPORT).write_text(json.dumps(report))
    return place


def test_centred_biases_are_written_and_the_function_is_the_sources(converted: Converted) -> None:
    source, out, plan = converted
    layout, written = resolve(checkpoint := open_checkpoint(source)), load_file(out / "model.safetensors")
    biases = key_biases(layout, plan.centred_keys)
    assert len(biases) == len(centrable(layout)) - 1
    for name, attention in biases.items():
        exponents = torch.tensor(plan.exponents[f"{attention.at}.query_key"])
        wanted = torch.ldexp(centred_bias(source_weights(checkpoint, layout), layout, attention), -exponents.double())
        assert torch.equal(written[name], wanted.half())
    report = loads((out / REPORT).read_bytes())
    assert report["plan"]["centred_keys"] == plan.centred_keys and set(report["source"]["replaced"]) == set(biases)
    assert report["source"]["made"] == []
    before, after = (outputs(load(folder, torch.float32)) for folder in (source, out))
    assert all((x - y).abs().max() <= 1e-2 * x.abs().max() for x, y in zip(before, after, strict=True))


def test_verify_makes_the_same_bits_again(converted: Converted) -> None:
    source, out, _ = converted
    for original in (None, source):
        found = verify(out, original=original)
        assert found["verified"] and found["verdict"] == "safe", found["problems"]


def test_undo_brings_back_every_bit_of_the_key_biases(converted: Converted, tmp_path: Path) -> None:
    source, out, plan = converted
    before, after = (load_file(f / "model.safetensors") for f in (source, undo(out, tmp_path / "back")))
    assert {n: t.dtype for n, t in before.items()} == {n: t.dtype for n, t in after.items()}
    biases = key_biases(resolve(open_checkpoint(source)), plan.centred_keys)
    assert all(torch.equal(before[name], after[name]) for name in biases)
    unlike = load_file(out / "model.safetensors")
    assert not any(torch.equal(before[name].half(), unlike[name]) for name in biases)


def test_a_changed_original_is_noticed_by_undo_and_verify(converted: Converted, tmp_path: Path) -> None:
    source, out, _ = converted
    name, other = sorted(loads((out / REPORT).read_bytes())["source"]["replaced"])[:2]

    def changed(report: dict[str, Any]) -> None:
        replaced = report["source"]["replaced"]
        replaced[name]["values"] = replaced[other]["values"]

    def swapped(report: dict[str, Any]) -> None:
        replaced = report["source"]["replaced"]
        replaced[name] = replaced[other]

    def removed(report: dict[str, Any]) -> None:
        del report["source"]["replaced"][name]

    def not_centred(report: dict[str, Any]) -> None:
        del report["plan"]["centred_keys"][0]

    for number, change in enumerate((changed, removed, not_centred)):
        folder = copied(out, tmp_path / str(number), change)
        with pytest.raises(UserError, match="take the one that convert wrote"):
            undo(folder, tmp_path / "back")
        found = verify(folder, run_model=False)
        assert found["checks"]["plan"] == "failed", change
    # With a hash that fits only the original tells.
    found = verify(copied(out, tmp_path / "swapped", swapped), original=source, run_model=False)
    assert {p["name"] for p in found["problems"] if p["check"] == "replay"} == {
        f"source.replaced.{name}.{key}" for key in ("values", "sha256")
    }
