"""Finetuning what predicts no tokens, kept at what the original gives, and causal models, trained on the next token."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support import causal, tiny
from support.contract import layout_of
from support.exhaustive import beyond
from support.learner import recipe_tree
from support.observed import model_of
from tokenizers import processors

from bf16_to_fp16.families.resolve import ModelTensors, resolve
from bf16_to_fp16.finetuning.corpus import Corpus, TrainingBatch
from bf16_to_fp16.finetuning.distillation import Teacher, arguments, counted_positions, counted_values, task_loss
from bf16_to_fp16.finetuning.recipe import Data, parse_recipe
from bf16_to_fp16.finetuning.run import finetune
from bf16_to_fp16.finetuning.trainer import freeze_unreached
from bf16_to_fp16.measuring.batch import IGNORED_LABEL
from bf16_to_fp16.measuring.stock import load_config

pytestmark = pytest.mark.usefixtures("first_batch")
KINDS = ("t5-classifier", "t5-token-classifier", "t5-spans", "t5-states", "llama-reward")


def source_of(kind: str, folder: Path) -> Path:
    """Save a byte-level model whose scores overflow, with its tokenizer and some text."""
    model = tiny.small(kind, 3, factor=1.0, vocab_size=384, relative_attention_num_buckets=8)
    (attention, *_) = [w for w in resolve(ModelTensors(model)).topology if hasattr(w, "query")]
    model.get_submodule(attention.query).weight.data.mul_(3e5)
    tiny.save(model, folder)
    transformers.ByT5Tokenizer(extra_ids=125).save_pretrained(folder)
    (folder / "text.txt").write_text("\n".join(f"line {i} of a text about numbers" for i in range(80)))
    return folder


@pytest.mark.parametrize("kind", beyond(["t5-classifier"], ["t5-classifier", "t5-spans"]))
def test_it_is_trained_until_it_fits_and_keeps_its_class(kind: str, tmp_path: Path) -> None:
    source = source_of(kind, tmp_path / "source")
    tree = recipe_tree(source, tmp_path / "out") | {"device": "cpu", "evaluation": {"every": 100, "attack_steps": 0}}
    tree["data"] = {"path": str(source / "text.txt"), "input_length": 24, "batch_size": 4}
    tree["schedule"] = {**tree["schedule"], "steps": 3, "learning_rate": 0.05}
    tree["quality"] = {"max_kl": None}
    assert finetune(parse_recipe(tree)) is not None
    report = json.loads((tmp_path / "out" / "fp16_report.json").read_text())
    run = report["finetune"]
    assert run["data"]["objective"] == "text" and run["evaluations"][-1]["held_out_loss"] is None
    assert 0 < run["evaluations"][-1]["held_out_divergence"] < 1e3
    assert report["regimes"]["half"]["nonfinite"] == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == tiny.config(kind).architectures


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


TEXTS = ["a short one", "b", "a text that is much longer than the most tokens that are taken"]
SKIP = IGNORED_LABEL


def opened(folder: Path, rows: list[dict[str, str]], **data: Any) -> tuple[Corpus, Any]:
    causal.tokenizer().save_pretrained(folder)
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = model_of("gemma3", vocab_size=259)
    settings = {"input_length": 16, "held_out": 0.0, "batch_size": len(rows)} | data
    return Corpus(Data(path=str(folder / "data.jsonl"), **settings), folder, model.config), model


def test_each_position_of_a_text_predicts_the_next_and_the_last_its_end(tmp_path: Path) -> None:
    corpus, model = opened(tmp_path, [{"text": text} for text in TEXTS])
    assert corpus.objective == "next-token"
    batch = next(corpus.training_batches())
    assert batch.causal and batch.labels is not None and batch.input_ids.shape == (3, 16)
    seen = set()
    for ids, mask, labels in zip(batch.input_ids, batch.attention_mask, batch.labels, strict=True):
        row = ids[mask == 1].tolist()
        assert labels.tolist() == [*row[1:], *[SKIP] * (17 - len(row))]
        assert row[0] == 2
        seen.add(corpus.tokenizer.decode(row[1:]))
    assert {f"{text}<eos>" for text in TEXTS[:2]} <= seen and any(len(text) == 15 and text in TEXTS[2] for text in seen)
    # Stock code moves its labels itself.
    with torch.no_grad():
        stock = model(**batch.inputs()).loss
        own = task_loss(model(**arguments(model, batch, torch.device("cpu"))).logits, batch.labels)
    assert float(own) / int(counted_positions(batch).sum()) == pytest.approx(float(stock), rel=1e-5)


def test_all_that_a_tokenizer_puts_before_a_text_is_given_and_none_of_it_predicted(tmp_path: Path) -> None:
    tokenizer = causal.tokenizer()  # with two tokens, as GLM-4's
    framed = processors.TemplateProcessing("<bos> <pad> $A", special_tokens=[("<bos>", 2), ("<pad>", 0)])
    tokenizer.backend_tokenizer.post_processor = framed
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "data.txt").write_text("\n".join(TEXTS))
    data = Data(path=str(tmp_path / "data.txt"), input_length=12, held_out=0.0, batch_size=3)
    corpus = Corpus(data, tmp_path, model_of("llama", vocab_size=259).config)
    batch = next(corpus.training_batches())
    assert batch.labels is not None and batch.input_ids.shape == (3, 12)
    for ids, mask, labels in zip(batch.input_ids, batch.attention_mask, batch.labels, strict=True):
        row = ids[mask == 1].tolist()
        assert row[:2] == [2, 0] and labels.tolist() == [SKIP, *row[2:], *[SKIP] * (13 - len(row))]


def test_of_a_pair_the_target_counts_and_follows_its_prompt(tmp_path: Path) -> None:
    rows = [{"input": "ab", "target": "cde"}, {"input": "abcdef", "target": "g" * 40}]
    corpus, model = opened(tmp_path, rows, target_length=4)
    assert corpus.objective == "pairs"
    batch = next(corpus.training_batches())
    assert batch.labels is not None
    order = [[row for _, row in batch.examples].index(row) for row in range(2)]
    short, long = (batch.labels[i].tolist() for i in order)
    c = corpus.tokenizer("c")["input_ids"][-1]
    g = corpus.tokenizer("g")["input_ids"][-1]
    assert short == [SKIP, SKIP, c, c + 1, c + 2, 1, *[SKIP] * 5] and long == [*[SKIP] * 6, g, g, g, 1, SKIP]
    assert batch.input_ids[order[0]].tolist()[:3] == [2, c - 2, c - 1]
    assert corpus.tokenizer.decode(batch.input_ids[order[1]][:7]) == "<bos>abcdef"
    # A prompt and its target share the positions that there are.
    model.config.max_position_embeddings = 12
    narrow = Corpus(Data(path=str(tmp_path / "data.jsonl"), held_out=0.0), tmp_path, model.config)
    assert (narrow.input_length, narrow.target_length) == (6, 6)
    assert next(narrow.training_batches()).input_ids.shape[1] == 12


def test_the_teacher_is_no_way_from_itself_where_tokens_are_predicted(tmp_path: Path) -> None:
    corpus, model = opened(tmp_path, [{"text": text} for text in TEXTS])
    batch = next(corpus.training_batches())
    teachers = [Teacher(m, torch.device("cpu")) for m in (model, model_of("gemma3", seed=1, vocab_size=259))]
    with torch.no_grad():
        out = model(**arguments(model, batch, torch.device("cpu")))
    same, other = (float(teacher.divergence(out, batch)) for teacher in teachers)
    assert teachers[0].chooses and same == pytest.approx(0.0, abs=1e-4) and other > 0.1
    assert len(teachers[0].outputs(batch)) == int(batch.attention_mask.sum() - len(TEXTS))


@pytest.mark.parametrize(
    ("kind", "objective"),
    [
        ("llama-biased", "next-token"),
        pytest.param("mixtral", "next-token", marks=pytest.mark.exhaustive),
        pytest.param("gemma3-images", "pairs", marks=pytest.mark.exhaustive),
        pytest.param("gemma4-images", "pairs", marks=pytest.mark.exhaustive),
    ],
)
def test_a_causal_model_is_finetuned_on_answers_or_texts(kind: str, objective: str, tmp_path: Path) -> None:
    source = tiny.save(tiny.build(kind, 3, vocab_size=259, num_hidden_layers=2), tmp_path / "source")
    causal.tokenizer().save_pretrained(source)
    rows = [{"input": f"line {i} ", "target": f"of {i} numbers"} for i in range(40)]
    if objective == "next-token":
        rows = [{"text": "".join(row.values())} for row in rows]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tree = recipe_tree(source, tmp_path / "out") | {"device": "cpu"}
    tree["evaluation"] = {"every": 100}
    tree["data"] = {"path": str(tmp_path / "data.jsonl"), "input_length": 16, "target_length": 16, "batch_size": 4}
    steps = 12 if "images" in kind else 4  # the first find the loss scale
    tree["schedule"] = {**tree["schedule"], "steps": steps, "learning_rate": 0.01}
    tree["quality"] = {"max_kl": None}
    assert finetune(parse_recipe(tree)) is not None
    report = json.loads((tmp_path / "out" / "fp16_report.json").read_text())
    run = report["finetune"]
    first, last = run["evaluations"]
    assert run["data"]["objective"] == objective and last["held_out_loss"] < first["held_out_loss"]
    assert first["held_out_divergence"] < min(0.1, last["held_out_divergence"])  # it begins as the original
    assert report["verdict"] == "safe"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == tiny.config(kind).architectures
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert before.keys() == after.keys()
    # What no text goes through is not trained.
    kept = [name for name in before if "vision_tower." in name]
    assert bool(kept) == ("images" in kind) and all(torch.equal(after[n], before[n].half()) for n in kept)


def test_what_no_text_goes_through_waits_for_no_gradient() -> None:
    model = tiny.build("gemma3-images")
    freeze_unreached(model, layout_of(model))
    frozen = {name.split(".")[1] for name, p in model.named_parameters() if not p.requires_grad}
    trained = {name.split(".")[1] for name, p in model.named_parameters() if p.requires_grad}
    assert frozen == {"vision_tower", "multi_modal_projector"} and trained == {"language_model"}
