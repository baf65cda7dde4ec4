"""The project stands alone: nothing here depends on the machine or the place where it was written."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from support import parsed
from support.parsed import ROOT

# Put together here, or this file would be the first one found.
HOSTS = ["pypi" + ".org", "pythonhosted" + ".org", "download." + "pytorch.org", "--index" + "-url"]
PLACES = [f"/{top}/" for top in ("wor" + "k", "tm" + "p", "hom" + "e", "roo" + "t", "op" + "t")]
FOREIGN = re.compile("|".join([*map(re.escape, HOSTS), *(rf"(?<![\w.~/}}-]){place}\w" for place in PLACES)]))


def test_no_file_names_a_place_on_one_machine_or_a_package_registry() -> None:
    lines = [(path, line) for path in parsed.tracked() for line in parsed.text(path).splitlines()]
    assert [place for place in lines if FOREIGN.search(place[1])] == []


@pytest.mark.parametrize("name", ["constraints.txt", "tests/compat/constraints.txt"])
def test_every_version_is_pinned_exactly_and_torch_for_every_build(name: str) -> None:
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    assert "torch==2.13.0" in lines


def test_every_direct_requirement_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(want for extra in extras.values() for want in extra)]
    pinned = (ROOT / "constraints.txt").read_text().lower().replace("_", "-")
    names = {re.split(r"[<>=\[ ]", want)[0].lower().replace("_", "-") for want in wanted}
    assert {name for name in names if f"\n{name}==" not in pinned} == set()


def test_a_module_says_what_it_is_for() -> None:
    assert [path for path in parsed.package() if not ast.get_docstring(parsed.nodes(path)[0])] == []  # type: ignore[arg-type]


@pytest.mark.parametrize("module", ["bf16_to_fp16", "bf16_to_fp16.cli"])
def test_importing_the_package_does_not_import_transformers(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{'transformers', 'datasets'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_package_lists_its_names_before_they_are_imported() -> None:
    code = "import sys, bf16_to_fp16 as b; print(*({'__version__', *b.__all__} ^ {*dir(b)}), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


ANSWERED_AT_ONCE = [
    (0, ("families --json -", "advise init 512", "convert --help", "recipe mt5")),
    (2, ("convert org/name tests", "advise", "advise init nowhere/at/all", "advise updates nowhere/at/all")),
    (2, tuple(f"{command} nowhere/at/all" for command in ("audit", "certify", "verify", "finetune"))),
    (2, tuple(f"{command} some/name" for command in ("audit", "certify", "verify", "advise init", "advise updates"))),
    (2, ("verify tests --original nowhere/at/all", "convert some/name out")),
    (2, ("audit tests --data none.txt", "convert tests out --data none.txt", "advise updates tests --data none.txt")),
    (2, ("convert tests out --data none.txt --no-audit", "convert tests out --plan none.json --margin 4")),
    (2, ("recipe nope", "launch none.yaml --gpus 4", "launch none.yaml --gpus 0")),
    (2, ("convert tests out --plan none.json", "convert tests out --finetune none.yaml")),
    (2, ("convert tests out --margin 99", "certify tests --max-length 0", "convert tests out --max-length 0")),
    (2, ("advise init 512 --lr 1", "advise updates tests --optimizer x", "convert", "no-such-command")),
    (2, ("convert a b --target quarter", "audit a --regime fp8", "convert a b --no-such-option")),
    (2, ("convert nowhere/at/all out", "publish nowhere org/name", "undo nowhere out", "audit tests --device gpu")),
]
"""Command lines by their status, that need no model."""
T5 = {"model_type": "t5", "architectures": ["T5EncoderModel"], "num_layers": 2, "num_heads": 2, "d_kv": 4}
T5 |= {"d_model": 8, "d_ff": 8, "vocab_size": 9}


def answers(python: Path, lines: Sequence[str]) -> str:
    """Return what command lines say in one new process: of each its errors and its status."""
    code = f"""
import sys
from bf16_to_fp16.cli import main
for line in {list(lines)}:
    print(line, main(line.split()), sep=": ", file=sys.stderr)
"""
    environment = os.environ | {"HF_TOKEN": "hf_none"}  # for ``publish``
    done = subprocess.run([python, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.stderr


def test_what_needs_no_model_is_answered_in_one_line(tmp_path: Path, warm_python: Path) -> None:
    damage: dict[str, tuple[dict[str, object], str]] = {
        "other": ({"model_type": "bert"}, "is not supported"),
        "quantised": ({"quantization_config": {"bits": 4}}, "the checkpoint is quantised"),
        "layers": ({"num_layers": 10**12}, "'num_layers' is 1000000000000, not a number of layers"),
        "lacking": ({"d_kv": None}, "'d_kv' expected int, got NoneType"),
        "text": ({"layer_norm_epsilon": "1e-6"}, "'layer_norm_epsilon' expected float, got str"),
        "rate": ({"dropout_rate": 1.5}, "not a dropout rate"),
        "number": ({"dropout_rate": "0.1"}, "'dropout_rate' with value '0.1' doesn't match any type"),
        "labels": ({"id2label": 3}, "'int' object has no attribute 'items'"),
        "end": ({"eos_token_id": [-1, "1"]}, "'eos_token_id' with value [-1, '1'] doesn't match any type"),
        "word": ({"feed_forward_proj": 3}, "'feed_forward_proj' expected str, got int"),
        "heads": ({"num_heads": 3, "d_kv": 0}, "'d_kv' is 0, not a size"),
        "function": ({"feed_forward_proj": "tanh"}, "do not know activation 'tanh'"),
        "start": ({"decoder_start_token_id": 9}, "not an id of the vocabulary of 9"),
        "empty": ({}, "no model.safetensors"),
    }
    said = {name: (json.dumps(T5 | change), words) for name, (change, words) in damage.items()}
    said["broken"] = ('{"a": ', "the config is not valid JSON")
    for name, (config, _) in said.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
    (tmp_path / "file.gguf").write_bytes(b"GGUF")
    said["short"] = (json.dumps(T5), "model.safetensors: cut short, damaged or not safetensors")
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "model.safetensors").write_bytes(b"8")
    (tmp_path / "short" / "config.json").write_text(said["short"][0])
    for name in ("with_config", "alone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file.gguf").write_bytes(b"GGUF")
    (tmp_path / "with_config" / "config.json").write_text(json.dumps(T5))
    sources = (*said, "file.gguf", "with_config", "alone")
    broken = tuple(f"{command} {tmp_path / name}" for command in ("certify", "convert --dry-run") for name in sources)
    wanted = [f"{line}: {status}" for status, lines in (*ANSWERED_AT_ONCE, (2, broken)) for line in lines]
    stderr = answers(warm_python, [line.partition(": ")[0] for line in wanted])
    assert [line for line in stderr.splitlines() if not line.startswith("error: ")] == wanted, stderr
    quantised = (tmp_path / "file.gguf", *(tmp_path / name / "file.gguf" for name in sources[-2:]))
    told = [words for _, words in said.values()] + [f"{file}: GGUF holds quantised weights" for file in quantised]
    assert [stderr.count(words) for words in told] == [2] * len(sources)
    places = [f"error: {tmp_path / name}/config.json" for name in said if name not in ("empty", "short")]
    # Of ``ANSWERED_AT_ONCE``.
    places += ["leave out one of them", "decides what --margin sets"]
    assert [place for place in places if place not in stderr] == []


def test_what_convert_did_not_write_is_refused(tmp_path: Path, warm_python: Path) -> None:
    source = {"sha256": {}, "config_changes": {}, "dtype": "BF16", "dtypes": {}, "made": [], "path": "other"}
    report: dict[str, object] = {"schema": 1, "verdict": "safe", "source": source, "output": {"files": []}}
    report |= {"plan": {"family": "t5"}, "certificate": {"sites": []}, "target": "half"}
    lora = {"peft_type": "LORA", "base_model_name_or_path": "other"}
    files: dict[str, object] = {
        **{"none/config.json": T5, "broken/fp16_report.json": "{", "older/fp16_report.json": report | {"schema": 2}},
        **{"less/fp16_report.json": report | {"plan": None}, "whole/fp16_report.json": report, "text.txt": "a"},
        **{"source/config.json": T5, "source/model.safetensors": "\2\0\0\0\0\0\0\0{}"},
        **{"pickle/config.json": T5, "pickle/pytorch_model.bin": "PK", "lone.safetensors": "\2\0\0\0\0\0\0\0{}"},
        **{"of_other/adapter_config.json": {"peft_type": "PREFIX_TUNING"}, "empty/text.txt": ""},
        **{"back/adapter_config.json": lora, "back/adapter_model.safetensors": ""},
        **{"linked/text.txt": "", "there/adapter_model.safetensors": ""},
        "there/adapter_config.json": lora | {"base_model_name_or_path": f"{tmp_path}/whole/."},
        **{"pipe/text_encoder/config.json": T5, "pipe/tokenizer/tokenizer.json": ""},
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    shutil.copy(tmp_path / "source/model.safetensors", tmp_path / "pipe/text_encoder")
    (tmp_path / "linked/fp16_report.json").symlink_to("../whole/fp16_report.json")
    wrong = {"linked": "fp16_report.json, outside the folder"}
    wrong |= {"none": "has no fp16_report.json, so", "broken": "is not valid JSON", "older": "schema 2 is not 1"}
    wrong["less"] = "has no plan, so convert did not write it"
    commands = ("verify {}", "undo {} OUT", "publish {} me/x", "convert {} OUT --adapter of_other")
    told = {command.format(name): words for name, words in wrong.items() for command in commands}
    told |= {
        "convert whole OUT --adapter empty": "no adapter_config.json",
        "convert whole OUT --adapter of_other": "peft_type is 'PREFIX_TUNING'",
        "undo whole OUT --adapter back": "is for the original checkpoint already",
        "convert whole OUT --adapter there": "is for the converted checkpoint already",
        "undo whole OUT": "is not what convert writes",
        "verify lone.safetensors": "lone.safetensors is not a folder; give a converted folder",
        "undo lone.safetensors OUT": "lone.safetensors is not a folder; give the folder that convert wrote",
        "convert pickle OUT": "pytorch_model.bin cannot be read safely: it is damaged, compressed,",
        "convert source OUT --plan text.txt": "text.txt: holds no plan of this program",
        "convert source OUT --plan whole --target norm-safe": "the plan was made for --target half",
        "convert source OUT --plan whole --eps fixed": "--plan already decides what --eps sets",
        "convert source": "Missing argument 'OUT'",
        "convert source OUT --finetune text.txt": "a recipe is made of `key: value` lines",
        "convert pipe OUT --subfolder text_encoder --data no.txt": "no.txt: no such file",  # a tokenizer is beside it
        "verify whole --no-audit --data text.txt": "leave out one of them",
        "convert source OUT --device cuda:9999": "device cuda:9999: this machine has",
    }
    named = re.compile(rf"\b({'|'.join({name.partition('/')[0] for name in files} | {'OUT'})})(?= |$)")
    lines = {named.sub(lambda name: str(tmp_path / name[0]), line): words for line, words in told.items()}
    said = answers(warm_python, list(lines)).splitlines()
    assert said[1::2] == [f"{line}: 2" for line in lines]
    assert [words for words, line in zip(lines.values(), said[::2], strict=True) if words not in line] == []


def test_no_hint_needs_a_release_before_there_is_one() -> None:
    assert [path for path in parsed.package() if "bf16_to_fp16[" in parsed.text(path)] == []
    assert "pip install ." in (ROOT / "README.md").read_text(encoding="utf-8")


MOST_LINES, MOST_PARAMETERS = 61, 8
OF_A_FILE, OF_A_CLASS = 450, 300


def too_large(text: str, nodes: Iterable[ast.AST]) -> list[str]:
    """The functions that are over a limit without a sentence, in docstring or comment, of so "many" of them."""
    found = []
    for function in nodes:
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        given = function.args
        named = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs) if a.arg not in ("self", "cls")]
        lines = (function.end_lineno or 0) - function.lineno + 1
        parameters = len(named) + (given.vararg is not None) + (given.kwarg is not None)
        over = {"lines": lines > MOST_LINES, "parameters": parameters > MOST_PARAMETERS}
        if not any(over.values()):
            continue
        body = text.splitlines()[function.lineno - 1 : function.end_lineno]
        comments = " ".join(line for line in body if line.lstrip().startswith("#"))
        said = f"{ast.get_docstring(function)} {comments}"
        if any(past and not re.search(rf"\bmany {word}\b", said) for word, past in over.items()):
            found.append(f"{function.name}: {lines} lines, {parameters} parameters")
    return found


def test_functions_classes_and_files_fit_a_screen_or_say_why() -> None:
    paths = [path for path in parsed.tracked() if path.suffix == ".py"]
    found = {str(p.relative_to(ROOT)): large for p in paths if (large := too_large(parsed.text(p), parsed.nodes(p)))}
    assert found == {}
    for path in parsed.package():
        assert parsed.text(path).count("\n") <= OF_A_FILE, path
        classes = (node for node in parsed.nodes(path) if isinstance(node, ast.ClassDef))
        assert [node.name for node in classes if (node.end_lineno or 0) - node.lineno >= OF_A_CLASS] == [], path
