"""A tiny T5 of bytes that learns a sentence in a few steps, the sentence, and its trainer."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bf16_to_fp16.finetuning import run, start
from bf16_to_fp16.finetuning.corpus import Corpus, TrainingBatch
from bf16_to_fp16.finetuning.distillation import Teacher
from bf16_to_fp16.finetuning.mixed_precision import MixedPrecision
from bf16_to_fp16.finetuning.processes import make_accelerator
from bf16_to_fp16.finetuning.recipe import Recipe, parse_recipe
from bf16_to_fp16.finetuning.states import start_tracker
from bf16_to_fp16.finetuning.trainer import Trainer

TEXT = "the quick brown fox jumps over the lazy dog and runs away from it "


def without_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have finetunes begin with what exact rescaling alone makes of their source."""
    options = start.options_of

    def exact(*given: Any, **others: Any) -> Any:
        return replace(options(*given, **others), exact=True)

    for module in (run, start):
        monkeypatch.setattr(module, "options_of", exact)


def tiny_model(seed: int = 0, dropout: float = 0.1) -> Any:
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"vocab_size": 384, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    shape |= {"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0, "dropout_rate": dropout}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**shape))
    model.set_attn_implementation("eager")
    return model


def saved(folder: Path, lines: int, dropout: float = 0.1, dtype: torch.dtype = torch.float32) -> Path:
    tiny_model(dropout=dropout).to(dtype).save_pretrained(folder)
    transformers.ByT5Tokenizer(extra_ids=125).save_pretrained(folder)
    (folder / "text.txt").write_text("".join(f"{TEXT}{i}\n" for i in range(lines)))
    return folder


def recipe_tree(source: Path, out: Path) -> dict[str, Any]:
    data = {"path": str(source / "text.txt"), "first_sentinel": 383, "input_length": 48, "target_length": 24}
    tree: dict[str, Any] = {"source": str(source), "out": str(out), "data": data | {"batch_size": 4, "held_out": 0.1}}
    tree |= {"schedule": {"steps": 6, "learning_rate": 0.003}, "checkpointing": {"every": 2}}
    # Of the KL alone a student that begins as its teacher would learn nothing.
    return tree | {"distillation": {"weight": 0.5}}


def changed(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    sections = {k: {**tree[k], **v} for k, v in changes.items() if isinstance(v, dict) and k in tree}
    return {**tree, **changes, **sections}


class Killed(BaseException):
    """Stands for the end of the process, which no handler sees."""


Make = Callable[..., Trainer]
Fix = Callable[..., None]
Damage = Callable[[int, TrainingBatch], TrainingBatch]  # what becomes of the batch of a step of data


def kept(step: int, batch: TrainingBatch) -> TrainingBatch:
    return batch


def killed_at(end: int) -> Damage:
    """Return the damage that ends the process at a step of data."""

    def kill(step: int, batch: TrainingBatch) -> TrainingBatch:
        if step == end:
            raise Killed
        return batch

    return kill


def trainer_of(recipe: Recipe, folder: Path, run: Path, model: Any, original: Any, damage: Damage = kept) -> Trainer:
    corpus = Corpus(recipe.data, folder, model.config, seed=recipe.seed)
    run.mkdir(exist_ok=True)
    accelerator = make_accelerator(recipe)
    teacher = None
    if recipe.distillation.weight:
        teacher = Teacher(original, accelerator.device)
    start_tracker(accelerator, recipe, run)
    trainer = Trainer(recipe, model, teacher, corpus, run, accelerator)
    batches = trainer.training_batches
    advance = type(batches).__next__

    class Damaged(type(batches)):  # type: ignore[misc]
        def __next__(self) -> TrainingBatch:
            step = self.steps
            return damage(step, advance(self))

    batches.__class__ = Damaged
    return trainer


def rows_of(run: Path, key: str = "step") -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [row for row in rows if key in row]


def recipe_for(folder: Path, out: Path, **changes: Any) -> Recipe:
    tree = recipe_tree(folder, out) | {"device": "cpu", "precision": "fp16", "optimizer": {"relative": False}}
    tree |= {"schedule": {"steps": 8, "learning_rate": 0.003}, "penalty": {"form": "none"}}
    tree |= {"checkpointing": {"every": 4}, "evaluation": {"every": 100}}
    return parse_recipe(changed(tree, changes))


def amp(precision: str, scale: float = 1.0) -> MixedPrecision:
    made = MixedPrecision(precision, torch.device("cpu"))
    if made.loss_scale is not None:
        made.loss_scale.scale = scale
    return made


def scaled(trainer: Trainer, scale: float) -> Trainer:
    assert trainer.mixed_precision.loss_scale is not None
    trainer.mixed_precision.loss_scale.scale = scale
    return trainer


def begun_in_bf16(trainer: Trainer) -> Trainer:
    """Let the start of a new run not fit fp16."""
    trainer.position.phase, trainer.mixed_precision = 0, trainer._mixed_precision(0)
    return trainer


def steps_of(run: Path) -> list[dict[str, Any]]:
    return rows_of(run, "loss")


def losses_of(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in steps_of(run)}
