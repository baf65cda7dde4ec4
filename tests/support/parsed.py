"""The project's own files as text and syntax trees, each read and parsed once for all tests that look them over."""

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "bf16_to_fp16"


@cache
def tracked() -> tuple[Path, ...]:
    """Return the text files that belong to the project: those that git tracks or would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = (ROOT / name for name in filter(None, listed.split("\0")))
    return tuple(path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:8192])


@cache
def package() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


@cache
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(text(path))))
