"""The package as its wheel installs it: every file is there, and a command reads those that ship."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.launching import ON_CPU, ROOT


def test_a_wheel_has_every_file_and_its_command_reads_them(tmp_path: Path) -> None:
    tree, site, empty = (tmp_path / name for name in ("tree", "site", "empty"))
    shutil.copytree(ROOT / "bf16_to_fp16", tree / "bf16_to_fp16", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", tree, "--no-deps", "--no-build-isolation", "-w", tmp_path / "dist"], check=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-compile", "--target", site, wheel], check=True)
    packages = (root / "bf16_to_fp16" for root in (site, tree))
    there, wanted = ({path.relative_to(root) for path in root.rglob("*") if path.is_file()} for root in packages)
    assert there == wanted
    empty.mkdir()
    environment = os.environ | {"PYTHONPATH": str(site), **ON_CPU}
    for words in (["recipe", "flan-t5-base"], ["certify", "shipped:t5-gated-bytes"]):
        program = [sys.executable, str(site / "bin" / "bf16-to-fp16"), *words]
        done = subprocess.run(program, cwd=empty, env=environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == (words[0] == "certify"), done.stderr
        assert ("data:" if words[0] == "recipe" else "not certified") in done.stdout
