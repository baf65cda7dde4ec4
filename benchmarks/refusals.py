"""How long a user waits for the line that says what is wrong with the arguments or with the files that they name.

    python benchmarks/refusals.py

Prints the processor seconds of a whole process for each, from the start of Python to its end, beside those of one that
imports torch and transformers.
"""

from __future__ import annotations

import json
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from bf16_to_fp16.checkpoint.places import local_path
from bf16_to_fp16.checkpoint.recorded import REPORT

WEIGHTS = "pytorch_model.bin"

LINES = {
    "no such source": "convert nowhere/at/all OUT",
    "options that contradict": "convert SOURCE OUT --sweep --no-audit",
    "a plan, and an option for choosing one": "convert SOURCE OUT --plan OUT --margin 4",
    "no class of the family": "convert SOURCE OUT --as BertModel",
    "text, and no tokenizer": "convert BARE OUT --data TEXT",
    "a recipe that is none": "convert SOURCE OUT --finetune TEXT",
    "a dry run that is to be published": "convert SOURCE OUT --dry-run --push-to me/it",
    "a plan that is none": "convert SOURCE OUT --plan TEXT",
    "a plan for another target": "convert SOURCE OUT --plan CONVERTED --target fp16-accumulate",
    "a pickle that is cut short": "convert PICKLED OUT",
    "an adapter of another kind": "convert CONVERTED OUT --adapter ADAPTER",
    **{f"`{name}`: no report": f"{name} BARE {rest}" for name, rest in (("verify", ""), ("undo", "OUT"))},
    **{
        f"`{name}`: a report of another version": f"{name} OLDER {rest}"
        for name, rest in (("verify", ""), ("undo", "OUT"))
    },
    "`publish`: a damaged report": "publish DAMAGED me/it --dry-run",
    "torch is asked: a device that is not here": "audit SOURCE --device cuda:9999",
    "torch is asked: a pickle that holds more than tensors": "convert CODE OUT",
    "torch comes first: a plan of a wrong type": "verify MISTYPED",
    "torch comes first: a plan of another family": "convert OTHER OUT --plan CONVERTED",
}

EDITS: dict[str, dict[str, object]] = {
    "config.json: another type of model": {"model_type": "bert"},
    "config.json: a key is missing": {"d_model": None},
    "config.json: an impossible size": {"num_layers": 10**12},
    "torch comes first: a config that does not fit the tensors": {"num_heads": 5},
    "config.json: another kind of value": {"tie_word_embeddings": -1},
    "config.json: an unknown activation": {"feed_forward_proj": "gated-tanh"},
    "stock code is asked: a key that contradicts another": {"dense_act_fn": "relu"},
}


def seconds(*words: str, status: int = 2) -> str:
    """Return the processor seconds of a process of Python, which ends with this status."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == status, done.stderr
    return f"{after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime:.2f}"


def damaged(folder: Path) -> dict[str, object]:
    """Return by its name in ``LINES`` each folder and file, written below a folder."""
    source, out = local_path("shipped:t5-gated-bytes"), folder / "converted"
    seconds("-m", "bf16_to_fp16", "convert", str(source), str(out), "--no-audit", status=0)
    report = json.loads((out / REPORT).read_text(encoding="utf-8"))
    texts = {"DAMAGED": "{", "OLDER": report | {"schema": 0}, "MISTYPED": report | {"plan": {"family": 3}}}
    for name, text in texts.items():
        shutil.copytree(out, folder / name)
        (folder / name / REPORT).write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
    for name, pickled in {"PICKLED": b"PK", "CODE": None}.items():
        shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("*.safetensors"))
        (folder / name / WEIGHTS).write_bytes(pickled or b"")
    with zipfile.ZipFile(folder / "CODE" / WEIGHTS, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"weight": Path()}, protocol=2))
    shutil.copytree(source, folder / "BARE", ignore=shutil.ignore_patterns("tokenizer*"))
    (folder / "ADAPTER").mkdir()
    (folder / "ADAPTER" / "adapter_config.json").write_text('{"peft_type": "IA3"}', encoding="utf-8")
    (folder / "TEXT.txt").write_text("a text", encoding="utf-8")
    made = {name: folder / name for name in (*texts, "PICKLED", "CODE", "BARE", "ADAPTER")}
    others = {"SOURCE": source, "OTHER": "shipped:pegasus-bytes", "OUT": folder / "out", "TEXT": folder / "TEXT.txt"}
    return {**made, **others, "CONVERTED": out}


def main() -> None:
    """Print the table."""
    print("| what is wrong | processor seconds |\n|---|---|")
    with tempfile.TemporaryDirectory() as name:
        places = damaged(Path(name))
        lines = {what: [str(places.get(word, word)) for word in line.split()] for what, line in LINES.items()}
        config = json.loads((Path(str(places["SOURCE"])) / "config.json").read_text(encoding="utf-8"))
        for number, (what, edit) in enumerate(EDITS.items()):
            source = Path(shutil.copytree(str(places["SOURCE"]), Path(name, str(number))))
            (source / "config.json").write_text(json.dumps(config | edit), encoding="utf-8")
            lines[what] = ["convert", str(source), str(places["OUT"])]
        for what, line in lines.items():
            print(f"| {what} | {seconds('-m', 'bf16_to_fp16', *line)} |", flush=True)
    imports = seconds("-c", "import torch, transformers; from transformers import T5Model", status=0)
    print(f"| nothing: `import torch, transformers` and a model's class | {imports} |")


if __name__ == "__main__":
    main()
