"""Devices by name, one that is not there or is full, and what a card computes in."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml
from support import brief, exhaustive, tiny
from support.learner import recipe_tree, rows_of, saved
from support.program import refused
from torch import Tensor

from bf16_to_fp16 import UserError, audit, certify, convert
from bf16_to_fp16.bounds.spectral import gram, summed_products
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.devices import (
    Card,
    Device,
    cards,
    check_auto_uses_the_card,
    computes_in_bf16,
    find_device,
    on_device,
    products_on,
)
from bf16_to_fp16.finetuning import processes, run
from bf16_to_fp16.finetuning.recipe import Recipe, parse_recipe
from bf16_to_fp16.progress import Progress

STAND_IN = torch.device("meta")  # for a device where there is none: every torch has it, and its tensors have no values
DEMO_DATA = Path(__file__).parents[1] / "bf16_to_fp16" / "demo_data"


class Said(Progress):
    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@contextmanager
def stand_in(room: int) -> Iterator[list[int]]:
    """Let what is copied to ``STAND_IN`` stay on the CPU, until so many copies fill it; give the size of each."""
    to, copies = Tensor.to, list[int]()

    def copied(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.device.type == "cpu" and STAND_IN in (*args, kwargs.get("device")):
            if len(copies) == room:
                raise torch.OutOfMemoryError(f"{STAND_IN} is out of memory")
            copies.append(tensor.numel())
            args = tuple(torch.device("cpu") if arg == STAND_IN else arg for arg in args)
            kwargs = {name: torch.device("cpu") if arg == STAND_IN else arg for name, arg in kwargs.items()}
        return to(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "to", copied)
        yield copies


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.small("t5-encoder"), tmp_path_factory.mktemp("devices") / "source")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:0 ", "CPU", "cpu:0", "", "meta"])
def test_another_name_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(UserError, match=r"is unknown; choose auto, cpu, cuda, cuda:N or mps"):
        find_device(name)


@pytest.mark.parametrize(
    ("count", "name", "wanted"),
    [
        (0, "cuda", "device cuda: this machine has no CUDA device that torch can use; choose auto or cpu"),
        (1, "cuda:3", "device cuda:3: this machine has 1 CUDA device that torch can use; choose auto, cpu or cuda:0"),
        (2, "cuda:2", "2 CUDA devices that torch can use; choose auto, cpu or cuda:0 to cuda:1"),
        (0, "mps", "device mps: this machine has no MPS device that torch can use; choose auto or cpu"),
    ],
)
def test_a_missing_device_is_told(monkeypatch: pytest.MonkeyPatch, count: int, name: str, wanted: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr("bf16_to_fp16.devices.has_kernels", lambda device: True)
    with pytest.raises(UserError) as refused:
        find_device(name)
    assert wanted in str(refused.value)
    assert find_device("auto").type == ("cuda" if count else "cpu")
    assert find_device(torch.device("cpu")).type == "cpu"


def test_a_product_that_a_device_has_no_memory_for_is_made_on_the_cpu_and_only_that_is_made_again() -> None:
    places = []

    @on_device
    def double(x: torch.Tensor) -> torch.Tensor:
        places.append(said.lines[1:])
        return 2 * x

    said = Said()
    device = Device(STAND_IN, said)
    with stand_in(room=2), products_on(device):
        made = [double(torch.tensor([float(i)])).item() for i in range(4)]
    full = f"{STAND_IN} is out of memory: the certificate continues on the CPU"
    assert made == [0.0, 2.0, 4.0, 6.0]
    assert places == [[], [], [full], [full]]
    assert said.lines == [f"Device: {STAND_IN}", full]
    assert device.used == {"certificate": [str(STAND_IN), "cpu"]}


def test_a_gram_matrix_is_multiplied_on_the_device_from_its_first_sum_to_its_last() -> None:
    rows = torch.randn(300, 20)
    with stand_in(room=2) as copies, products_on(Device(STAND_IN, Said())):
        made = gram(rows)
    assert len(copies) == 2 and torch.equal(made, gram(rows))
    factors = torch.empty(2, 20, 256, device=STAND_IN)
    assert summed_products(factors, factors).device == STAND_IN


@pytest.mark.parametrize(
    ("device", "error"), [(STAND_IN, RuntimeError("shapes differ")), ("cpu", torch.OutOfMemoryError("out of memory"))]
)
def test_another_fault_or_a_full_cpu_is_not_tried_again(device: Any, error: RuntimeError) -> None:
    broken = Mock(side_effect=error)
    with pytest.raises(type(error), match=str(error)):
        Device(device).run("audit", broken)
    assert broken.call_count == 1


HALF: dict[str, Any] = {"regimes": ("half",)}
SEARCHED = HALF | {"attention": ("eager",), "attack_steps": 1}
ENDLESS = 10**9
RUNS = [
    *((certify, "certificate", {}, room) for room in (0, 3, ENDLESS)),
    *((audit, "audit", HALF, 40), (audit, "attack", SEARCHED, 0)),
]


@pytest.mark.parametrize(
    ("act", "part", "options", "room"), exhaustive.beyond(RUNS, [*RUNS, (audit, "attack", SEARCHED, ENDLESS)])
)
def test_what_a_device_gives_is_the_cpus_whenever_it_runs_full(
    act: Any, part: str, options: dict[str, Any], room: int, source: Path
) -> None:
    said = Said()
    with stand_in(room) as copies:
        expected = act(source, device="cpu", **options)
        found = act(source, device=STAND_IN, progress=said, **options)
    assert found | {"environment": {}} == expected | {"environment": {}}
    assert len(copies) == room or (room == ENDLESS and copies)
    full = room < ENDLESS
    there, here = (report["environment"]["devices"] for report in (found, expected))
    assert there[part] == [str(STAND_IN), *["cpu"] * full] and here[part] == ["cpu"]
    assert part == "attack" or list(there) == list(here) == [part]
    assert (f"{STAND_IN} is out of memory: the {part} continues on the CPU" in said.lines) == full


@pytest.mark.usefixtures("first_batch")
def test_a_conversion_on_a_device_that_is_full_says_what_ran_where(source: Path, tmp_path: Path) -> None:
    with stand_in(room=0):
        result = convert(source, tmp_path / "out", device=STAND_IN)
    told = json.loads((tmp_path / "out" / "fp16_report.json").read_text())["environment"]
    both = [str(STAND_IN), "cpu"]
    assert told["device"] == str(STAND_IN)
    assert [told["devices"][part] for part in ("observation", "certificate", "audit")] == [both] * 3
    assert "device of the audit" in (tmp_path / "out" / "fp16_report.html").read_text()
    assert result.safe


@pytest.mark.gpu
def test_bounds_and_audit_on_a_gpu_are_those_of_the_cpu(source: Path) -> None:
    ours, theirs = (certify(source, device=name) for name in ("cpu", "cuda"))
    for here, there in zip(ours["certificate"]["sites"], theirs["certificate"]["sites"], strict=True):
        assert there["bound"] == pytest.approx(here["bound"], rel=1e-6)
    assert "cuda" in theirs["environment"]["devices"]["certificate"][0]
    assert audit(source, device="cuda")["verdict"] == audit(source, device="cpu")["verdict"]


@pytest.mark.gpu
@pytest.mark.parametrize("demo", ["t5-gated-bytes", "pegasus-bytes"])
def test_a_conversion_on_a_gpu_is_that_of_the_cpu(demo: str, tmp_path: Path) -> None:
    converted = [tmp_path / device for device in ("cpu", "cuda")]
    assert all(convert(DEMO_DATA / demo, out, device=out.name).safe for out in converted)
    ours, theirs = (json.loads((folder / "fp16_report.json").read_text()) for folder in converted)
    assert ours["plan"]["residual_exponent"] == theirs["plan"]["residual_exponent"]
    assert ours["plan"]["exponents"] == theirs["plan"]["exponents"]
    files = [{p.name: p.read_bytes() for p in folder.glob("*.safetensors")} for folder in converted]
    assert files[0] == files[1] and files[0]
    assert "cuda" in theirs["environment"]["devices"]["audit"][0]


def test_a_card_that_torch_has_no_kernels_for_is_left_alone_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "zeros", refused)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))
    with pytest.raises(UserError, match=r"no kernels for this card; pip install .* or set device: cpu"):
        check_auto_uses_the_card("auto")
    assert find_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match=r"device cuda: torch .* has no kernels for this card; pip install --force-re"):
        find_device("cuda")


CUDA = torch.device("cuda", 0)
FOUR_V100 = "Tesla V100-SXM2-16GB, 7.0, 16160\n" * 4


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that shows four V100, and a torch that sees none."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\nprintf '{FOUR_V100}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)


def on_a(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


@pytest.mark.parametrize(
    ("capability", "bf16"), [((6, 1), False), ((7, 0), False), ((7, 5), False), ((8, 0), True), ((12, 1), True)]
)
def test_no_bf16_before_ampere(capability: tuple[int, int], bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Card("a card", capability, 1 << 30).has_bf16 is bf16
    on_a(capability, monkeypatch)
    assert computes_in_bf16(CUDA) is bf16
    assert computes_in_bf16(torch.device("cpu")) and computes_in_bf16(torch.device("mps"))


def accelerator(device: torch.device, **deepspeed: Any) -> Any:
    kind = "DEEPSPEED" if deepspeed else "NO"
    plugin = SimpleNamespace(deepspeed_config=deepspeed, zero_stage=2)
    state = SimpleNamespace(deepspeed_plugin=plugin)
    return SimpleNamespace(distributed_type=SimpleNamespace(value=kind), device=device, state=state, num_processes=1)


RECIPE: dict[str, Any] = {"source": "s", "out": "o", "data": {"path": "t.txt"}}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, None),
        ({"bf16": {"enabled": True}}, "JSON is not for precision fp16"),
        ({"torch_autocast": {"enabled": False}}, "JSON is not for precision fp16"),
    ],
)
def test_deepspeed_computes_in_the_recipes_precision(config: dict[str, Any], wanted: str | None) -> None:
    if wanted is None:
        assert processes.precisions_of(parse_recipe(RECIPE), accelerator(CUDA, **config)) == ("fp16", "fp16")
        return
    with pytest.raises(UserError, match=wanted):
        processes.precisions_of(parse_recipe(RECIPE), accelerator(CUDA, **config))


@pytest.mark.parametrize(("capability", "dtype"), [((7, 0), torch.float32), ((9, 0), torch.bfloat16)])
def test_the_teacher_of_a_bf16_checkpoint_is_fp32_where_the_card_has_none(
    capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_a(capability, monkeypatch)
    loaded: list[torch.dtype] = []
    monkeypatch.setattr(run, "load", lambda folder, dtype, **_: loaded.append(dtype))
    monkeypatch.setattr(run, "Teacher", lambda *_, **__: None)
    checkpoint = open_checkpoint(saved(tmp_path / "source", 1, dtype=torch.bfloat16))
    run.make_teacher(checkpoint, parse_recipe(RECIPE), accelerator(CUDA))
    assert loaded == [dtype]


def test_a_run_on_a_card_without_bf16_says_so_and_never_uses_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (run, processes):
        monkeypatch.setattr(module, "computes_in_bf16", lambda device: False)
    on_a((7, 0), monkeypatch)
    source = saved(tmp_path / "source", 30, dtype=torch.bfloat16)
    monkeypatch.setattr(run, "check_start", lambda *_: False)
    brief.evaluate_briefly(monkeypatch)
    monkeypatch.setattr("bf16_to_fp16.finetuning.trainer.FITTING_STEPS", 2)
    tree = recipe_tree(source, tmp_path / "out") | {"device": "cpu", "schedule": {"steps": 3}}
    recipe = Recipe.model_validate(tree | {"evaluation": {"every": 100}})
    run.train(recipe.settled(), open_checkpoint(source), progress=Progress())
    assert [row["precision"] for row in rows_of(tmp_path / "out.run", "precision")] == ["fp32", "fp32", "fp16"]
    said = "cpu has no bf16: the teacher is in fp32, and so are the steps before all values fit fp16\n"
    assert capsys.readouterr().err.count(said) == 1


@pytest.mark.usefixtures("driver")
def test_the_drivers_cards_are_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cards() == [Card("Tesla V100-SXM2-16GB", (7, 0), 16160 << 20)] * 4
    for visible, count in (("0,2", 2), ("", 0), ("-1", 0), ("GPU-4f3", 4)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert len(cards()) == count


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(("build", "reason"), [(None, "a build without CUDA"), ("13.0", "for CUDA 13.0 cannot use it")])
def test_a_card_that_torch_cannot_use_ends_a_finetune_with_the_line_that_mends_it(
    build: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", build)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE | {"source": "shipped:t5-gated-bytes", "out": str(tmp_path / "out")}))
    words = ["finetune", str(recipe), "--set", "data.path=shipped:held_out.txt"]
    said = refused(capsys, *words)
    assert said.startswith("error: there is a Tesla V100-SXM2-16GB and torch ")
    assert reason in said and "; pip install --force-reinstall torch==2.7.1 (" in said
    assert not (tmp_path / "out.run").exists()
    monkeypatch.setattr(run, "open_checkpoint", lambda *_, **__: (_ for _ in ()).throw(UserError("it went on")))
    assert "it went on" in refused(capsys, *words, "--set", "device=cpu")
