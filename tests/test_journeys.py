"""The ways that people go, by the commands that the docs print, in an empty folder. Two further ones:
``test_wheel.py`` and ``test_vllm_plugin.py``; recipes that are launched: ``finetuning/test_launch.py``."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import snapshot_download
from support.hub_server import HubServer
from support.learner import recipe_tree, saved
from support.tiny import save

from bf16_to_fp16.cli import main
from bf16_to_fp16.measuring.stock import load

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("first_batch")
Program = Callable[..., str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with ``model``, a T5 that overflows, and its text."""
    model = load(saved(tmp_path / "model", 60, dropout=0.0), torch.float32)
    for name, weight in model.named_parameters():
        if name == "shared.weight" or name.endswith((".o.weight", ".wo.weight")):  # the stream, and not the logits
            weight.data.mul_(2.0**18)
    model.decoder.final_layer_norm.weight.data.mul_(2.0**-18)
    save(model, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str]) -> Program:
    def run(*words: object) -> str:
        capsys.readouterr()
        status = main([*map(str, words)])
        printed = capsys.readouterr()
        assert status == 0, printed.err
        return printed.out

    return run


IDS = torch.arange(60, 90)[None]


@torch.no_grad()
def logits(folder: Path | str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = load(Path(folder), dtype)
    decoder = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    values: torch.Tensor = model(input_ids=IDS, **decoder).logits
    return values


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def report(folder: str) -> Any:
    return json.loads(Path(folder, "fp16_report.json").read_text())


FOLLOWED = "safe.follow(torch.optim.AdamW(model.parameters(), lr=1e-4), model, max_grad_norm=1.0)"
WITHOUT_US = {  # lines of the script, and what they are without this package
    "from bf16_to_fp16 import make_fp16_safe\n": "",
    "safe = make_fp16_safe(model)\nprint(safe)\n": "",
    FOLLOWED: "torch.optim.AdamW(model.parameters(), lr=1e-4)",
    "max_grad_norm=0)": "max_grad_norm=1.0)",
    "safe.undo(model)\n": "",
}


def script(start: str, out: str, changes: Mapping[str, str]) -> str:
    """Return the script of docs/training.md with another start, rows to train on, and a CPU in place of a V100."""
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(# train\.py.*?)```", text, re.DOTALL)
    here = {
        "google/flan-t5-base": start,
        "flan-t5-base-finetuned": out,
        "fp16=True": "use_cpu=True, max_steps=4, report_to='none', disable_tqdm=True",
        "train_dataset=...": "train_dataset=rows",
    }
    for old, new in {**here, **changes}.items():
        assert old in code
        code = code.replace(old, new)
    return code


def rows() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, 259, (16, 24), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row.flip(0)} for row in ids]


def test_a_trainer_ends_where_it_would_from_the_original_and_at_its_scale(here: Path, program: Program) -> None:
    program("convert", "model", "converted", "--target", "train")
    exec(script("model", "wanted", WITHOUT_US), {"rows": rows()})
    wanted, before = logits("wanted"), logits("model")
    for start in ("model", "converted"):
        exec(script(start, f"{start}-finetuned", {}), {"rows": rows()})
        assert distance(logits(f"{start}-finetuned"), wanted) < 1e-3 * distance(before, wanted)
    program("convert", "converted-finetuned", "mine-fp16")
    assert distance(logits("mine-fp16", torch.float16), logits("converted-finetuned")) < 0.01


def test_a_recipe_is_run_and_published(here: Path, program: Program, hub: HubServer) -> None:
    tree = recipe_tree(here / "model", Path("mine-fp16")) | {"schedule": {"steps": 6, "learning_rate": 3e-4}}
    Path("recipe.yaml").write_text(yaml.safe_dump(tree))
    program("finetune", "recipe.yaml", "--set", "device=cpu")
    assert report("mine-fp16")["finetune"]["steps"] == 6
    program("verify", "mine-fp16")
    program("publish", "mine-fp16", "me/mine-fp16", "-y", "--endpoint", hub.endpoint)
    down = snapshot_download("me/mine-fp16", endpoint=hub.endpoint)
    assert "verified" in program("verify", "me/mine-fp16")
    assert torch.equal(logits(down, torch.float16), logits("mine-fp16", torch.float16))


def test_a_finetuned_sibling_is_converted_by_the_same_plan_and_can_be_averaged(here: Path, program: Program) -> None:
    sibling = load(here / "model", torch.float32)
    with torch.no_grad():
        for weight in sibling.parameters():
            weight.mul_(1 + 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    save(sibling, here / "sibling")
    program("convert", "model", "converted")
    program("convert", "sibling", "sibling-fp16", "--plan", "converted")
    for folders, name in ((("model", "sibling"), "mean"), (("converted", "sibling-fp16"), "mean-fp16")):
        mean, other = (load(here / folder, torch.float32) for folder in folders)
        with torch.no_grad():
            for weight, beside in zip(mean.parameters(), other.parameters(), strict=True):
                weight.lerp_(beside, 0.5)
        shutil.copytree(folders[0], name)
        mean.save_pretrained(name)
    assert distance(logits("mean-fp16"), logits("mean")) < 1e-4 < distance(logits("sibling"), logits("mean"))
