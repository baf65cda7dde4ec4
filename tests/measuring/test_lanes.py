"""A walk over the files gives what whole models give, to the last bit, in the memory of a block."""

import json
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import exhaustive, tiny
from support.contract import MOVABLE, random_plan
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from bf16_to_fp16.checkpoint.reader import Checkpoint, open_checkpoint
from bf16_to_fp16.devices import Device
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.measuring.batch import Batch, run_batch
from bf16_to_fp16.measuring.fidelity import compared, output_on
from bf16_to_fp16.measuring.lanes import Change, Walk, results_of
from bf16_to_fp16.measuring.meter import observe_ranges
from bf16_to_fp16.measuring.observer import SiteObserver
from bf16_to_fp16.measuring.probe import batches
from bf16_to_fp16.measuring.sites import Site, sites_of_all
from bf16_to_fp16.measuring.source_runs import observe_source
from bf16_to_fp16.measuring.stock import STOCK_LOCK, load
from bf16_to_fp16.progress import Progress
from bf16_to_fp16.rescaling.plan import describe_plan

WAYS = {
    "fp32": (torch.float32, False, "eager"),
    "bf16": (torch.bfloat16, False, "eager"),
    "stock": (torch.float16, False, "eager"),
    "stock, SDPA": (torch.float16, False, "sdpa"),
    "half": (torch.float16, True, "eager"),
    "half, SDPA": (torch.float16, True, "sdpa"),
    "amp": (torch.float32, False, "eager"),
}


def batch_of(*ids: int) -> Batch:
    row = torch.tensor([ids])
    return Batch("", row, torch.ones_like(row), row, torch.ones_like(row))


FEW_IDS = batch_of(5, 9)


def run(model: Any, batch: Batch, amp: bool) -> list[Tensor]:
    with torch.no_grad(), torch.autocast("cpu", torch.float16) if amp else nullcontext():
        if not batch.generate:
            return [run_batch(model, batch)[0]]
        more = {"num_beams": 2, "do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4}
        return [model.generate(input_ids=batch.input_ids, attention_mask=batch.attention_mask, **more)]


def shown(site: Site) -> tuple[Any, ...]:
    counts: tuple[int, ...] = (site.nonfinite, site.saturated, site.benign)
    if ":weight" in site.name:  # autocast casts a weight once for all lanes
        counts = tuple(map(bool, counts))
    return (site.name, site.dtype, site.limit, site.amax, *counts, site.reason)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints that overflow in fp16: tied and untied heads, in shards."""
    root = tmp_path_factory.mktemp("lanes")
    small: dict[str, Any] = {"num_layers": 2, "num_decoder_layers": 1}
    made = {kind: tiny.build(kind, **small) for kind in ("t5", "gated", "umt5", "t5-encoder")}
    made |= {kind: tiny.build(kind, encoder_layers=1, decoder_layers=2) for kind in ("pegasus", "mbart")}
    folders = {kind: tiny.save(model, root / kind, max_shard_size="20KB") for kind, model in made.items()}
    assert len(list(folders["gated"].glob("*.safetensors"))) > 1
    return folders


KINDS = ("t5", "gated", "umt5", "pegasus", "mbart", "t5-encoder")
EVERY = [(kind, way) for way in WAYS for kind in KINDS]
FEW = [("gated", "stock"), ("gated", "half, SDPA"), ("t5", "half"), ("t5-encoder", "bf16"), ("pegasus", "amp")]


@pytest.mark.parametrize(("kind", "way"), exhaustive.beyond(FEW, EVERY))
def test_lanes_give_the_outputs_and_the_figures_of_a_whole_model(kind: str, way: str, folders: dict[str, Path]) -> None:
    dtype, half, attention = WAYS[way]
    whole = load(folders[kind], dtype, half=half, attention=attention)
    made = batches(whole.config, None, None)
    inputs = [batch for batch in made if batch.kind in ("random ids", "padded", "generate")]
    observer = SiteObserver(whole)
    with observer:
        expected = [run(whole, batch, way == "amp") for batch in inputs]

    def observed(batch: Batch, model: Any) -> tuple[list[Tensor], list[Site]]:
        with SiteObserver(model) as observer:
            return run(model, batch, way == "amp"), observer.sites()

    walk = Walk(open_checkpoint(folders[kind]))
    lanes = [walk.add(partial(observed, b), dtype, half=half, attention=attention) for b in inputs]
    walk.run()
    for lane, outputs in zip(lanes, expected, strict=True):
        given, _ = lane.result
        assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(given, outputs, strict=True))
    seen = sites_of_all(sites for _, sites in results_of(lanes))
    first, second = ([s for s in sites if s.calls] for sites in (seen, observer.sites()))
    assert sorted(map(shown, first), key=str) == sorted(map(shown, second), key=str)
    # What broke first, and what ran first, stand in the same order.
    orders = [[site.name for site in sorted(sites, key=lambda s: s.order)] for sites in (first, second)]
    assert orders[0] == orders[1]


@pytest.mark.parametrize("kind", exhaustive.beyond(["t5"], ["t5", "gated", "pegasus", "mbart"]))
def test_lanes_of_every_way_in_one_walk_share_no_weights(kind: str, tmp_path: Path) -> None:
    """16 bits first, of weights that lose by them."""
    folder = tiny.save(tiny.build(kind, dtype=torch.float32, **tiny.few_layers(kind)), tmp_path, torch.float32)
    batch = batches(load(folder, torch.float32).config, None, None)[0]

    def smaller(name: str, tensor: Tensor) -> Tensor:
        return tensor * 0.75

    def expected(dtype: torch.dtype, half: bool, attention: str, amp: bool, change: Change | None) -> Tensor:
        whole = load(folder, dtype, half=half, attention=attention)
        for name, weight in whole.named_parameters():
            if change is not None:
                weight.data = change(name, weight.data)
        return run(whole, batch, amp)[0]

    ways = [(*way, name == "amp", change) for name, way in WAYS.items() for change in (None, smaller)]
    ways.sort(key=lambda way: way[0].itemsize)
    walk = Walk(open_checkpoint(folder))
    lanes = [
        walk.add(partial(run, batch=batch, amp=amp), dtype, half=half, attention=attention, change=change)
        for dtype, half, attention, amp, change in ways
    ]
    walk.run()
    for lane, way in zip(lanes, ways, strict=True):
        (logits,), whole = lane.result, expected(*way)
        assert logits.dtype == whole.dtype and torch.equal(logits.nan_to_num(7), whole.nan_to_num(7)), way


@pytest.mark.parametrize(("kind", "amp"), [("pegasus", False), ("gated", True)])
def test_a_walk_holds_the_weights_of_one_place_through_a_generation_too(
    kind: str, amp: bool, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tied head as well, whose weights are another place's embedding, and where autocast keeps copies."""
    folder = folders[kind]
    batch = next(b for b in batches(load(folder, torch.float32).config, None, None) if b.generate)
    held: list[tuple[str, StorageWeakRef]] = []
    run_place, resume, read = Walk._run_place, Walk._resume, Checkpoint.read

    def watched(walk: Walk, *more: Any) -> None:
        assert [name for name, storage in held if not storage.expired()] == []
        run_place(walk, *more)

    def loaded(walk: Walk, lane: Any) -> None:
        if lane.waits_at is not None:
            stored = lane.weights.stored[lane.waits_at]
            held.extend((name, StorageWeakRef(p.untyped_storage())) for name, p in stored)
        resume(walk, lane)

    def noted(checkpoint: Checkpoint, name: str) -> Tensor:
        tensor = read(checkpoint, name)
        held.append((name, StorageWeakRef(tensor.untyped_storage())))
        return tensor

    monkeypatch.setattr(Walk, "_run_place", watched)
    monkeypatch.setattr(Walk, "_resume", loaded)
    monkeypatch.setattr(Checkpoint, "read", noted)
    walk = Walk(open_checkpoint(folder))
    walk.add(partial(run, batch=batch, amp=amp), torch.float32)
    walk.run()
    assert len(held) > len({name for name, _ in held}) > 8


def test_what_convert_observes_is_what_a_whole_model_shows_on_every_batch(folders: dict[str, Path]) -> None:
    whole = load(folders["pegasus"], torch.float32)
    inputs = batches(whole.config, None, None)
    expected = observe_ranges(whole, inputs)
    checkpoint = open_checkpoint(folders["pegasus"])
    found = observe_source(checkpoint, inputs, Progress(quiet=True), Device("cpu"))
    with torch.no_grad():
        outputs = [output_on(batch, run_batch(whole, batch)) for batch in compared(inputs)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found.reference.fp32, outputs, strict=True))
    assert set(found.ranges) == set(expected)
    for path, seen in expected.items():
        for side in ("input", "output"):
            ours, theirs = getattr(found.ranges[path], side), getattr(seen, side)
            assert torch.equal(ours.amax, theirs.amax) and torch.equal(ours.mean_square, theirs.mean_square)
        assert found.ranges[path].scores == seen.scores


def assert_walked_as_whole(folder: Path, batch: Batch, dtype: torch.dtype = torch.float32, half: bool = False) -> None:
    walk, whole = Walk(open_checkpoint(folder)), load(folder, dtype, half=half)
    lane = walk.add(partial(run, batch=batch, amp=False), dtype, half=half)
    walk.run()
    assert torch.equal(lane.result[0], run(whole, batch, False)[0])


def test_positions_and_bias_that_no_file_holds_are_those_that_stock_code_makes(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny.save(tiny.build("pegasus", encoder_layers=1, decoder_layers=1), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if "embed_positions" not in n and n != "final_logits_bias"}
    assert len(kept) == len(tensors) - 3
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    assert_walked_as_whole(folder, batch_of(*range(3, 43)), torch.float16, half=True)


def test_a_router_that_casts_its_own_weights_does_so_in_each_lane_and_pass(tmp_path: Path) -> None:
    model = tiny.small("switch")
    routers = [name for name, _ in model.named_modules() if name.endswith(".router")]
    model.get_submodule(routers[0]).classifier.weight.data[0, 0] = 2.0**17
    folder = tiny.save(model, tmp_path)
    whole, walk = load(folder, torch.float16, half=True), Walk(open_checkpoint(folder))
    batch = batches(whole.config, None, None)[0]

    def twice(model: Any) -> tuple[list[Tensor], set[str]]:
        with SiteObserver(model) as observer:
            return [run(model, batch, False)[0] for _ in range(2)], {site.name for site in observer.sites()}

    lanes = [walk.add(twice, torch.float16, half=True) for _ in range(2)]
    walk.run()
    expected, sites = twice(whole)
    assert expected[0].isnan().any() and {f"{router}:weight" for router in routers} <= sites
    for outputs, seen in results_of(lanes):
        assert seen == sites
        assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(outputs, expected, strict=True))


def test_walks_and_loading_go_one_after_another_in_threads_of_one_process(folders: dict[str, Path]) -> None:
    checkpoint, waiting = open_checkpoint(folders["t5"]), Walk(open_checkpoint(folders["t5"]))
    waiting.add(lambda model: None, torch.float32)
    todo = (waiting.run, lambda: Walk(checkpoint).add(id, torch.float32), lambda: load(folders["t5"], torch.float32))
    threads = [threading.Thread(target=each, daemon=True) for each in todo]
    with STOCK_LOCK:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(0.3)
        assert all(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


def test_a_table_that_cannot_be_read_is_told_without_a_word_of_torchs(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def fails(*_: Any) -> Tensor:
        raise UserError("gone")

    monkeypatch.setattr(Checkpoint, "read_some_rows", fails)
    walk = Walk(open_checkpoint(folders["t5"]))
    walk.add(lambda model: run_batch(model, FEW_IDS), torch.float32)
    with pytest.raises(UserError, match="gone"):
        walk.run()
    assert not [each for each in recwarn if "always_call" in str(each.message)]


def test_fewer_ids_than_the_number_of_the_padding_are_looked_up(tmp_path: Path) -> None:
    model = tiny.build("pegasus", encoder_layers=1, decoder_layers=1, pad_token_id=90)
    folder = tiny.save(model, tmp_path)
    assert_walked_as_whole(folder, batch_of(5, 90, 7))


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_error_in_one_lane_ends_all(error: type[BaseException], folders: dict[str, Path]) -> None:
    walk = Walk(open_checkpoint(folders["t5"]))
    ended, before = [], threading.active_count()

    def fails(model: Any) -> None:
        model.encoder.final_layer_norm.register_forward_hook(lambda *_: (_ for _ in ()).throw(error("here")))
        run_batch(model, FEW_IDS)

    def waits(model: Any) -> None:
        try:
            run_batch(model, FEW_IDS)
        finally:
            ended.append(model)

    lanes = [walk.add(waits, torch.float32), walk.add(fails, torch.float32), walk.add(waits, torch.float16)]
    with pytest.raises(error, match="here"):
        walk.run()
    assert len(ended) == 2 and threading.active_count() == before
    assert not any(hasattr(lane, "result") for lane in lanes)


CONVERTED_TWICE = """
import sys

import torch

from bf16_to_fp16 import convert
from bf16_to_fp16.measuring import probe
from bf16_to_fp16.measuring.batch import REPEATED


def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) >> 10


torch.set_num_threads(1)
gather = probe.audit_batches
probe.audit_batches = lambda *a, **k: [batch for batch in gather(*a, **k) if batch.kind == REPEATED or batch.generate]
for folder in sys.argv[1:]:
    before = peak()
    convert(folder, f"{folder}-fp16", plan=f"{folder}.json")
print(peak() - before)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak is not told")
def test_a_conversion_with_its_audit_takes_the_memory_of_a_few_blocks(tmp_path: Path) -> None:
    """Of 17 blocks of 8.5 MB in fp32, in a process of its own, by a drawn plan, which needs no search."""
    folders = [tmp_path / "small", tmp_path / "large"]
    for folder, layers in zip(folders, (1, 16), strict=True):
        tiny.save(tiny.t5(d_model=1024, d_ff=1024, num_layers=layers, num_decoder_layers=1), folder)
        drawn = random_plan(resolve(open_checkpoint(folder)), MOVABLE)
        folder.with_suffix(".json").write_text(json.dumps({"plan": describe_plan(drawn)}))
    words, freed = [sys.executable, "-c", CONVERTED_TWICE, *map(str, folders)], {"MALLOC_MMAP_THRESHOLD_": "524288"}
    done = subprocess.run(words, env=os.environ | freed, capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout.split()[-1]) < 100, done.stderr
