"""Writing: every value is the source's times its power of two, correctly rounded, counted, and whole files or none."""

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support import forked

from bf16_to_fp16.checkpoint import files, formats, writer
from bf16_to_fp16.checkpoint.files import sha256_of
from bf16_to_fp16.checkpoint.reader import Checkpoint, open_checkpoint
from bf16_to_fp16.checkpoint.shards import FileRecord, Write
from bf16_to_fp16.checkpoint.writer import TensorStats, Written, write_fp16
from bf16_to_fp16.errors import UserError

EVERY_BF16 = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
EVERY_FP16 = EVERY_BF16.view(torch.float16)


def checkpoint_of(folder: Path, *shards: dict[str, torch.Tensor]) -> Checkpoint:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors")
        return open_checkpoint(folder)
    placed: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name)
        placed |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return open_checkpoint(folder)


def as_is(checkpoint: Checkpoint, exponent: int = 0) -> list[Write]:
    return [Write(i.name, i.shape, i.name, exponent=exponent) for i in checkpoint.tensors.values()]


def written(checkpoint: Checkpoint, writes: Sequence[Write], out: Path) -> tuple[dict[str, torch.Tensor], Written]:
    out.mkdir(parents=True)
    result = write_fp16(checkpoint, writes, out)
    tensors: dict[str, torch.Tensor] = {}
    for file in out.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors, result


def reference(source: torch.Tensor, write: Write) -> np.ndarray:
    """Return the scaled values in fp64, where bf16, fp16 and fp32 values lose nothing."""
    values = source.double()
    if write.gain != 1.0:
        values = (values * write.gain).float().double()
    exponents = torch.full((1,) * source.dim(), write.exponent, dtype=torch.int64)
    if write.row_exponents is not None:
        exponents = exponents + write.row_exponents.view(-1, *[1] * (source.dim() - 1))
    if write.column_exponents is not None:
        exponents = exponents + write.column_exponents
    with np.errstate(over="ignore"):
        return np.asarray(np.ldexp(values.numpy(), exponents.numpy()))


def brute_force(source: torch.Tensor, wanted: np.ndarray, stored: torch.Tensor) -> TensorStats:
    lossless = normal = flushed = nonfinite = nonzero = 0
    amax = 0.0
    tiny = torch.finfo(stored.dtype).tiny
    values = zip(source.flatten().tolist(), wanted.flatten().tolist(), stored.flatten().tolist(), strict=True)
    for before, exact, after in values:
        lossless += math.isfinite(after) and exact == after
        normal += math.isfinite(after) and abs(after) >= tiny
        flushed += after == 0 and before != 0
        nonfinite += not math.isfinite(after)
        nonzero += before != 0
        amax = math.nan if math.isnan(after) or math.isnan(amax) else max(amax, abs(after))
    return TensorStats(source.numel(), lossless, normal, flushed, nonfinite, amax, nonzero)


def assert_bits(stored: torch.Tensor, wanted: np.ndarray) -> None:
    with np.errstate(over="ignore"):
        rounded = torch.from_numpy(np.asarray(wanted.astype(np.float16)))
    nan = rounded.isnan()
    assert torch.equal(stored.isnan(), nan)
    assert torch.equal(stored.view(torch.int16)[~nan], rounded.view(torch.int16)[~nan])


def assert_written(folder: Path, source: torch.Tensor, write: Write) -> None:
    """Write a tensor, and assert that its bits and its counts are right; as text, since NaN is not equal to itself."""
    stored, result = written(checkpoint_of(folder / "in", {"w": source}), [write], folder / "out")
    wanted = reference(source, write)
    assert_bits(stored["w"], wanted)
    assert repr(result.stats["w"]) == repr(brute_force(source, wanted, stored["w"]))


@pytest.mark.parametrize("source", [EVERY_BF16, EVERY_FP16], ids=["bf16", "fp16"])
def test_every_16_bit_value_under_every_exponent_is_rounded_correctly(tmp_path: Path, source: torch.Tensor) -> None:
    checkpoint = checkpoint_of(tmp_path / "in", {"w": source})
    writes = [Write(f"{e}", (1 << 16,), "w", exponent=e) for e in range(-30, 31)]
    stored, result = written(checkpoint, writes, tmp_path / "out")
    for write in writes:
        wanted = reference(source, write)
        assert_bits(stored[write.name], wanted)
        got = stored[write.name].double().numpy()
        stats = result.stats[write.name]
        assert stats.lossless == np.count_nonzero((got == wanted) & np.isfinite(got))
        assert stats.flushed_to_zero == np.count_nonzero((got == 0) & (wanted != 0))
        assert stats.nonfinite == np.count_nonzero(~np.isfinite(got))


@pytest.mark.parametrize("exponent", [-400, -200, -127, -126, -101, -100, 0, 100, 101, 120, 127, 150, 165, 400])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_exponents_beyond_one_fp32_factor_lose_nothing(tmp_path: Path, exponent: int, dtype: torch.dtype) -> None:
    torch.manual_seed(exponent)
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (4096,), dtype=torch.int64).to(torch.int32)
    bits[:512] &= 0x807FFFFF - (1 << 32)  # subnormal in fp32
    source = EVERY_BF16 if dtype == torch.bfloat16 else bits.view(torch.float32)
    assert_written(tmp_path, source, Write("w", tuple(source.shape), "w", exponent=exponent))


@pytest.mark.parametrize(
    ("row", "column"), [(3, -5), (100, -100), (-100, 100), (200, -190), (-140, 140), (-140, 160), (-249, 248)]
)
def test_exponents_of_rows_and_columns_add_up_whatever_their_sizes(tmp_path: Path, row: int, column: int) -> None:
    rows, columns = torch.full((256,), row), torch.full((256,), column)
    rows[::3] += 1
    columns[::5] -= 2
    write = Write("w", (256, 256), "w", exponent=1, row_exponents=rows, column_exponents=columns)
    assert_written(tmp_path, EVERY_BF16.view(256, 256), write)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_pieces_give_the_values_of_the_whole(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=2)))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]))
    torch.manual_seed(data.draw(st.integers(0, 1 << 20)))
    scattered = torch.randn(shape) * torch.exp2(torch.randint(-24, 12, shape)) * (torch.rand(shape) > 0.1)
    source = scattered.to(dtype)
    exponents = [torch.randint(-4, 4, (n,)) if data.draw(st.booleans()) else None for n in shape]
    rows, columns = (*exponents, None, None)[:2]
    whole: dict[str, Any] = {"exponent": data.draw(st.integers(-3, 3)), "gain": data.draw(st.sampled_from([1.0, 0.3]))}
    write = Write("w", shape, "w", row_exponents=rows, column_exponents=columns, **whole)
    folder = tmp_path_factory.mktemp("any")
    checkpoint = checkpoint_of(folder / "in", {"w": source})
    elements = writer.ELEMENTS
    writer.ELEMENTS = data.draw(st.sampled_from([1, 3, 8, elements]))
    try:
        stored, result = written(checkpoint, [write], folder / "out")
    finally:
        writer.ELEMENTS = elements
    wanted = reference(source, write)
    if dtype == torch.float64:  # through fp32, as documented
        assert torch.equal(stored["w"], torch.from_numpy(wanted).float().half())
    else:
        assert_bits(stored["w"], wanted)
    assert repr(result.stats["w"]) == repr(brute_force(source, wanted, stored["w"]))


def test_generated_values_are_scaled_like_stored_ones_and_left_alone_in_memory(tmp_path: Path) -> None:
    data = torch.randn(4, 6, dtype=torch.float64)
    before = data.clone()
    checkpoint = checkpoint_of(tmp_path / "in", {"w": torch.ones(2)})
    writes = [Write("p", (4, 6), None, data, exponent=-2, gain=0.5), *as_is(checkpoint)]
    stored, _ = written(checkpoint, writes, tmp_path / "out")
    assert torch.equal(stored["p"], (data / 8).float().half())
    assert torch.equal(data, before)


def test_writing_back_gives_the_source_bit_for_bit_where_nothing_was_lost(tmp_path: Path) -> None:
    bits = EVERY_BF16[EVERY_BF16.isfinite()]
    there = checkpoint_of(tmp_path / "in", {"w": bits, "f": torch.tensor([1.5, -0.375, 3.0])})
    _, result = written(there, as_is(there, -7), tmp_path / "half")
    (tmp_path / "half" / "config.json").write_text("{}")
    back = open_checkpoint(tmp_path / "half")
    writes = [Write(n, back.tensors[n].shape, n, exponent=7).as_dtype(d) for n, d in (("w", "BF16"), ("f", "F32"))]
    stored, _ = written(back, writes, tmp_path / "back")
    exact = back.read("w").double() * 2.0**7 == bits.double()
    assert int(exact.sum()) == result.stats["w"].lossless > 5_000
    assert torch.equal(stored["w"].view(torch.int16)[exact], bits.view(torch.int16)[exact])
    assert torch.equal(stored["f"], there.read("f"))


def mixed(folder: Path) -> Checkpoint:
    """Two shards of mixed dtypes, whose tensors do not follow each other in the alphabet."""
    torch.manual_seed(1)
    one = {"z": torch.randn(900, 1000).bfloat16(), "b": torch.randn(3), "dropped": torch.randn(40).half()}
    two = {"y": torch.randn(1000, 700), "a": torch.randn(11).bfloat16()}
    return checkpoint_of(folder, one, two)


def test_the_bytes_depend_neither_on_the_order_nor_on_hashing_and_the_hashes_are_theirs(tmp_path: Path) -> None:
    checkpoint = mixed(tmp_path / "in")
    writes = [w for w in as_is(checkpoint, -3) if w.name != "dropped"]
    results = []
    for number, (order, hashes) in enumerate(((writes, True), (writes[::-1], True), (writes, False))):
        out = tmp_path / str(number)
        out.mkdir()
        results.append(write_fp16(checkpoint, order, out, hashes=hashes))
        for record in results[-1].files:
            data = (tmp_path / "0" / record.name).read_bytes()
            digest = hashlib.sha256(data).hexdigest() if hashes else None
            assert record == FileRecord(record.name, len(data), digest) and (out / record.name).read_bytes() == data
    assert results[0] == results[1] and len(results[0].files) == 3
    assert results[0].source_sha256 == {f.name: sha256_of(f) for f in checkpoint.weight_files}
    assert results[2].source_sha256 == {}


def test_the_output_is_sharded_like_the_source_and_what_is_generated_goes_last(tmp_path: Path) -> None:
    checkpoint = mixed(tmp_path / "in")
    writes = [*as_is(checkpoint), Write("0", (2,), None, torch.ones(2))]
    written(checkpoint, writes, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    one, two = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    assert index["weight_map"] == {"0": two, "a": two, "b": one, "dropped": one, "y": two, "z": one}
    elements = 900 * 1000 + 3 + 40 + 1000 * 700 + 11 + 2
    assert index["metadata"] == {"total_parameters": elements, "total_size": 2 * elements}
    (tmp_path / "out" / "config.json").write_text("{}")
    again = open_checkpoint(tmp_path / "out")
    assert {t.dtype for t in again.tensors.values()} == {"F16"}
    header = (tmp_path / "out" / one).read_bytes()[8:200]
    assert header.startswith(b'{"__metadata__":{"format":"pt"},"b"')


def test_wider_dtypes_come_first_so_that_every_tensor_is_aligned(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path / "in", {"a": torch.ones(3).half(), "b": torch.ones(3).half()})
    written(checkpoint, [Write("a", (3,), "a").as_dtype("BF16"), Write("b", (3,), "b").as_dtype("F32")], tmp_path / "o")
    (tmp_path / "o" / "config.json").write_text("{}")
    places = open_checkpoint(tmp_path / "o").tensors
    assert places["b"].offset % 8 == 0 and places["a"].offset == places["b"].offset + 12


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_failing_disk_and_an_interrupt_leave_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    checkpoint = mixed(tmp_path / "in")
    (tmp_path / "out").mkdir()
    real, calls = getattr(os, call), 0

    def failing(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        patch.setattr(writer, "FLUSHED", 1 << 16)
        with pytest.raises(UserError, match=r"model-0000\d-of-00002.safetensors: Input/output error"):
            write_fp16(checkpoint, as_is(checkpoint), tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_fp16(checkpoint, as_is(checkpoint), tmp_path / "out", advance=interrupt)
    assert not list((tmp_path / "out").iterdir())


def test_a_file_that_is_there_already_is_neither_overwritten_nor_removed(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path / "in", {"w": torch.ones(2)})
    before = (tmp_path / "in" / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="File exists"):
        write_fp16(checkpoint, as_is(checkpoint), tmp_path / "in")
    assert (tmp_path / "in" / "model.safetensors").read_bytes() == before


def test_memory_does_not_grow_with_the_file_nor_with_its_rows(tmp_path: Path) -> None:
    """Files of 84 MB, of many rows and of few."""

    def peak() -> int:
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10

    def write_all() -> None:
        before = peak()
        for place in places:
            checkpoint = open_checkpoint(place)
            rows = {name: torch.ones(info.shape[0], dtype=torch.int32) for name, info in checkpoint.tensors.items()}
            (place / "out").mkdir()
            writes = [replace(write, row_exponents=rows[write.name]) for write in as_is(checkpoint, -2)]
            write_fp16(checkpoint, writes, place / "out")
        assert 0 < peak() - before < 64 << 20

    shapes = [("BF16", (40_960, 1024)), ("BF16", (3, 14 << 20)), ("F32", (6_840, 3072))]
    places = [tmp_path / str(number) for number in range(len(shapes))]
    block = (torch.randn(1 << 18) * 0.05).view(torch.uint8).numpy().tobytes()
    for place, (dtype, shape) in zip(places, shapes, strict=True):
        place.mkdir()
        (place / "config.json").write_text("{}")
        nbytes = math.prod(shape) * (4 if dtype == "F32" else 2)
        header = json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}}).encode()
        with open(place / "model.safetensors", "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for _ in range(nbytes // len(block)):
                file.write(block)
            file.write(bytes(nbytes % len(block)))
    assert forked.in_a_fork(write_all, tmp_path / "log")[0] == 0, (tmp_path / "log").read_text()
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("hashes", [False, True])
@pytest.mark.parametrize("one_file", [False, True])
def test_every_byte_of_a_tensor_is_read_written_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashes: bool, one_file: bool
) -> None:
    shards = [
        {"b": torch.randn(1 << 11, 700).bfloat16(), "a": torch.randn(300, 7)},
        {"d": torch.randn(5).bfloat16(), "c": torch.randn(40, 30_000).bfloat16()},
    ]
    checkpoint = checkpoint_of(tmp_path / "in", *shards)
    out = tmp_path / "out"
    out.mkdir()
    seen: list[tuple[str, int, int]] = []
    read, write, wrote = files.read_exactly, os.write, 0

    def counted_read(source: FileIO, buffer: memoryview, offset: int) -> None:
        read(source, buffer, offset)
        seen.append((str(source.name), offset, len(buffer)))

    def counted_write(descriptor: int, data: memoryview) -> int:
        nonlocal wrote
        count = write(descriptor, data[:99_991])  # a write may end anywhere
        wrote += count
        return count

    for module in (formats, writer):
        monkeypatch.setattr(module, "read_exactly", counted_read)
    monkeypatch.setattr(os, "write", counted_write)
    told: list[tuple[int, int]] = []
    how: dict[str, Any] = {"hashes": hashes, "one_file": one_file, "advance": lambda *done: told.append(done)}
    result = write_fp16(checkpoint, as_is(checkpoint), out, **how)
    assert len(result.files) == (1 if one_file else 3)
    assert wrote == sum(record.nbytes for record in result.files)
    assert told == sorted(told) and told[-1] == (wrote, wrote)
    assert all((out / record.name).stat().st_size == record.nbytes for record in result.files)
    for info in checkpoint.tensors.values():
        begin, end = info.offset, info.offset + info.nbytes
        within = [min(o + n, end) - max(o, begin) for name, o, n in seen if name == str(info.file)]
        assert sum(n for n in within if n > 0) == info.nbytes, info.name
    # What is hashed on the way out is not read again.
    assert not [name for name, _, _ in seen if Path(name).parent == out]


def test_all_is_on_the_disk_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = mixed(tmp_path / "in")
    (tmp_path / "out").mkdir()
    write, fsync = os.write, os.fsync
    events: dict[int, str] = {}

    def seen(descriptor: int, data: memoryview) -> int:
        events[os.fstat(descriptor).st_ino] = "write"
        return write(descriptor, data)

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        events[os.fstat(descriptor).st_ino] = "sync"

    monkeypatch.setattr(os, "write", seen)
    monkeypatch.setattr(os, "fsync", synced)
    write_fp16(checkpoint, as_is(checkpoint), tmp_path / "out")
    files = {path.stat().st_ino for path in (tmp_path / "out").iterdir()}
    assert len(files) == 3 and events == dict.fromkeys(files, "sync")
