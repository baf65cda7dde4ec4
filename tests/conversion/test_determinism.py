"""Same input, same bytes out; and what one bound and plan of a source leave to the next."""

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import deserialize
from support import exhaustive, faults, tiny

from bf16_to_fp16 import convert
from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.bounds.certificate import bound
from bf16_to_fp16.bounds.findings import Certificate
from bf16_to_fp16.bounds.spectral import Spectra
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.conversion.planning import Opened
from bf16_to_fp16.families.resolve import resolve, source_weights
from bf16_to_fp16.rescaling.edits import changed_by
from bf16_to_fp16.rescaling.plan import Plan
from bf16_to_fp16.rescaling.planner import make_plan
from bf16_to_fp16.rescaling.rounding_loss import LossTable, Tables, loss_table


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.small("gated")


@pytest.fixture(scope="module")
def source(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.save(model, tmp_path_factory.mktemp("determinism") / "source")
    for name in ("tokenizer.json", "spiece.model", "special_tokens_map.json", "added_tokens.json"):
        (folder / name).write_text(json.dumps({"name": name}))
    return folder


@pytest.fixture(scope="module")
def reference(source: Path) -> dict[str, str]:
    return converted(source, source.parent / "reference")


def converted(source: Path, out: Path, **options: Any) -> dict[str, str]:
    result = convert(source, out, **{"run_model": False} | options)
    assert result.out is not None
    return faults.content(result.out) | {"plan": result.plan.model_dump_json()}


def test_the_number_of_threads_changes_no_byte(first_batch: None, tmp_path: Path) -> None:
    source = tiny.save(tiny.small("t5-encoder", num_layers=1), tmp_path / "source")
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(converted(source, tmp_path / f"out{threads}", run_model=True))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


def test_the_sources_shards_change_no_byte(model: Any, source: Path, reference: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "source")
    (tmp_path / "source" / "model.safetensors").unlink()
    tiny.save(model, tmp_path / "source", max_shard_size="6KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 3
    found = converted(tmp_path / "source", tmp_path / "out")
    folders = (tmp_path / "out", source.parent / "reference")
    weights, expected = (
        {name: data for file in folder.glob("*.safetensors") for name, data in deserialize(file.read_bytes())}
        for folder in folders
    )
    assert weights == expected and all(found[name] == reference[name] for name in ("plan", "config.json"))


def test_the_order_of_the_file_system_changes_no_byte(
    source: Path, reference: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, asked = os.listdir, []

    def reversed_order(path: Any = ".") -> list[str]:
        asked.append(str(path))
        return sorted(listed(path), reverse=True)

    monkeypatch.setattr(os, "listdir", reversed_order)
    assert converted(source, tmp_path / "out") == reference
    assert str(source) in asked


GATE, SCORES = "encoder.block.0.layer.1.DenseReluDense.gate", "encoder.block.1.layer.0.SelfAttention.scores"
CENTRED = ["model.encoder.layers.1.self_attn"]
EDITS = {
    "pegasus": Plan(family="pegasus", exponents={"model.encoder.layers.0.neuron": -3}, centred_keys=CENTRED),
    "gated": Plan(family="t5", exponents={GATE: -3, SCORES: -2}),
    "olmo2": Plan(family="olmo2", exponents={"model.layers.0.mlp.gate": -3}),
}

PLACES = ((-24, "half"), (-2, "train"), (3, "fp16-accumulate"))


def assert_alike(again: Certificate, alone: Certificate) -> None:
    """Assert that what was kept changes no bound; an eigenvalue that is carried over is a little larger."""
    limits = {site.name: site.bound for site in alone.sites}
    assert limits.keys() == {site.name for site in again.sites}
    assert all(0.999999 <= site.bound / limits[site.name] <= 1.01 for site in again.sites if site.bound)


def feed_forwards(spectra: Spectra) -> set[frozenset[str]]:
    """Return the names of weights of feed-forwards of which something is kept; of a table there is one name."""
    return {names for names, _ in spectra.kept if len(names) > 1}


@pytest.mark.parametrize("kind", exhaustive.beyond(["gated", "pegasus"], EDITS))
def test_bounds_and_plans_are_those_that_nothing_was_kept_for(kind: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny.save(tiny.small(kind, factor=8.0), tmp_path / "source"))
    source = Opened(checkpoint, resolve(checkpoint), [])
    edited = replace(source, edits=EDITS[kind], before=source)
    tables, computed = Tables(), []
    for opened in (source, edited):
        read = opened.weights(opened.layout)
        kept = tables if opened is source else tables.without(changed_by(opened.layout, EDITS[kind]))
        for r, target in PLACES[::2] if kind == "gated" else PLACES[:2]:
            arithmetic = Arithmetic(64, planned=dict.fromkeys(opened.layout.streams, r))
            again, alone = (
                bound(opened.layout, read, arithmetic, target=target, spectra=spectra)
                for spectra in (opened.spectra, Spectra(read))
            )
            assert_alike(again, alone)
            margin = 6.0 if target == "train" else 0.1  # by which other norms' gains move
            planned, plain = (
                make_plan(opened.layout, read, again.ranges, margin_bits=margin, known=known) for known in (kept, None)
            )
            assert planned == plain
        computed.append(len(feed_forwards(opened.spectra)))
    before, after = (opened.weights(opened.layout) for opened in (source, edited))
    changed = changed_by(source.layout, EDITS[kind])
    assert changed == {name for name in source.layout.tensors if not torch.equal(before(name), after(name))}
    # All of the edited source's feed-forwards but one were there, and most of its tables.
    layers = len(source.layout.feed_forwards)
    still = replace(source, edits=EDITS[kind], before=source).spectra
    assert len(feed_forwards(still)) == layers - 1 == computed[0] - 1
    assert 0 < len(tables.without(changed).kept) < len(tables.kept)


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        *(("pegasus", f"{name}.bias") for name in ("fc1", "final_layer_norm")),
        *(("gated", f"{name}.weight") for name in ("wi_0", "wi_1", "wo", "1.layer_norm")),
    ],
)
def test_nothing_is_kept_of_weights_that_are_others(kind: str, part: str, tmp_path: Path) -> None:
    """Edits leave bounds of outputs as they are, so here weights are changed that nothing makes up for."""
    checkpoint = open_checkpoint(tiny.save(tiny.small(kind), tmp_path / "source"))
    layout = resolve(checkpoint)
    read = source_weights(checkpoint, layout)
    changed = next(name for name in layout.tensors if name.endswith(part))
    spectra = Spectra(read)
    unlike = [bound(layout, read, refine=refine, spectra=spectra) for refine in (0, 8)]
    assert len({tuple(site.bound for site in each.sites) for each in unlike}) == 2

    def times(factors: torch.Tensor, name: str) -> torch.Tensor:
        weight = read(name)
        return weight * factors.view(weight.shape) if name == changed else weight

    count = read(changed).numel()
    signs = torch.randint(0, 2, (count,), generator=torch.Generator().manual_seed(0)) * 2 - 1  # rows keep their lengths
    for refine, factors in product((0, 8), (torch.arange(1, count + 1), signs)):
        other = partial(times, factors)
        both = spectra.under(other, {changed}), Spectra(other)
        assert_alike(*(bound(layout, other, refine=refine, spectra=each) for each in both))


def test_tables_keep_no_more_than_they_may() -> None:
    table, computed = loss_table(torch.randn(8, 8), 0), list[str]()
    tables = Tables(most=2 * (table.counts.nbytes + table.errors.nbytes))

    def compute(name: str) -> LossTable:
        computed.append(name)
        return table

    for name in ("a", "b", "c", "a", "c"):
        tables.of(name, None, partial(compute, name))
    assert computed == ["a", "b", "c", "c"] and set(tables.kept) == {("a", None), ("b", None)}
