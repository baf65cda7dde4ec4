"""What strangers' files and slips of the hand lead to: one line that says what is wrong and how to mend it.
Of each reader a few rows go through the command line here; all that it refuses is in its own tests."""

import json
import math
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support import fuzzing, tiny
from support.folders import rewritten
from transformers import ByT5Tokenizer

from bf16_to_fp16 import cli

WEIGHTS = "model.safetensors"
NORM = "encoder.block.0.layer.0.layer_norm.weight"
VALUE = "encoder.block.0.layer.0.SelfAttention.v.weight"
BIAS = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def of_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(source: Path) -> None:
        with rewritten(source / WEIGHTS) as tensors:
            change(tensors)

    return damage


def of_config(**changes: Any) -> Callable[[Path], None]:
    def damage(source: Path) -> None:
        with rewritten(source / "config.json") as config:
            config |= changes

    return damage


def pickled(source: Path) -> None:
    (source / WEIGHTS).unlink()
    torch.save({"a": torch.ones(1), "b": Bomb(source.parent / "code ran")}, source / "pytorch_model.bin")


def with_code_of_a_tokenizer(source: Path) -> None:
    settings = {"tokenizer_class": "Code", "auto_map": {"AutoTokenizer": ["code.Code", None]}}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (source / "tokenizer.json").touch()
    (source / "code.py").write_text("open('code ran', 'w')\n")
    (source.parent / "text.txt").write_text("a line\n")


def converted_before(source: Path) -> None:
    (source.parent / "out").mkdir()
    (source.parent / "out" / "fp16_report.json").write_text('{"output": {"files": [{"name": "config.json"}]}}')


LORA = {VALUE.replace("weight", "lora_A.weight"): torch.ones(2, 24)}
IMPOSSIBLE = '{"decoder_start_token_id": 0, "output_hidden_states": [null]}'

ROWS: tuple[tuple[Callable[[Path], object], str, str, str], ...] = (
    (pickled, "", "pytorch_model.bin", "if you trust it, load it with torch and save it with safetensors"),
    (of_weights(lambda t: t[VALUE][1].fill_(math.nan)), "", VALUE, "use another revision of it or repair the tensor"),
    (of_weights(lambda t: t[VALUE][1].fill_(-math.inf)), "--no-audit", VALUE, "use another revision of the checkpoint"),
    (of_weights(lambda t: t[NORM].zero_()), "", NORM, "fetch it again from the original checkpoint"),
    (of_weights(lambda t: t[BIAS][0].fill_(1e30)), "--no-audit", BIAS, "repair the tensor"),
    (of_weights(lambda t: t.update(LORA)), "", "lora_A", "remove the tensor"),
    (of_weights(lambda t: t.pop(VALUE)), "", VALUE, "take the whole original checkpoint"),
    (of_config(auto_map={"AutoConfig": "code.Config"}), "", "auto_map", "give a checkpoint of a transformers class"),
    (with_code_of_a_tokenizer, "--data text.txt", "no usable tokenizer", "put the original's tokenizer there"),
    (of_config(layer_norm_epsilon=1e-40), "", "norm eps of 1e-40", "write 1e-6 or so"),
    (of_config(num_layers=1), "", "encoder.block.1", "check the config's layer counts"),
    (
        lambda source: (source / "generation_config.json").write_text(IMPOSSIBLE),
        *("", "source: transformers cannot run it", "generation_config.json"),
    ),
    (
        lambda source: save_file(load_file(source / WEIGHTS), source / WEIGHTS, metadata={"format": "bogus"}),
        *("", "format 'bogus'", "save it again with save_pretrained"),
    ),
    (converted_before, "", "out exists", "--force"),
    (
        lambda source: (source / "spiece.model").symlink_to(source / "nowhere"),
        *("--no-audit", "spiece.model", "restore it from the original"),
    ),
)
"""What is wrong with a source, options of ``convert``, what the line must name, and the remedy that it must hold."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.build("gated", factor=1.0), tmp_path_factory.mktemp("good") / "source")


def below(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): f"-> {os.readlink(path)}" if path.is_symlink() else str(path.stat().st_mtime_ns)
        for path in root.rglob("*")
    }


@pytest.mark.usefixtures("whole_probe_once")
@pytest.mark.parametrize(("damage", "options", "names", "remedy"), ROWS)
def test_bad_input_is_one_line(
    damage: Callable[[Path], object], options: str, names: str, remedy: str,
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    damage(Path(shutil.copytree(good, tmp_path / "source")))
    before = below(tmp_path)
    assert cli.main(["convert", "source", "out", *options.split()]) == 2
    printed = capfd.readouterr()
    [line] = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert names in line and remedy in line and len(line) < 1000, line
    assert printed.out == "" and "Traceback" not in printed.err and below(tmp_path) == before


def test_without_a_tokenizer_it_works_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bare = tiny.save(tiny.small("t5-encoder", num_layers=1), tmp_path / "bare")
    assert cli.main(["convert", str(bare), str(tmp_path / "out"), "--no-audit"]) == 0
    assert "has no tokenizer" in capfd.readouterr().err
    shutil.copytree(bare, tmp_path / "source")
    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path / "source")
    assert cli.main(["convert", str(tmp_path / "source"), str(tmp_path / "other"), "--no-audit"]) == 0
    file = tmp_path / "file.safetensors"  # which never holds one
    assert cli.main(["convert", str(bare), str(file), "--layout", "single", "--no-audit"]) == 0
    printed = capfd.readouterr()
    assert "has no tokenizer" not in printed.err and f"written: {file}" in printed.out


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
