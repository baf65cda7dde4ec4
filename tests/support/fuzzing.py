"""Structure-aware mutation of everything that is read from strangers, and what must come of it.
A command must end with success, a verdict or one ``error:`` line: no other exception, no hang, no unbounded memory."""

import contextlib
import copy
import io
import json
import shutil
import signal
import struct
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from hypothesis import strategies as st
from safetensors.torch import load_file
from support import tiny
from transformers import ByT5Tokenizer

from bf16_to_fp16 import cli
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.finetuning.recipe import read_recipe
from bf16_to_fp16.measuring.texts import texts

SECONDS = 60.0  # the longest that one command may take, on a machine that has other work

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, REPORT = "pytorch_model.bin", "fp16_report.json"

NUMBERS = (-1, 0, 1, 2, 3, 24, 97, 2**16, 2**31, 2**48, 2**62, 2**64, 10**30, 0.5, -0.5, 1e-6, 1e-50, 1e308)
WORDS = ("", "x", "BF16", "F32", "I8", "F64", "relu", "gelu_new", "gated-silu", "../x", "/etc/passwd", "\0", "\ud800")
ODD: tuple[Any, ...] = (None, True, False, [], {}, [[]], [0], [0, 2], {"a": 1}, [None], "a" * 5000, float("inf"))

values = st.one_of(st.sampled_from(NUMBERS), st.sampled_from(WORDS), st.sampled_from(ODD), st.integers(), st.text())


def nodes(tree: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        found.append((tree, key))
        found += nodes(tree[key])
    return found


@st.composite
def trees(draw: st.DrawFn, tree: Any, most: int = 3) -> Any:
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, most))):
        every = nodes(tree)
        if not every:
            break
        container, key = every[draw(st.integers(0, len(every) - 1))]
        action = draw(st.sampled_from(("replace", "replace", "scale", "delete", "copy", "exchange")))
        if action == "delete":
            del container[key]
        elif action == "scale" and isinstance(container[key], (int, float)) and not isinstance(container[key], bool):
            container[key] = container[key] * draw(st.sampled_from((-1, 2, 1000, 10**9))) + draw(st.integers(-1, 1))
        elif action == "copy" and isinstance(container, dict):
            container[draw(st.sampled_from(("x", "", "\ud800", "encoder.x", str(key) + ".x")))] = container[key]
        elif action == "exchange":
            other, place = every[draw(st.integers(0, len(every) - 1))]
            one, two = copy.deepcopy(container[key]), copy.deepcopy(other[place])
            container[key] = two
            other[place] = one
        else:
            container[key] = draw(values)
    return tree


@st.composite
def blobs(draw: st.DrawFn, data: bytes, most: int = 3) -> bytes:
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.sampled_from((1, 2, 8, 64, 1000)))
        action = draw(st.sampled_from(("flip", "cut", "delete", "repeat", "insert", "zero")))
        part, rest = data[at : at + length], b"" if action == "cut" else data[at + length :]
        if action == "flip" and data:
            part = bytes([part[0] ^ (1 << draw(st.integers(0, 7)))]) + part[1:]
        elif action == "insert":
            part = draw(st.binary(max_size=16)) + part
        else:
            part = {"cut": b"", "delete": b"", "repeat": part * 2}.get(action, bytes(len(part)))
        data = data[:at] + part + rest
    return data


@st.composite
def documents(draw: st.DrawFn, tree: Any) -> bytes:
    if draw(st.integers(0, 3)):
        return json.dumps(draw(trees(tree))).encode("utf-8", "surrogatepass")
    return draw(blobs(json.dumps(tree).encode()))


@st.composite
def safetensors(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw a safetensors file that differs in its header's nodes or text, in its length, or in its tensors' bytes."""
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length], data[8 + length :]
    what = draw(st.sampled_from(("header", "header", "header", "length", "tensors", "all")))
    if what == "header":
        header = draw(documents(json.loads(header)))
        length = len(header)
    elif what == "length":
        odd = st.sampled_from((0, 1, length - 1, length + 1, 2**31, 2**63))
        length = draw(st.one_of(odd, st.integers(0, 2**64 - 1)))
    elif what == "tensors":
        rest = draw(blobs(rest))
    else:
        return draw(blobs(data))
    return struct.pack("<Q", length) + header + rest


@dataclass(frozen=True)
class Originals:
    """Sound input: checkpoint folders by what they are, among them a converted one, and a recipe."""

    folders: Mapping[str, Path]
    recipe: Mapping[str, Any]


KINDS = (("", "Transformer"), ("1_Pooling", "Pooling"))
LISTING = json.dumps([{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in KINDS])
"""A ``modules.json`` of an encoder and its pooling."""


def originals(root: Path) -> Originals:
    folders = {}
    small: dict[str, Any] = {"num_layers": 1, "num_decoder_layers": 1, "relative_attention_num_buckets": 4}
    wide: dict[str, Any] = {"encoder_layers": 1, "decoder_layers": 1}
    for kind, shape in (("t5", small), ("gated", small), ("pegasus", wide)):
        folders[kind] = tiny.save(tiny.build(kind, **shape), root / kind)
        (folders[kind] / "modules.json").write_text(LISTING)
        (folders[kind] / "1_Pooling").mkdir()
        (folders[kind] / "1_Pooling" / "config.json").write_text("{}")
        ByT5Tokenizer(extra_ids=0).save_pretrained(folders[kind])
    folders["sharded"] = tiny.save(tiny.build("gated", **small), root / "sharded", max_shard_size="12KB")
    folders["pickled"] = Path(shutil.copytree(folders["t5"], root / "pickled"))
    torch.save(load_file(folders["t5"] / WEIGHTS), folders["pickled"] / PICKLE)
    (folders["pickled"] / WEIGHTS).unlink()
    folders["converted"] = root / "converted"
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        assert cli.main(["convert", str(folders["t5"]), str(folders["converted"]), "--no-audit"]) in (0, 1)
    recipe: dict[str, Any] = {"source": "somewhere", "out": "out", "precision": "fp16"}
    recipe |= {"data": {"path": "text.txt", "input_length": 16, "held_out": 0.1}}
    recipe |= {"schedule": {"steps": 3, "learning_rate": 1e-3}, "penalty": {"headroom_bits": 2.0}}
    recipe |= {"optimizer": {"relative": True}, "checkpointing": {"every": 2}}
    return Originals(folders, recipe)


Case = tuple[str, str, bytes]
"""Which folder, which of its files, and what to put there; "data" and "recipe" in place of a folder stand alone."""


def cases(good: Originals) -> dict[str, st.SearchStrategy[Case]]:
    folders = good.folders

    def whole(folder: str, file: str) -> bytes:
        return (folders[folder] / file).read_bytes()

    def tree(folder: str, file: str) -> Any:
        return json.loads(whole(folder, file))

    def of(folder: str, file: str, mutated: st.SearchStrategy[bytes]) -> st.SearchStrategy[Case]:
        return mutated.map(lambda data: (folder, file, data))

    def configs(file: str, *names: str) -> st.SearchStrategy[Case]:
        return st.one_of(*(of(name, file, documents(tree(name, file))) for name in names))

    rows = b'{"input": "some text", "target": "more"}\n{"input": "other", "target": "x"}\n'
    return {
        "safetensors": st.one_of(*(of(n, WEIGHTS, safetensors(whole(n, WEIGHTS))) for n in ("t5", "pegasus"))),
        "pickle": of("pickled", PICKLE, blobs(whole("pickled", PICKLE))),
        "index": configs(INDEX, "sharded"),
        "config": configs("config.json", "t5", "gated", "pegasus"),
        "side files": st.one_of(
            *(configs(f"{name}.json", "t5") for name in ("modules", "tokenizer_config", "generation_config"))
        ),
        "report": configs(REPORT, "converted"),
        "recipe": st.one_of(
            trees(dict(good.recipe)).map(lambda t: ("recipe", "yaml", as_yaml(t))),
            of("recipe", "yaml", blobs(yaml.safe_dump(dict(good.recipe)).encode())),
        ),
        "data": st.one_of(*(of("data", ending, blobs(rows)) for ending in ("jsonl", "csv", "txt", "parquet"))),
    }


def as_yaml(tree: Any) -> bytes:
    """Return a tree as YAML, or as JSON, which YAML contains, where it holds what YAML cannot."""
    try:
        return yaml.safe_dump(tree).encode()
    except (yaml.YAMLError, UnicodeEncodeError):
        return json.dumps(tree).encode("utf-8", "surrogatepass")


class TooLongError(AssertionError):
    """A command that did not end."""


@contextlib.contextmanager
def limited(seconds: float = SECONDS) -> Iterator[None]:
    """Raise TooLongError inside the block after some seconds."""

    def stop(number: int, frame: object) -> None:
        raise TooLongError(f"no end within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_command(root: Path, command: str, *options: str) -> None:
    """Run a command from ``in`` to ``out``; raise AssertionError unless it ends as it should."""
    said, out = io.StringIO(), io.StringIO()
    before = sorted(root.iterdir())
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(out):
        status = cli.main([command, f"{root}/in", f"{root}/out", *options])
    errors = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
    assert status in (0, 1, 2), status
    assert len(errors) == (status == 2), said.getvalue()
    assert all(len(error) < 2000 for error in errors), errors[0][:3000]
    assert status < 2 or sorted(root.iterdir()) == before


def run(good: Originals, case: Case) -> str:
    """Run what reads a mutated input and return "accepted" or "refused"; raise what it should not raise."""
    folder, file, data = case
    with tempfile.TemporaryDirectory() as scratch, limited(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root = Path(scratch)
        try:
            if folder == "recipe":
                (root / file).write_bytes(data)
                read_recipe(root / file)
                return "accepted"
            if folder == "data":
                (root / f"rows.{file}").write_bytes(data)
                for _ in texts(str(root / f"rows.{file}")):
                    pass
                return "accepted"
            shutil.copytree(good.folders[folder], root / "in")
            (root / "in" / file).write_bytes(data)
            if folder != "converted":
                resolve(open_checkpoint(root / "in"))
        except UserError as error:
            assert "\n" not in str(error) and 0 < len(str(error)) < 2000, str(error)[:3000]
            return "refused"
        check_command(root, *(["undo"] if folder == "converted" else ["convert", "--no-audit"]))
        return "accepted" if (root / "out").exists() else "refused"
