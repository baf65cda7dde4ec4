"""Compares two folders by what stock code computes from them, each in a process of a chosen environment.
Errors are relative to the largest magnitude of the reference."""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Outcome:
    output: np.ndarray
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    version: str


def run_script(python: str | Path, script: str, *arguments: str | Path) -> None:
    done = subprocess.run([python, "-I", HERE / script, *arguments], stderr=subprocess.PIPE, text=True, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(f"{script} failed in {python}:\n{done.stderr[-3000:]}")


def read_config(folder: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((folder / "config.json").read_text())
    return config


def edit_config(folder: Path, **values: object) -> None:
    config = read_config(folder) | values
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def make_inputs(folder: Path, seed: int = 0) -> dict[str, np.ndarray]:
    """Return ids of three padded sources with end tokens, of three targets, and an image for a Gemma 3's first row."""
    whole = read_config(folder)
    inner = whole.get("text_config")
    config = inner if isinstance(inner, dict) else whole
    vocabulary = config["vocab_size"]
    assert isinstance(vocabulary, int)
    generator = np.random.default_rng(seed)
    mask = (np.arange(12) < np.array([[12], [9], [4]])).astype(np.int64)
    ids = generator.integers(3, vocabulary, (3, 12)) * mask
    end = config.get("eos_token_id", 1)
    assert isinstance(end, int)
    ids[np.arange(3), mask.sum(1) - 1] = end
    decoder_ids = generator.integers(3, vocabulary, (3, 8))
    start = config.get("decoder_start_token_id", 0)
    assert isinstance(start, int)
    decoder_ids[:, 0] = start
    made = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": decoder_ids}
    if not isinstance(vision := whole.get("vision_config"), dict) or "mm_tokens_per_image" not in whole:
        return made
    marks, size = np.zeros_like(ids), vision["image_size"]
    tokens, token = whole["mm_tokens_per_image"], whole["image_token_index"]
    assert isinstance(tokens, int) and isinstance(token, int)
    marks[0, 2 : 2 + tokens] = 1
    ids[marks == 1] = token
    pixels = generator.random((1, vision["num_channels"], size, size), dtype=np.float32) * 2 - 1
    return made | {"pixel_values": pixels, "token_type_ids": marks}


def compute_logits(folders: Sequence[Path], python: str | Path, dtype: str = "float32") -> list[Outcome]:
    """Return each folder's logits (an encoder's last hidden state) on its ``make_inputs``."""
    outcomes = []
    for arrays in run_jobs(folders, python, "logits.py", "--dtype", dtype):
        missing, unexpected = (tuple(arrays[k].tolist()) for k in ("missing", "unexpected"))
        outcomes.append(Outcome(arrays["output"], missing, unexpected, str(arrays["version"])))
    return outcomes


def compute_scores(folders: Sequence[Path], python: str | Path) -> list[np.ndarray]:
    return [arrays["output"] for arrays in run_jobs(folders, python, "score_ct2.py")]


def run_jobs(folders: Sequence[Path], python: str | Path, script: str, *options: str) -> list[dict[str, np.ndarray]]:
    with tempfile.TemporaryDirectory() as scratch:
        jobs: list[Path] = []
        for number, folder in enumerate(folders):
            inputs, out = Path(scratch, f"inputs{number}.npz"), Path(scratch, f"out{number}.npz")
            np.savez(inputs, **make_inputs(folder))  # type: ignore[arg-type]
            jobs += [folder, inputs, out]
        run_script(python, script, *options, *jobs)
        return [dict(np.load(out)) for out in jobs[2::3]]


def relative_error(values: np.ndarray, reference: np.ndarray) -> float:
    """Return max|values − reference| / max|reference|; infinite where a value is not finite."""
    if values.shape != reference.shape or not np.isfinite(values).all():
        return float("inf")
    return float(np.abs(values - reference).max() / np.abs(reference).max())
