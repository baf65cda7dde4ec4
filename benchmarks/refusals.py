"""How long a user waits for the line that says what is wrong with the arguments or with config.json.

    python benchmarks/refusals.py

Prints the processor seconds of a whole process for each, from the start of Python to its end, beside those of one that
imports torch and transformers.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from bf16_to_fp16.checkpoint.places import local_path

SOURCE = "shipped:t5-gated-bytes"

OPTIONS = {
    "no such source": "nowhere/at/all OUT",
    "options that contradict": f"{SOURCE} OUT --sweep --no-audit",
    "a plan, and an option for choosing one": f"{SOURCE} OUT --plan OUT --margin 4",
    "no class of the family": f"{SOURCE} OUT --as BertModel",
}

EDITS: dict[str, dict[str, object]] = {
    "config.json: another type of model": {"model_type": "bert"},
    "config.json: a key is missing": {"d_model": None},
    "config.json: an impossible size": {"num_layers": 10**12},
    "config.json: heads that do not fit": {"num_heads": 5},
    "config.json: another kind of value": {"layer_norm_epsilon": "1e-6"},
    "config.json: an unknown activation": {"feed_forward_proj": "gated-tanh"},
}


def seconds(*words: str, status: int = 2) -> str:
    """Return the processor seconds of a process of Python, which ends with this status."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == status, done.stderr
    return f"{after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime:.2f}"


def main() -> None:
    """Print the table."""
    print("| what is wrong | processor seconds |\n|---|---|")
    config = json.loads((local_path(SOURCE) / "config.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        lines = {name: line.replace("OUT", f"{folder}/out") for name, line in OPTIONS.items()}
        for number, (name, edit) in enumerate(EDITS.items()):
            source = Path(folder, str(number))
            source.mkdir()
            (source / "config.json").write_text(json.dumps(config | edit), encoding="utf-8")
            lines[name] = f"{source} {folder}/out"
        for name, line in lines.items():
            print(f"| {name} | {seconds('-m', 'bf16_to_fp16', 'convert', *line.split())} |", flush=True)
    imports = seconds("-c", "import torch, transformers; from transformers import T5Model", status=0)
    print(f"| nothing: `import torch, transformers` and a model's class | {imports} |")


if __name__ == "__main__":
    main()
