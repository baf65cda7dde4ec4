"""What strangers' files and slips of the hand lead to: one line that says what is wrong and how to mend it.

Every row goes through the command line, in this process: exit status 2, one ``error:`` line that names the file or
tensor and a remedy, no traceback, nothing at OUT and nothing beside it. Of each reader a few rows are here; all
that it refuses is in its own tests (test_reader, test_resolve, test_id_choice, test_recipe, test_corpus).
"""

import json
import os
import resource
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support import exhaustive, fuzzing, tiny
from support.folders import rewritten
from support.forked import in_a_fork
from transformers import ByT5Tokenizer

from bf16_to_fp16 import cli
from bf16_to_fp16.checkpoint.files import LONGEST_HEADER
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.errors import UserError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
AGAIN = "fetch the file again"
NORM = "encoder.block.0.layer.0.layer_norm.weight"
VALUE = "encoder.block.0.layer.0.SelfAttention.v.weight"
BIAS = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"


@dataclass(frozen=True)
class Place:
    """What a row may damage: ``source`` in the folder ``root``, whose other content must not change."""

    root: Path

    @property
    def source(self) -> Path:
        return self.root / "source"

    @property
    def out(self) -> Path:
        return self.root / "out"


Damage = Callable[[Place], object]
"""Spoils something, and returns the command, a list, where it is not plain ``convert SOURCE OUT``."""

ROWS: dict[str, tuple[Damage, str, str, tuple[str, ...]]] = {}
"""By what is wrong: the damage, what the line must name, the remedy that it must hold, and options of ``convert``."""


def convert(at: Place, *options: str) -> list[str]:
    return ["convert", str(at.source), str(at.out), *options]


def row(what: str, names: str, remedy: str, *options: str) -> Callable[[Damage], Damage]:
    def add(damage: Damage) -> Damage:
        assert what not in ROWS
        ROWS[what] = damage, names, remedy, options
        return damage

    return add


def configure(**changes: Any) -> Damage:
    def damage(at: Place) -> None:
        with rewritten(at.source / "config.json") as config:
            config |= changes

    return damage


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def pickled(at: Place, content: object, **options: Any) -> None:
    (at.source / WEIGHTS).unlink()
    torch.save(content, at.source / "pytorch_model.bin", **options)


row("a pickle that would run code", "pytorch_model.bin", "save it with safetensors where you trust it")(
    lambda at: pickled(at, {"a": torch.ones(1), "b": Bomb(at.root / "code ran")})
)


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(at: Place) -> None:
        with rewritten(at.source / WEIGHTS) as tensors:
            change(tensors)

    return damage


def poke(value: float) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors[VALUE][1].fill_(value)


row("NaN weights", VALUE, "use another revision of it or repair the tensor")(weights(poke(float("nan"))))
row("inf weights and nothing run", VALUE, "use another revision of the checkpoint or repair the tensor", "--no-audit")(
    weights(poke(float("-inf")))
)
row("an all-zero norm", NORM, "fetch it again from the original checkpoint")(
    weights(lambda tensors: tensors[NORM].zero_())
)
row("values that no exponent can carry", BIAS, "repair the tensor", "--no-audit")(
    weights(lambda tensors: tensors[BIAS][0].fill_(1e30))
)


@row("a GPTQ checkpoint whose config does not say so", "v.", "original checkpoint")
def _(at: Place) -> None:
    name = VALUE.removesuffix(".weight")
    packed = {"qweight": torch.ones(3, 15, dtype=torch.int32), "scales": torch.ones(1, 15, dtype=torch.float16)}
    weights(lambda t: (t.pop(VALUE), t.update({f"{name}.{k}": v for k, v in packed.items()})))(at)


row("LoRA weights among the others", "lora_A", "remove the tensor")(
    weights(lambda tensors: tensors.update({VALUE.replace("weight", "lora_A.weight"): torch.ones(2, 24)}))
)
row("missing tensors", VALUE, "take the whole original checkpoint")(weights(lambda tensors: tensors.pop(VALUE)))


@row("remote code", "auto_map", "give a checkpoint of a stock class")
def _(at: Place) -> None:
    configure(auto_map={"AutoModelForSeq2SeqLM": "code.Model", "AutoConfig": "code.Config"})(at)
    (at.source / "code.py").write_text(f"open({str(at.root / 'code ran')!r}, 'w')\n")


@row("a tokenizer's remote code", "no usable tokenizer", "put the original's tokenizer there")
def _(at: Place) -> object:
    settings = {"tokenizer_class": "Code", "auto_map": {"AutoTokenizer": ["code.Code", None]}}
    (at.source / "tokenizer_config.json").write_text(json.dumps(settings))
    (at.source / "code.py").write_text(f"open({str(at.root / 'code ran')!r}, 'w')\n")
    return with_data("text.txt", b"a line\n")(at)


row("fewer layers than tensors", "encoder.block.1", "check the config's layer counts")(configure(num_layers=1))
row("settings of generation that are impossible", "source: stock code cannot run it", "generation_config.json")(
    lambda at: (at.source / "generation_config.json").write_text(
        '{"decoder_start_token_id": 0, "output_hidden_states": [null]}'
    )
)


@row("another config by version", "configuration_files", "put the one that is meant in its place")
def _(at: Place) -> None:
    config = json.loads((at.source / "config.json").read_text())
    (at.source / "config.4.0.0.json").write_text(json.dumps({**config, "num_layers": 1}))
    (at.source / "config.json").write_text(json.dumps({**config, "configuration_files": ["config.4.0.0.json"]}))


row("metadata of another library", "format 'bogus'", "save it again with save_pretrained")(
    lambda at: save_file(load_file(at.source / WEIGHTS), at.source / WEIGHTS, metadata={"format": "bogus"})
)
row("half a character in a config", "config.json", AGAIN)(
    lambda at: (at.source / "config.json").write_text(
        (at.source / "config.json").read_text()[:-2] + ', "x": "\\ud800"}'
    )
)


@row("OUT is a converted folder", "out exists", "--force")
def _(at: Place) -> None:
    at.out.mkdir()
    (at.out / "fp16_report.json").write_text('{"output": {"files": [{"name": "config.json"}]}}')


@row("a file beside the weights that leads out", "spiece.model", "put the file itself there", "--no-audit")
def _(at: Place) -> None:
    (at.root / "secret").write_text("mine alone")
    (at.source / "spiece.model").symlink_to(at.root / "secret")


row("a file beside the weights that leads nowhere", "spiece.model", "restore it from the original", "--no-audit")(
    lambda at: (at.source / "spiece.model").symlink_to(at.source / "nowhere")
)


@row("a plan with exponents beyond reason", "report.json", "that convert wrote")
def _(at: Place) -> list[str]:
    (at.root / "report.json").write_text('{"plan": {"family": "t5", "residual_exponent": -100000}}')
    return convert(at, "--plan", str(at.root / "report.json"))


def with_data(name: str, content: bytes) -> Damage:
    def damage(at: Place) -> list[str]:
        (at.root / name).write_bytes(content)
        (at.source / "tokenizer.json").touch()
        return convert(at, "--data", str(at.root / name))

    return damage


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.build("gated", factor=1.0), tmp_path_factory.mktemp("good") / "source")


def below(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): f"-> {os.readlink(path)}" if path.is_symlink() else str(path.stat().st_mtime_ns)
        for path in root.rglob("*")
    }


def assert_one_line(status: int, said: str, names: str, remedy: str) -> None:
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert status == 2, said
    assert len(lines) == 1 and "Traceback" not in said, said
    assert names in lines[0] and remedy in lines[0], lines[0]
    assert len(lines[0]) < 1000


@pytest.mark.usefixtures("whole_probe_once")
@pytest.mark.parametrize("what", ROWS)
def test_bad_input_is_one_line(what: str, good: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    damage, names, remedy, options = ROWS[what]
    shutil.copytree(good, tmp_path / "source")
    at = Place(tmp_path)
    asked = damage(at)
    arguments = asked if isinstance(asked, list) else convert(at, *options)
    before = below(tmp_path)
    status = cli.main(arguments)
    captured = capfd.readouterr()
    assert_one_line(status, captured.err, names, remedy)
    assert captured.out == ""
    assert below(tmp_path) == before


def test_nothing_is_kept_of_a_header_that_is_too_long(good: Path, tmp_path: Path) -> None:
    """100 MB of header, whether they are there or only announced, and 2⁶² bytes: refused before any is read."""
    for length, size in ((100_000_000, 100_000_008), (1 << 62, 1 << 62 >> 22), (LONGEST_HEADER + 1, 1 << 30)):
        folder = tmp_path / str(length)
        shutil.copytree(good, folder)
        with open(folder / WEIGHTS, "wb") as file:
            file.write(struct.pack("<Q", length) + b'{"a":"')
            file.truncate(size)
        assert taken_by_refusing(folder) < 16 << 20


def taken_by_refusing(folder: Path) -> int:
    """Return the memory that it takes to refuse a folder, in a process of its own that has 20 seconds for it."""

    def refused() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
        with pytest.raises(UserError):
            open_checkpoint(folder)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    status, peak = in_a_fork(refused)
    assert status == 0
    return peak - before


WORST = {
    "lists in a header": b'{"a":[' + b"[]," * (LONGEST_HEADER // 3 - 9) + b"[]]}",
    "sections in a header": b'{"a":[' + b"{}," * (LONGEST_HEADER // 3 - 9) + b"{}]}",
    "sizes in a header": b'{"a":{"dtype":"F32","data_offsets":[0,4],"shape":['
    + b"1," * (LONGEST_HEADER // 2 - 99)
    + b"1]}}",
}


@pytest.mark.parametrize("what", exhaustive.beyond(["sections in a header"], WORST))
def test_the_worst_header_that_is_read_takes_bounded_memory_and_time(what: str, good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    shutil.copytree(good, folder)
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(WORST[what])) + WORST[what] + bytes(4))
    assert taken_by_refusing(folder) < 500 << 20


def test_a_config_or_an_index_that_is_too_long_is_refused_unread(good: Path, tmp_path: Path) -> None:
    for name in ("config.json", INDEX):
        folder = tmp_path / name
        shutil.copytree(good, folder)
        (folder / WEIGHTS).unlink()
        with open(folder / name, "wb") as file:
            file.truncate(1 << 40)
        assert taken_by_refusing(folder) < 16 << 20


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"feed_forward_proj": "gated-tanh"}, "activation 'tanh' has no bound"),
        ({"layer_norm_epsilon": 1e-40}, "a norm eps of 1e-40"),
    ],
)
def test_what_has_no_bound_is_refused_before_anything_is_run(
    changes: dict[str, Any], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tiny.save(tiny.build("t5-encoder", **changes), tmp_path / "source")
    status = cli.main(["convert", str(source), str(tmp_path / "out")])
    said = capfd.readouterr().err.splitlines()
    assert status == 2 and said[-1].startswith("error: ") and words in said[-1], said
    assert not any(line.startswith(("Observing", "Bounding")) for line in said)


def test_without_a_tokenizer_it_works_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bare = tiny.save(tiny.small("t5-encoder", num_layers=1), tmp_path / "bare")
    assert cli.main(["convert", str(bare), str(tmp_path / "out"), "--no-audit"]) == 0
    assert "has no tokenizer" in capfd.readouterr().err
    shutil.copytree(bare, tmp_path / "source")
    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path / "source")
    assert cli.main(["convert", str(tmp_path / "source"), str(tmp_path / "other"), "--no-audit"]) == 0
    one_file = ["convert", str(bare), str(tmp_path / "file.safetensors"), "--layout", "single", "--no-audit"]
    assert cli.main(one_file) == 0  # which never holds one
    assert "has no tokenizer" not in capfd.readouterr().err


EXAMPLES = {"safetensors": 40, "pickle": 30, "index": 25, "config": 25, "side files": 6, "report": 20}
EXAMPLES |= {"recipe": 80, "data": 60}
"""By what a run of each costs: together some 20 seconds with ``make test-all``, a third of that with ``make test``."""

MEMORY = 512 << 20  # bytes beyond what this process had


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> fuzzing.Originals:
    return fuzzing.originals(tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize("what", EXAMPLES)
def test_mutated_input_ends_in_a_line(what: str, originals: fuzzing.Originals, request: pytest.FixtureRequest) -> None:
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
        seen.add(fuzzing.run(originals, data.draw(fuzzing.cases(originals)[what])))

    mutate()
    assert "refused" in seen
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < before + MEMORY


def test_what_is_not_mutated_is_accepted(originals: fuzzing.Originals) -> None:
    """The control: the same runs on sound input succeed, so that a refusal above is the mutation's."""
    for folder, file in (("t5", fuzzing.WEIGHTS), ("sharded", fuzzing.INDEX), ("pickled", fuzzing.PICKLE)):
        assert fuzzing.run(originals, (folder, file, (originals.folders[folder] / file).read_bytes())) == "accepted"
    report = (originals.folders["converted"] / fuzzing.REPORT).read_bytes()
    assert fuzzing.run(originals, ("converted", fuzzing.REPORT, report)) == "accepted"
    assert fuzzing.run(originals, ("recipe", "yaml", fuzzing.as_yaml(dict(originals.recipe)))) == "accepted"
