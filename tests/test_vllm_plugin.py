"""vLLM's refusal of fp16 by model type is lifted for what a report calls safe; a module stands in where vLLM is not."""

import logging
import shutil
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from support import tiny
from support.forging import flip, forge
from support.parsed import ROOT

from bf16_to_fp16 import convert, vllm_plugin
from bf16_to_fp16.report.schema import REPORT

NAME = "vllm.config.model"


def stand_in() -> ModuleType:
    """Return a module that refuses float16 as vLLM's does: by its list, at the time of the call."""
    module = ModuleType(NAME)
    refused = {"gemma2": "unstable", "gemma3_text": "unstable"}

    def decide(model_id: str, config: Any, dtype: Any, *, is_pooling_model: bool) -> torch.dtype:
        asked = dtype if isinstance(dtype, torch.dtype) else getattr(torch, {"half": "float16"}.get(dtype, dtype))
        if asked == torch.float16 and config.model_type in refused:
            raise ValueError(f"{config.model_type} does not support float16")
        return asked

    setattr(module, vllm_plugin.REFUSED, refused)
    setattr(module, vllm_plugin.DECIDES, decide)
    return module


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module with the plugin registered, twice as in a process that loads plugins again."""
    vllm_plugin.objection.cache_clear()
    try:
        module = import_module(NAME)
    except ImportError:
        module = stand_in()
        package, config = ModuleType("vllm"), ModuleType("vllm.config")
        config.model = module  # type: ignore[attr-defined]
        for name, made in {"vllm": package, "vllm.config": config, NAME: module}.items():
            monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.setattr(module, vllm_plugin.DECIDES, getattr(module, vllm_plugin.DECIDES))
    vllm_plugin.register()
    once = getattr(module, vllm_plugin.DECIDES)
    vllm_plugin.register()
    assert getattr(module, vllm_plugin.DECIDES) is once
    return module


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("served")
    source = tiny.save(tiny.small("gemma2"), root / "source")
    assert convert(source, root / "out", run_model=False).report["verdict"] == "safe"
    return {"source": source, "out": root / "out"}


def dtype_of(module: Any, folder: Path, dtype: Any = "float16") -> torch.dtype:
    config = transformers.AutoConfig.from_pretrained(folder)
    decided: torch.dtype = getattr(module, vllm_plugin.DECIDES)(str(folder), config, dtype, is_pooling_model=False)
    return decided


def test_a_converted_folder_runs_in_fp16_and_its_source_does_not(vllm: Any, folders: dict[str, Path]) -> None:
    refused = dict(getattr(vllm, vllm_plugin.REFUSED))
    for dtype in ("half", "float16", torch.float16):
        assert dtype_of(vllm, folders["out"], dtype) == torch.float16
        with pytest.raises(ValueError, match="does not support float16"):
            dtype_of(vllm, folders["source"], dtype)
    assert getattr(vllm, vllm_plugin.REFUSED) == refused
    assert dtype_of(vllm, folders["out"], "bfloat16") == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: flip(folder / "model.safetensors"), "model.safetensors was changed, damaged or cut short"),
        (lambda folder: forge(folder, {"verdict": "unsafe"}, views=False), f"{REPORT} says unsafe"),
        (
            lambda folder: shutil.copy(folder / "model.safetensors", folder / "more.safetensors"),
            "more.safetensors is not in the report",
        ),
        (lambda folder: (folder / REPORT).write_text("{"), "not valid JSON"),
        (lambda folder: (folder / REPORT).unlink(), None),
    ],
    ids=["changed weights", "unsafe", "further weights", "broken report", "no report"],
)
def test_another_folder_stays_refused_and_the_log_says_why(
    change: Any, said: str | None, vllm: Any, folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(folders["out"], tmp_path / "out")
    change(tmp_path / "out")
    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match="does not support float16"):
        dtype_of(vllm, tmp_path / "out")
    lines = [record.getMessage() for record in caplog.records if record.name == vllm_plugin.LOG.name]
    assert len(lines) == (said is not None) and all("not treated as safe in fp16" in line for line in lines)
    assert said is None or said in lines[0]


def test_a_vllm_that_decides_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    config = ModuleType("vllm.config")
    config.model = module = ModuleType(NAME)  # type: ignore[attr-defined]
    for name, made in {"vllm": ModuleType("vllm"), "vllm.config": config, NAME: module}.items():
        monkeypatch.setitem(sys.modules, name, made)
    vllm_plugin.register()
    assert "changes nothing" in caplog.text and not hasattr(module, vllm_plugin.DECIDES)


def test_the_entry_point_of_vllms_plugins_is_the_function() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["bf16_to_fp16"].partition(":")
    assert getattr(import_module(module), name) is vllm_plugin.register
