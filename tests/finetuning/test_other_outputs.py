"""Finetuning what predicts no tokens: a classifier, a reader of spans, bare states, kept at what the original gives."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from support import tiny
from support.exhaustive import beyond
from support.learner import recipe_tree

from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.finetuning.corpus import Corpus, TrainingBatch
from bf16_to_fp16.finetuning.distillation import Teacher, arguments, counted_positions, counted_values
from bf16_to_fp16.finetuning.recipe import Data, parse_recipe
from bf16_to_fp16.finetuning.run import finetune
from bf16_to_fp16.measuring.stock import load_config
from bf16_to_fp16.rescaling.weights import ModelTensors

pytestmark = pytest.mark.usefixtures("first_batch")
KINDS = ("t5-classifier", "t5-token-classifier", "t5-spans", "t5-states", "llama-reward")


def source_of(kind: str, folder: Path) -> Path:
    """Save a byte-level model whose scores overflow, with its tokenizer and some text."""
    model = tiny.small(kind, 3, factor=1.0, vocab_size=384, relative_attention_num_buckets=8)
    (attention, *_) = [w for w in resolve(ModelTensors(model)).topology if hasattr(w, "query")]
    with torch.no_grad():
        model.get_submodule(attention.query).weight.mul_(3e5)
    tiny.save(model, folder)
    transformers.ByT5Tokenizer(extra_ids=125).save_pretrained(folder)
    (folder / "text.txt").write_text("\n".join(f"line {i} of a text about numbers" for i in range(80)))
    return folder


@pytest.mark.parametrize("kind", beyond(["t5-classifier"], ["t5-classifier", "t5-spans"]))
def test_it_is_trained_until_it_fits_and_keeps_its_class(kind: str, tmp_path: Path) -> None:
    source = source_of(kind, tmp_path / "source")
    tree = recipe_tree(source, tmp_path / "out") | {"device": "cpu", "evaluation": {"every": 100, "attack_steps": 0}}
    tree["data"] = {"path": str(source / "text.txt"), "input_length": 24, "batch_size": 4}
    tree["schedule"] = {**tree["schedule"], "steps": 6, "learning_rate": 0.05}
    tree["quality"] = {"max_kl": None}
    result = finetune(parse_recipe(tree))
    assert result is not None
    report = json.loads((tmp_path / "out" / "fp16_report.json").read_text())
    run = report["finetune"]
    assert run["data"]["objective"] == "text" and run["evaluations"][-1]["held_out_loss"] is None
    assert 0 < run["evaluations"][-1]["held_out_divergence"] < 1e3
    assert report["regimes"]["half"]["nonfinite"] == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [
        type(tiny.KINDS[kind]()).__name__
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_no_way_from_itself_and_some_from_another(kind: str, tmp_path: Path) -> None:
    source = source_of(kind, tmp_path / "source")
    corpus = Corpus(Data(path=str(source / "text.txt"), input_length=24), source, load_config(source))
    batch = next(corpus.training_batches())
    one, other = (Teacher(tiny.build(kind, seed, factor=1.0, vocab_size=384), torch.device("cpu")) for seed in (0, 1))
    with torch.no_grad():
        out = one.model(**arguments(one.model, batch, one.device))
    assert float(one.divergence(out, batch)) == pytest.approx(0.0, abs=1e-6)
    assert float(other.divergence(out, batch)) > 1e-4
    # A classifier or reward of rows gives one output for a row, the others one for every token.
    rows, tokens = len(batch.input_ids), int(batch.attention_mask.sum())
    count = rows if kind in ("t5-classifier", "llama-reward") else tokens
    assert len(counted_values(out, batch)) == int(counted_positions(batch).sum()) == count


def test_what_counts_of_a_row_is_its_last_token() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 0, 0]])
    batch = TrainingBatch(torch.ones_like(mask), mask, None, ((0, 0),), row_wise=True)
    assert counted_positions(batch).int().tolist() == [[0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]]
