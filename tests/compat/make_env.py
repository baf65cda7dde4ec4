"""Makes ``.venv-compat``: transformers 4.57 and CTranslate2, which must read converted folders too.

``python tests/compat/make_env.py`` prints the new interpreter's path, and makes it again when ``constraints.txt`` has
changed. A lock lets several test processes ask at once; the stamp is written last.
"""

import fcntl
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).with_name("constraints.txt")
ENVIRONMENT = Path(__file__).parents[2] / ".venv-compat"
PACKAGES = ["torch", "transformers", "ctranslate2", "sentencepiece"]


def make_environment(environment: Path = ENVIRONMENT) -> Path:
    """Return the environment's interpreter, building it first where it is missing or outdated."""
    python = environment / "bin" / "python"
    stamp = environment / ".installed"
    wanted = CONSTRAINTS.read_text()
    with open(environment.with_name(environment.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (stamp.exists() and stamp.read_text() == wanted):
            print(f"making {environment.name} (about a minute)", file=sys.stderr, flush=True)
            run(sys.executable, "-m", "venv", "--clear", str(environment))
            run(str(python), "-m", "pip", "install", "-q", "-c", str(CONSTRAINTS), *PACKAGES)
            stamp.write_text(wanted)
    return python


def run(*command: str) -> None:
    """Run a command with its output on standard error, which keeps standard output for the path."""
    subprocess.run(command, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    print(make_environment())
