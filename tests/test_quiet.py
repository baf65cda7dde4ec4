"""Called from Python the package prints nothing, whatever the libraries beneath would, and puts their settings back."""

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from support import tiny
from transformers.utils import logging as stock

from bf16_to_fp16.quiet import quiet

CALLS = """
import sys
from bf16_to_fp16 import audit, certify, cli, convert, verify
source, out = sys.argv[1:]
convert(source, out, run_model=False)
audit(out, regimes=("half",))
verify(out, run_model=False)
print("the command:", file=sys.stderr)
cli.main(["certify", source])
"""


def test_the_python_interface_prints_nothing_and_a_command_its_own_steps_and_no_more(tmp_path: Path) -> None:
    """In a process of its own, where the libraries are imported and warn for the first time."""
    source = tiny.save(tiny.build("t5-encoder", num_layers=1), tmp_path / "source")
    arguments = [sys.executable, "-c", CALLS, str(source), str(tmp_path / "out")]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and (tmp_path / "out").is_dir() and done.stdout.startswith("not certified")
    assert done.stderr.splitlines() == [
        "the command:",
        "Bounding every site in PyTorch",
        "Device: cpu",
        "Bounding every site in stricter arithmetic",
    ]


@pytest.mark.parametrize("bars", [True, False])
def test_what_a_program_has_set_is_as_before(bars: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    logger, torchao = logging.getLogger("DeepSpeed"), logging.getLogger("torchao")
    monkeypatch.setattr(stock, "_tqdm_active", bars)
    enable_progress_bars()
    monkeypatch.setattr(torchao, "level", logging.INFO)
    level = stock.get_verbosity()
    stock.set_verbosity(logging.INFO)
    filters, caught = list(logger.filters), list(warnings.filters)
    try:
        with pytest.raises(KeyError), quiet():
            assert not stock.is_progress_bar_enabled() and are_progress_bars_disabled()
            assert not logging.getLogger("transformers").isEnabledFor(logging.ERROR)
            assert not torchao.isEnabledFor(logging.WARNING)
            raise KeyError
        assert stock.get_verbosity() == logging.INFO and torchao.level == logging.INFO
        assert (stock.is_progress_bar_enabled(), are_progress_bars_disabled()) == (bars, False)
        assert logger.filters == filters and list(warnings.filters) == caught
    finally:
        stock.set_verbosity(level)
        enable_progress_bars()


def test_a_call_inside_another_leaves_the_outer_one_silent() -> None:
    logger = logging.getLogger("DeepSpeed")
    before = list(logger.filters)
    with quiet():
        with quiet():
            pass
        assert len(logger.filters) == len(before) + 1
    assert logger.filters == before
