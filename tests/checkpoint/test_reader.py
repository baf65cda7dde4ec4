"""Reading: what is stored is what comes back, and nothing damaged or foreign gets past the door."""

import hashlib
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from bf16_to_fp16.checkpoint.files import sha256_of
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.errors import UserError

CONFIG = {"model_type": "t5", "d_model": 4}


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    stored = {"a": torch.randn(5, 3).bfloat16(), "b": torch.randn(7), "c": torch.randn(2, 3, 2).half()}
    stored |= {"d": torch.randn(3).double(), "empty": torch.empty(0, 4), "ids": torch.arange(6).view(2, 3)}
    return stored | {"scalar": torch.tensor(2.5)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "model-00002-of-00002.safetensors")
    write_index(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    return tmp_path


def write_index(folder: Path, placed: object) -> None:
    index = {"metadata": {"total_size": 16}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def entry(begin: int, end: int, dtype: str = "F32", shape: list[int] | None = None) -> dict[str, object]:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def test_every_tensor_comes_back_with_its_dtype_shape_and_bits_in_memory_of_its_own(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert list(checkpoint.tensors) == sorted(tensors())
    for name, tensor in tensors().items():
        assert same(checkpoint.read(name), tensor)
        assert checkpoint.tensors[name].shape == tuple(tensor.shape)
    assert (checkpoint.config, checkpoint.index, checkpoint.revision) == (CONFIG, None, None)
    assert checkpoint.source == str(folder)
    before = (folder / "model.safetensors").read_bytes()
    checkpoint.read("a").zero_()
    assert same(checkpoint.read("a"), tensors()["a"]) and (folder / "model.safetensors").read_bytes() == before


def test_rows_are_read_alone(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    for start, stop in ((0, 5), (1, 3), (4, 5), (2, 2)):
        assert same(checkpoint.read_rows("a", start, stop), tensors()["a"][start:stop])
    assert same(checkpoint.read_rows("c", 1, 2), tensors()["c"][1:2])
    for name, start, stop in (("a", 0, 6), ("a", -1, 2), ("a", 3, 2), ("scalar", 0, 1)):
        with pytest.raises(IndexError):
            checkpoint.read_rows(name, start, stop)


def test_the_hash_is_that_of_a_large_file_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(data := os.urandom((2 << 20) + 5))
    assert sha256_of(tmp_path / "large") == hashlib.sha256(data).hexdigest()


def test_one_file_comes_before_shards_and_shards_before_pickles(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    assert [f.name for f in checkpoint.weight_files] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert same(checkpoint.read("a"), torch.ones(2)) and same(checkpoint.read("b"), torch.zeros(2))
    assert checkpoint.index is not None and checkpoint.index["metadata"] == {"total_size": 16}
    torch.save({"old": torch.ones(1)}, sharded / "pytorch_model.bin")
    assert list(open_checkpoint(sharded).tensors) == ["a", "b"]
    save_file({"one": torch.ones(1)}, sharded / "model.safetensors")
    assert list(open_checkpoint(sharded).tensors) == ["one"]


def test_a_subfolder_is_a_checkpoint_and_a_wrong_path_is_named(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "pipeline").mkdir()
    os.rename(folder / "config.json", tmp_path / "pipeline" / "config.json")
    os.rename(folder / "model.safetensors", tmp_path / "pipeline" / "model.safetensors")
    (tmp_path / "model_index.json").write_text("{}")
    assert open_checkpoint(tmp_path, "pipeline").folder == tmp_path / "pipeline"
    with pytest.raises(UserError, match=r"name one with --subfolder: pipeline$"):
        open_checkpoint(tmp_path)
    os.renames(tmp_path / "pipeline", tmp_path / "text_encoder_2")
    with pytest.raises(UserError, match=r"name one with --subfolder: text_encoder_2$"):
        open_checkpoint(tmp_path)
    os.renames(tmp_path / "text_encoder_2", tmp_path / "pipeline")
    for name, problem in (("../pipeline", "is not inside"), ("/etc", "is not inside"), ("absent", "has no folder")):
        with pytest.raises(UserError, match=problem):
            open_checkpoint(tmp_path, name)
    with pytest.raises(UserError, match="does not exist"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(UserError, match="is not a folder"):
        open_checkpoint(tmp_path / "pipeline" / "config.json")


def test_links_of_the_hub_cache_are_followed_and_others_are_not(tmp_path: Path, folder: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        os.rename(folder / name, blobs / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert same(open_checkpoint(snapshot).read("a"), tensors()["a"])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("config.json", "model.safetensors"):
        (elsewhere / name).symlink_to(f"../blobs/{name}")
    with pytest.raises(UserError, match="outside the folder"):
        open_checkpoint(elsewhere)


def as_pickle(folder: Path, content: object, **options: Any) -> Path:
    (folder / "model.safetensors").unlink(missing_ok=True)
    torch.save(content, folder / "pytorch_model.bin", **options)
    return folder


def test_a_pickle_gives_the_same_tensors_and_tied_ones_keep_all_names(folder: Path) -> None:
    stored = tensors()
    stored["tied"] = stored["a"]
    stored["slice"] = stored["b"][2:5]
    stored["parameter"] = torch.nn.Parameter(torch.ones(2))
    checkpoint = open_checkpoint(as_pickle(folder, stored))
    assert set(checkpoint.tensors) == set(stored)
    for name, tensor in stored.items():
        assert same(checkpoint.read(name), tensor.detach())
    assert checkpoint.tensors["tied"].offset == checkpoint.tensors["a"].offset
    assert same(checkpoint.read_rows("slice", 1, 3), stored["b"][3:5])


def test_pickles_may_be_sharded(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"a": torch.ones(2)}, folder / "one.bin")
    torch.save({"b": torch.zeros(2)}, folder / "two.bin")
    index = {"metadata": {}, "weight_map": {"a": "one.bin", "b": "two.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert same(open_checkpoint(folder).read("b"), torch.zeros(2))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"a": torch.ones(2), "step": 3}, "not a tensor"),
        ({"a": {"b": torch.ones(2)}}, "not a tensor"),
        ({1: torch.ones(2)}, "not a tensor"),
        ([torch.ones(2)], "not a dict"),
        ({"a": torch.ones(2, 3).t()}, "not contiguous"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "unknown dtype"),
        ({}, "no tensors"),
    ],
)
def test_a_pickle_of_anything_but_plain_tensors_is_refused(folder: Path, content: object, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        open_checkpoint(as_pickle(folder, content))


def test_pickles_in_other_containers_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="torch before"):
        open_checkpoint(as_pickle(folder, {"a": torch.ones(2)}, _use_new_zipfile_serialization=False))
    file = folder / "pytorch_model.bin"
    file.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(UserError, match="torch before"):
        open_checkpoint(folder)
    as_pickle(folder, {"a": torch.ones(200)})
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="is damaged"):
        open_checkpoint(folder)
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError, match="not a regular file"):
        open_checkpoint(folder)
    file.rmdir()
    # torch takes such records for tensors on the meta device, or crashes.
    file.write_bytes(whole)
    with zipfile.ZipFile(file) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    others = {"byteorder": b"big", "data/0": bytes(400)}
    for changed, compression in ((None, zipfile.ZIP_DEFLATED), ("byteorder", 0), ("data/0", 0)):
        with zipfile.ZipFile(file, "w", compression) as archive:
            for name, data in records.items():
                archive.writestr(name, others[changed] if changed and name.endswith(changed) else data)
        with pytest.raises(UserError, match="compressed"):
            open_checkpoint(folder)


BAD_HEADERS: dict[str, tuple[object, int, str]] = {
    "no tensors": ({"__metadata__": {"format": "pt"}}, 0, "no tensors"),
    "nor metadata": ({"__metadata__": None}, 0, "no tensors"),
    "longer than its tensors": ({"a": entry(0, 8)}, 9, "damaged"),
    "not JSON": (b"{'a': 1}", 0, "damaged"),
    "nested without end": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 0, "damaged"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": entry(0, 8)}, 8, "damaged"),
    "unknown dtype": ({"a": entry(0, 8, "F31")}, 8, "damaged"),
    "shape against bytes": ({"a": entry(0, 8, shape=[3])}, 8, "damaged"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "damaged"),
    "hole": ({"a": entry(0, 8), "b": entry(12, 20)}, 20, "damaged"),
    "data beyond the file": ({"a": entry(0, 1 << 40)}, 8, "cut short"),
}
"""Headers, as JSON or as bytes, the bytes of data behind them, and what is said of the file."""

BAD_WEIGHTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cut short"),
    "half a length": (b"\x08\0\0", "cut short"),
    "length beyond the file": (b"\xff" * 64, "cut short"),
    "bitsandbytes weights": (save({"a": torch.ones(2, dtype=torch.uint8)}), "quantised"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", r"Git LFS .* run git lfs pull"),
    "int8 weights": (save({"a": torch.ones(2, dtype=torch.int8)}), "quantised"),
    "fp8 weights": (save({"a": torch.ones(2).to(torch.float8_e4m3fn)}), "quantised"),
}

BAD_CONFIGS: dict[str, tuple[str, str]] = {
    "empty config": ("", "not valid JSON"),
    "config that is a list": ("[]", "not a JSON object"),
    "quantised config": ('{"quantization_config": {"load_in_8bit": true}}', "quantised"),
    "code of its own": ('{"auto_map": {"AutoModel": "m.M"}}', "auto_map"),
}

BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut in the header": (lambda f: cut(f, 40), "cut short"),
    "cut in the data": (lambda f: cut(f, -3), "cut short"),
    "a folder in its place": (lambda f: in_place(f / "model.safetensors", Path.mkdir), "regular file"),
    "a pipe in its place": (lambda f: in_place(f / "model.safetensors", os.mkfifo), "regular file"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors"),
    "another format": (lambda f: os.rename(f / "model.safetensors", f / "tf_model.h5"), "it has tf_model.h5"),
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "config that is a folder": (lambda f: in_place(f / "config.json", Path.mkdir), "regular file"),
    "adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "merge_and_unload"),
}


def cut(folder: Path, end: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:end])


def in_place(file: Path, make: Callable[[Path], object]) -> None:
    file.unlink()
    make(file)


@pytest.mark.parametrize("case", [*BAD_HEADERS, *BAD_WEIGHTS, *BAD_CONFIGS, *BAD_FOLDERS])
def test_a_damaged_checkpoint_is_refused_in_one_line_that_names_it(folder: Path, case: str) -> None:
    if case in BAD_HEADERS:
        header, count, problem = BAD_HEADERS[case]
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(count))
    elif case in BAD_WEIGHTS:
        data, problem = BAD_WEIGHTS[case]
        (folder / "model.safetensors").write_bytes(data)
    elif case in BAD_CONFIGS:
        config, problem = BAD_CONFIGS[case]
        (folder / "config.json").write_text(config)
    else:
        damage, problem = BAD_FOLDERS[case]
        damage(folder)
    with pytest.raises(UserError, match=problem) as caught:
        open_checkpoint(folder)
    said = str(caught.value)
    assert "\n" not in said and str(folder) in said and "; " in said and len(said) < 1000


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

BAD_INDEXES: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard missing": (lambda f: (f / TWO).unlink(), "No such file"),
    "tensor not in its shard": (lambda f: write_index(f, {"a": ONE, "b": TWO, "c": TWO}), "though the index lists it"),
    "tensor in the other shard": (lambda f: write_index(f, {"a": TWO, "b": ONE}), "though the index lists it"),
    "tensor without a place": (lambda f: save_file({n: torch.ones(1) for n in "bc"}, f / TWO), "not in the index"),
    "tensor in two shards": (lambda f: save_file({"a": torch.ones(1), "b": torch.ones(1)}, f / TWO), "too"),
    "no weight map": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
    "empty weight map": (lambda f: write_index(f, {}), "no weight_map"),
    "place that is a number": (lambda f: write_index(f, {"a": 1}), "no file name for"),
    "path above the folder": (lambda f: write_index(f, {"a": "../x.safetensors"}), "is not inside the folder"),
    "path that is absolute": (lambda f: write_index(f, {"a": "/etc/passwd"}), "is not inside the folder"),
    "path that is empty": (lambda f: write_index(f, {"a": ""}), "is not inside the folder"),
    "path with a NUL": (lambda f: write_index(f, {"a": "x\0"}), "is not inside the folder"),
    "link out of the folder": (lambda f: link_out(f), "outside the folder"),
    "link to itself": (lambda f: in_place(f / TWO, lambda file: file.symlink_to(TWO)), "fetch the file again"),
}


def link_out(folder: Path) -> None:
    outside = folder.parent / f"{folder.name}-outside"
    os.rename(folder / TWO, outside)
    (folder / TWO).symlink_to(outside)


@pytest.mark.parametrize("case", BAD_INDEXES)
def test_an_index_that_does_not_fit_its_shards_is_refused(sharded: Path, case: str) -> None:
    damage, problem = BAD_INDEXES[case]
    damage(sharded)
    with pytest.raises(UserError, match=problem) as caught:
        open_checkpoint(sharded)
    assert "\n" not in str(caught.value) and str(sharded) in str(caught.value) and "; " in str(caught.value)


def test_a_file_that_shrinks_after_opening_is_an_error_and_not_a_crash(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    os.truncate(folder / "model.safetensors", 16)
    with pytest.raises(UserError, match="became shorter"):
        checkpoint.read("a")
