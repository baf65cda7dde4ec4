"""What every test shares: no network, one thread per process, and the second environment.
The variables are set before anything imports torch or huggingface_hub, which read them once."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nothing listens there: a request fails at once
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import pytest
import torch
from huggingface_hub import constants
from support import brief, warm
from support.hub_server import WRITER, HubServer, as_the_hub

from bf16_to_fp16.measuring import probe


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="also run the tests that are marked exhaustive")


def pytest_configure() -> None:
    """Take Ctrl-C again where a shell has started the tests in the background, which tells children to ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


SLOW = (
    *("launch", "wheel", "finetune", "family_contract", "journeys", "stock_loading", "trainer", "demo"),
    *("soft_side", "images", "least_edit", "least_move", "drift", "make_safe", "certificate", "faults", "pipeline"),
    *("convert", "adamw", "determinism", "sentence_encoders", "pipelines", "lanes", "agreement"),
    *("planner", "moe", "publish", "last_token", "page", "tiers", "verify", "audit_any"),
    *("adapter", "padding", "regimes", "linears", "attack", "sources", "outputs"),
    *("bound_constraint", "centred_keys", "launching", "bad_input", "follow"),
)
"""Files that take longest: begun first, so that no worker is left alone with one at the end."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the slowest files first, and deselect what needs another machine or more time: ``gpu``, ``exhaustive``."""
    place = {f"test_{name}.py": number for number, name in enumerate(SLOW)}
    items.sort(key=lambda item: place.get(item.path.name, len(SLOW)))
    runs = {"gpu": torch.cuda.is_available(), "exhaustive": config.getoption("--exhaustive")}
    left_out = [name for name, selected in runs.items() if not selected]
    deselected = [item for item in items if any(item.get_closest_marker(name) for name in left_out)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        chosen = set(items) - set(deselected)
        items[:] = [item for item in items if item in chosen]


def pytest_collection_finish() -> None:
    """Leave what the imports made out of the search for garbage, and search seldom: it took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Put the signals' handlers back, which programs set for the rest of their process."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def brief_runs() -> Iterator[tuple[pytest.MonkeyPatch, pytest.MonkeyPatch]]:
    """Let pages have no pictures, the probe few batches, and no config be compared with stock code twice."""
    brief.agree_once(pytest.MonkeyPatch())
    with pytest.MonkeyPatch.context() as drawing, pytest.MonkeyPatch.context() as probing:
        brief.draw_nothing(drawing)
        brief.probe_briefly(probing)
        yield drawing, probing


@pytest.fixture
def pictures(brief_runs: tuple[pytest.MonkeyPatch, pytest.MonkeyPatch]) -> Iterator[None]:
    brief_runs[0].undo()
    yield
    brief.draw_nothing(brief_runs[0])


@pytest.fixture(scope="module")
def whole_probe(brief_runs: tuple[pytest.MonkeyPatch, pytest.MonkeyPatch]) -> Iterator[None]:
    brief_runs[1].undo()
    yield
    brief.probe_briefly(brief_runs[1])


@pytest.fixture
def first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    brief.audit_first_batch(monkeypatch)


@pytest.fixture(scope="module")
def first_batches() -> Iterator[None]:
    """The same for all tests of a file and what these share."""
    with pytest.MonkeyPatch.context() as patch:
        brief.audit_first_batch(patch)
        yield


@pytest.fixture
def whole_probe_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_probe", brief.WHOLE_PROBE)
    monkeypatch.setattr(probe, "audit_batches", brief.AUDITED)


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Return the folder that all workers of a run share, and the process in which the run began."""
    owner = os.environ.setdefault("TESTS_BEGAN_IN", str(os.getpid()))
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base), int(owner)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Let workers be forks of the process of which programs are: by itself each would import for ten seconds."""
    shared, owner = shared_folder(config._tmp_path_factory)  # type: ignore[attr-defined]
    os.environ[warm.WORKER] = "1"
    for spec in specs:
        spec.python = str(warm.interpreter(shared / "warm", owner))


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an interpreter that has its imports already; all workers of a run share its server."""
    shared, owner = shared_folder(tmp_path_factory)
    return warm.interpreter(shared / "warm", owner)


@pytest.fixture(scope="session")
def compat_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same of the second environment, making this where it is missing."""
    script = Path(__file__).parent / "compat" / "make_env.py"
    made = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, check=True)
    shared, owner = shared_folder(tmp_path_factory)
    return warm.interpreter(shared / "compat", owner, Path(made.stdout.strip()))


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    server = HubServer().start()
    yield server
    server.stop()


@pytest.fixture
def hub(server: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> HubServer:
    """A Hub with nothing on it, a token that may write, and a cache of the test's own."""
    server.clear()
    monkeypatch.setenv("HF_TOKEN", WRITER)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    as_the_hub(server, monkeypatch)
    return server
