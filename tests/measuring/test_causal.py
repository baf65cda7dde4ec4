"""Causal language models are probed as they are used: from a start token, padded on the left, past their window."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import causal
from torch.nn import functional

from bf16_to_fp16.measuring.batch import DATA, GENERATE, IGNORED_LABEL, LONG, PADDED, SHORT, Batch, run_batch
from bf16_to_fp16.measuring.fidelity import fidelity, output_on
from bf16_to_fp16.measuring.interface import (
    config_of,
    gives_probabilities,
    is_causal,
    predicts_tokens,
    takes_decoder_ids,
)
from bf16_to_fp16.measuring.probe import batches, random_rows, rows_of
from bf16_to_fp16.measuring.regimes import LOSS_SCALE, audit_model
from bf16_to_fp16.measuring.stock import described

pytestmark = pytest.mark.usefixtures("whole_probe")


def rows(batch: Batch) -> list[list[int]]:
    return [ids[mask == 1].tolist() for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]


@pytest.mark.parametrize("kind", ["gemma3", "llama", "qwen3"])
def test_the_probe_of_a_causal_model_is_run_by_it_and_has_both_paddings_and_a_generation(kind: str) -> None:
    model = causal.make(kind)
    made = batches(model.config, None, None)
    assert all(batch.decoder_input_ids is None for batch in made)
    for what in (PADDED, SHORT):
        right, left = (batch for batch in made if batch.kind == what)
        assert rows(right) == rows(left)
        assert bool(right.attention_mask[:, 0].all()) and bool(left.attention_mask[:, -1].all())
        assert not left.attention_mask[:, 0].all() and not right.attention_mask[:, -1].all()
    (generated,) = [batch for batch in made if batch.generate]
    # What is generated follows the last id, which must be no padding.
    assert not generated.attention_mask.all() and bool(generated.attention_mask[:, -1].all())
    with torch.no_grad():
        given = {batch.kind: run_batch(model, batch) for batch in made}
    assert given.pop(GENERATE) is None and all(out.logits.shape[-1] == 97 for out in given.values())


@pytest.mark.parametrize("kind", ["llama", "qwen3"])  # one names its first token, one its end
def test_rows_of_texts_begin_where_the_model_has_a_token_for_it(kind: str) -> None:
    config = causal.make(kind, bos_token_id=5 if kind == "llama" else None, eos_token_id=[7, 8]).config
    made = batches(config, None, None)
    firsts = {row[0] for batch in made if batch.kind in (LONG, PADDED) for row in rows(batch)}
    assert (firsts == {5}) == (kind == "llama")
    short = rows(next(batch for batch in made if batch.kind == SHORT))
    framed = [[5, 7], [5, 8], [5, 96]] if kind == "llama" else [[8, 7], [96, 7]]
    assert all(row in short and row[0 if kind == "qwen3" else 1 :][:1] in short for row in framed)
    assert max(map(len, short)) == 8
    drawn = rows(random_rows(config, seed=3))
    assert sum((row[0] == 5 if kind == "llama" else row[-1] == 7) for row in drawn) >= 8
    if kind == "qwen3":
        assert [row for row in drawn if row[-1] == 7] != drawn


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        # Past a window of 16 most rows are.
        *(({"sliding_window": n}, longest) for n, longest in ((16, 512), (512, 528), (600, 616), (4096, 512))),
        ({"sliding_window": 600, "max_position_embeddings": 610}, 512),
    ],
)
def test_one_row_is_longer_than_a_sliding_window(changes: dict[str, Any], longest: int) -> None:
    made = batches(causal.make("gemma3", **changes).config, None, None)
    assert max(batch.input_ids.shape[1] for batch in made) == longest


def test_the_head_is_left_out_where_logits_pass_the_budget_and_only_the_head() -> None:
    model = causal.make("llama", vocab_size=100_000)
    made = [batch for batch in batches(model.config, None, None) if not batch.generate]
    without = [batch for batch in made if not batch.head]
    assert without and made[0].head and any(batch.kind == SHORT and batch.head for batch in made)
    ran: list[str] = []
    for name in ("model.layers.1", "lm_head"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
    with torch.no_grad():
        assert run_batch(model, min(without, key=lambda batch: batch.input_ids.numel())) is None
    assert ran == ["model.layers.1"]


@pytest.mark.parametrize("kind", ["gemma3", "llama", "qwen3"])
@pytest.mark.parametrize("side", [0, 1])
def test_the_stock_loss_is_that_of_the_labels(kind: str, side: int) -> None:
    model = causal.make(kind)
    batch = [batch for batch in batches(model.config, None, None) if batch.kind == PADDED][side]
    labels = batch.labels()
    with torch.no_grad():
        out = run_batch(model, batch, labels=True)
    assert int((labels != IGNORED_LABEL).sum()) == int(batch.attention_mask.sum()) - len(labels)
    wanted = functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL)
    assert float(out.loss) == pytest.approx(float(wanted), rel=1e-5)
    # A row without its padding has the same loss, wherever the padding was.
    ids = batch.input_ids[1][batch.attention_mask[1] == 1][None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1]
        padded = functional.cross_entropy(out.logits[1], labels[1], ignore_index=IGNORED_LABEL)
    assert float(padded) == pytest.approx(float(functional.cross_entropy(logits, ids[0, 1:])), rel=1e-5)


def test_given_rows_have_one_side() -> None:
    config = causal.make("gemma3").config
    given = rows_of(config, [([5, 6, 7], [0, 9]), ([8], [])], "given")
    assert rows(given) == [[5, 6, 7], [8]] and given.decoder_input_ids is None and given.head


def test_a_text_and_its_target_are_one_row(tmp_path: Path) -> None:
    transformers.ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path)  # which ends every text with 1
    lines = [{"text": "ab", "target": "cde"}, {"text": "ab"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = causal.make("llama", vocab_size=259).config
    given, generated = batches(config, tmp_path, str(tmp_path / "data.jsonl"))
    assert given.kind == DATA and sorted(rows(given)) == [[100, 101, 1], [100, 101, 102, 103, 104]]
    assert generated.generate and bool(generated.attention_mask[:, -1].all())
    short, _ = batches(config, tmp_path, str(tmp_path / "data.jsonl"), length=4)
    assert [100, 101, 102, 103] in rows(short)


def test_the_divergence_of_a_causal_model_is_that_of_its_next_tokens() -> None:
    model = causal.make("gemma3")
    given = [batch for batch in batches(model.config, None, None) if batch.kind == PADDED]
    with torch.no_grad():
        exact = [output_on(batch, run_batch(model, batch)) for batch in given]
        low = [output_on(batch, run_batch(causal.make("gemma3").bfloat16(), batch)) for batch in given]
    found = fidelity(exact, None, low, probabilities=gives_probabilities(config_of(model)))
    assert found.measure == "kl" and found.positions == sum(int(batch.attention_mask.sum()) for batch in given)
    assert 0 < found.kl_fp16 < 1e-3
    assert fidelity(exact, None, exact, probabilities=True).kl_fp16 == 0


def test_in_training_it_is_pulled_by_its_next_tokens_and_a_token_alone_has_none() -> None:
    model = causal.make("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(1e3)
    given = batches(model.config, None, None)[0]
    alone = Batch("one token", given.input_ids[:, :1], given.attention_mask[:, :1])
    pulls: list[torch.Tensor] = []
    handle = model.lm_head.register_full_backward_hook(lambda module, inputs, outputs: pulls.append(outputs[0]))
    audit_model(model, [given], regime="stock", loss_scale=LOSS_SCALE, attention=("eager",))
    handle.remove()
    # A cross-entropy pulls by at most 1 over the number of tokens; what pulls logits to zero grows with them.
    count = int((given.labels() != IGNORED_LABEL).sum())
    assert len(pulls) == 1 and 0.5 < float(pulls[0].abs().max()) * count / LOSS_SCALE < 1.001
    assert not pulls[0][:, -1].any()  # nothing follows the last
    shown = audit_model(model, [alone], regime="stock", loss_scale=LOSS_SCALE, attention=("eager",))
    assert shown.nonfinite == 0 and any(site.name.endswith(":grad") for site in shown.sites)


@pytest.mark.parametrize(
    ("name", "decoder", "predicts", "ends"),
    [
        *((name, False, True, False) for name in ("Gemma3ForCausalLM", "GPT2LMHeadModel", "BartForCausalLM")),
        ("BartForConditionalGeneration", True, True, False),
        ("BartModel", True, False, False),
        ("BartForSequenceClassification", False, False, True),
        *((name, False, False, False) for name in ("T5EncoderModel", "Gemma3TextModel")),
    ],
)
def test_a_class_says_itself_what_it_takes_and_gives(name: str, decoder: bool, predicts: bool, ends: bool) -> None:
    config = transformers.PretrainedConfig(architectures=[name], is_encoder_decoder=not decoder)
    assert (takes_decoder_ids(config), predicts_tokens(config)) == (decoder, predicts)
    assert is_causal(config) == (predicts and not decoder)
    stock = described(name)
    assert stock is not None and stock.reads_end_token == ends


def test_what_is_no_model_describes_nothing() -> None:
    assert described("BertTokenizer") is None and described("MyOwnModel") is None
