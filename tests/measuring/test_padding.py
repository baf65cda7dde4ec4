"""What LongT5's and Gemma 3's masks make of padding in fp16, and that audits and reports keep to it."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import exhaustive, tiny

from bf16_to_fp16 import convert, verify
from bf16_to_fp16.cli import main
from bf16_to_fp16.families.known import spare_padding
from bf16_to_fp16.measuring import id_choice, probe
from bf16_to_fp16.measuring.batch import PADDED, RANDOM, SHORT, Batch, is_blind, run_batch, without_blind_padding
from bf16_to_fp16.measuring.observer import SiteObserver
from bf16_to_fp16.measuring.probe import batches
from bf16_to_fp16.measuring.regimes import audit_model
from bf16_to_fp16.measuring.sites import MASK_REASON

REAL, LONGEST = 6, 13


def logits_are_finite(model: Any, length: int, *, half: bool) -> bool:
    """Return whether fp16, or fp16 autocast, gives numbers for a row of ``REAL`` ids padded to a length."""
    ids = torch.full((2, length), 5)
    mask = torch.ones_like(ids)
    mask[1, REAL:] = 0
    served = copy.deepcopy(model).half() if half else model
    with torch.no_grad(), torch.autocast("cpu", torch.float16, enabled=not half):
        out = served(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :3])
    assert bool(out.logits[0].isfinite().all())  # padding harms its own row alone
    return bool(out.logits[1].isfinite().all())


@pytest.mark.parametrize("half", [True, False], ids=["half", "amp"])
@pytest.mark.parametrize("kind", ["longt5", "longt5-local"])
def test_a_row_is_finite_in_fp16_with_no_padding_or_as_much_as_is_said(kind: str, half: bool) -> None:
    model = tiny.build(kind, 0, factor=1.0)
    spare = spare_padding(model.config.to_dict())
    assert spare == (4 if kind == "longt5" else math.inf)
    finite = [logits_are_finite(model, length, half=half) for length in range(REAL, LONGEST)]
    assert all(found for padding, found in enumerate(finite) if padding >= spare)
    # To the position: where it fills fewer whole blocks than there are.
    assert finite == [n == REAL or (kind == "longt5" and n // 4 > REAL // 4) for n in range(REAL, LONGEST)]


def test_nan_of_what_fills_up_the_last_block_is_by_design_and_that_of_padding_is_not() -> None:
    model = tiny.build("longt5-local", 0, factor=1.0).half()
    ids = torch.full((1, 7), 5)  # blocks have 3 positions
    for padded in (0, 1):
        mask = (torch.arange(7) < 7 - padded).long()[None]
        with torch.no_grad(), SiteObserver(model) as observer:
            model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids)
        behind = [s for s in observer.sites() if s.name.endswith("LocalSelfAttention:context")]
        assert len(behind) == 2
        for site in behind:
            assert bool(site.nonfinite) == bool(padded)
            assert padded or (site.reason == MASK_REASON and site.benign)
        assert bool(sum(site.nonfinite for site in observer.sites())) == bool(padded)


@pytest.mark.parametrize("kind", ["longt5", "longt5-local"])
def test_the_probe_pads_no_row_by_less(kind: str) -> None:
    config = copy.copy(tiny.build(kind, 0).config)
    config.architectures = ["LongT5ForConditionalGeneration"]
    spare, made = spare_padding(config.to_dict()), batches(config, None, None)
    for batch in made:
        padding = (batch.attention_mask == 0).sum(1)
        assert all(n == 0 or n >= spare for n in padding.tolist())
    lengths = {n for batch in made for n in batch.attention_mask.sum(1).tolist()}
    assert {1, 2, 7, 20, 48} <= lengths


LONGT5 = "LongT5 in transformers masks with −inf in fp16", "attentions are NaN at the padding that"
SAID = {
    "longt5": ("padded on the right by at least 4", *LONGT5),
    "longt5-local": ("without padding", *LONGT5),
    "embeddinggemma": (
        "proven for every input of up to 32,768 positions but for padding that attends to no token",
        "left padding and padding beyond a sliding window can make their row NaN",
    ),
}


@pytest.mark.usefixtures("first_batch")
@pytest.mark.parametrize("kind", SAID)
def test_verdict_card_and_page_say_for_which_padding_they_stand(kind: str, tmp_path: Path) -> None:
    source = tiny.save(tiny.small(kind), tmp_path / "source")
    result = convert(source, tmp_path / "out", run_model=kind == "longt5")
    assert result.safe and result.report["padding"] == {"longt5": 4, "longt5-local": None, "embeddinggemma": 0}[kind]
    for name in ("README.md", "fp16_report.html"):
        text = " ".join((tmp_path / "out" / name).read_text(encoding="utf-8").split())
        assert all(said in text for said in SAID[kind])
    ran = {run["attention"] for regime in result.report["regimes"].values() for run in regime["runs"]}
    assert ran == ({"eager"} if kind == "longt5" else set())


def with_low_scores(kind: str) -> Any:
    """Return a model all of whose scores are under −16, whatever it reads: queries lie opposite to keys."""
    gemma = "gemma" in kind
    # Of Gemma's two kinds of layers one each; the others have one.
    changes: dict[str, Any] = (
        {"num_hidden_layers": 2, "query_pre_attn_scalar": 10} if gemma else {"num_hidden_layers": 1}
    )
    model = tiny.build(kind, 0, factor=1.0, **changes)
    body = getattr(model, "model", model)
    with torch.no_grad():
        body.embed_tokens.weight[:, 1:].mul_(0.1)
        body.embed_tokens.weight[:, 0] = 4.0
        for layer in body.layers:
            attention = layer.self_attn
            layer.input_layernorm.weight.fill_(0.0 if gemma else 1.0)
            for into in (attention.o_proj, layer.mlp.down_proj):
                into.weight.mul_(0.1)
            for side, sign in (("q", 1.0), ("k", -1.0)):
                weight = getattr(attention, f"{side}_proj").weight.mul_(0.01)
                weight[attention.head_dim // 2 - 1 :: attention.head_dim, 0] = sign if gemma else 4 * sign
                if gemma:
                    getattr(attention, f"{side}_norm").weight.fill_(2.0)
            if gemma:
                for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
                    norm.weight.fill_(-0.9)
    return model


@pytest.mark.parametrize("kind", exhaustive.beyond(["embeddinggemma"], ["embeddinggemma", "llama", "mistral"]))
def test_an_audit_runs_blind_padding_where_a_claim_needs_it(
    kind: str, whole_probe_once: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So what bounds alone call safe is not called unsafe by a run, nor by one that is repeated."""
    gather, kinds = probe.audit_batches, (PADDED, RANDOM, SHORT)
    monkeypatch.setattr(probe, "audit_batches", lambda *a, **k: [b for b in gather(*a, **k) if b.kind in kinds])
    model = with_low_scores(kind)
    source = tiny.save(model, tmp_path / "source")
    inputs = batches(model.config, None, None)
    eager, others = (without_blind_padding(inputs, name) for name in ("eager", "sdpa"))
    blind = [batch.description for batch in others if batch.blind]
    assert "short rows, padded on the left" in blind and others == inputs
    assert ("padded, mixed lengths" in blind) is (kind != "llama")  # which has no window
    assert any(batch.blind for batch in eager) and all(bool(b.attention_mask.all()) for b in eager if b.blind)
    for ran in (False, True):
        report = convert(source, tmp_path / str(ran), run_model=ran).report
        assert (report["verdict"], report["proof"]) == ("safe", "certified")
    assert [run["attention"] for run in report["regimes"]["half"]["runs"]] == ["eager", "sdpa"]
    for ran in (False, True):
        assert verify(tmp_path / str(ran))["verified"]
    # What is asked for by hand is run as it is.
    [left] = [batch for batch in others if batch.description == "short rows, padded on the left"]
    by_hand = audit_model(model.half(), [replace(left, blind=False)], regime="half", attention=("eager",))
    assert by_hand.broken


@pytest.mark.parametrize(("both_ways", "blind"), [(None, True), ("vision", True), ("all", False)])
def test_padding_left_of_text_sees_nothing_unless_both_sides_are_seen(both_ways: str | None, blind: bool) -> None:
    mask = torch.ones((1, 4), dtype=torch.int64)
    mask[0, 0] = 0
    config = tiny.config("gemma4", use_bidirectional_attention=both_ways)
    assert is_blind(config, Batch("by hand", mask, mask)) is blind


def with_low_scores_in_the_decoder() -> Any:
    """Return a T5Gemma in whose decoder all scores are under −16, and that sees 6 positions in its first layer."""
    model = tiny.build("t5gemma", 0, factor=1.0, attn_logit_softcapping=None, num_hidden_layers=1)
    body = model.model.decoder
    with torch.no_grad():
        body.embed_tokens.weight[:, 1:].mul_(0.1)
        body.embed_tokens.weight[:, 0] = 4.0
        body.norm.weight.fill_(-0.9)
        for layer in body.layers:
            attention = layer.self_attn
            layer.pre_self_attn_layernorm.weight.fill_(0.0)
            for name, norm in layer.named_children():
                if name.startswith("post_"):
                    norm.weight.fill_(-0.9)
            for side, sign in (("q", 2.0), ("k", -2.0)):
                weight = getattr(attention, f"{side}_proj").weight.mul_(0.01)
                weight[attention.head_dim // 2 - 1 :: attention.head_dim, 0] = sign
    return model


def test_a_claim_and_an_audit_leave_out_padding_of_the_decoder_that_sees_nothing(tmp_path: Path) -> None:
    model = with_low_scores_in_the_decoder()
    source = tiny.save(model, tmp_path / "source")
    report = convert(source, tmp_path / "out").report
    assert (report["verdict"], report["proof"], report["padding"]) == ("safe", "certified", 0)
    served, ids = model.half(), torch.arange(32).reshape(2, 16) + 1
    served.set_attn_implementation("eager")
    encoder = torch.ones_like(ids)
    encoder[0, -2:] = 0
    for left, right, finite in ((0, 0, True), (0, 5, True), (0, 6, False), (1, 0, False)):
        mask = torch.ones_like(ids)
        mask[0, :left] = mask[0, 16 - right :] = 0
        given = Batch("by hand", ids, encoder, ids, mask)
        with torch.no_grad():
            out = run_batch(served, given).logits
        assert bool(out[1].isfinite().all()) and bool(out[0].isfinite().all()) == finite
        if not finite:  # no row is run of which nothing is claimed
            assert is_blind(model.config, given)


def test_rows_shorter_than_a_block_of_sums_are_run(tmp_path: Path) -> None:
    """Of such a row stock code makes no sum at all; chosen ids, which a vocabulary of this size has, run alone."""
    source = tiny.save(tiny.small("longt5", vocab_size=id_choice.WHOLE + 1, global_block_size=16), tmp_path / "source")
    report = convert(source, tmp_path / "out").report
    assert (report["verdict"], report["proof"]) == ("safe", "certified")
    assert "chosen ids" in {batch["kind"] for batch in report["inputs"]["batches"]}


@pytest.mark.usefixtures("whole_probe_once")
def test_an_audit_of_any_class_leaves_out_blind_padding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Granite, of no known family, whose tokens score far under 0 at themselves."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.GraniteConfig(vocab_size=97, num_key_value_heads=2, pad_token_id=0, **shape)
    torch.manual_seed(0)
    model = transformers.GraniteForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            key = layer.self_attn.k_proj.weight
            layer.self_attn.q_proj.weight.copy_(-30 * key.view(2, 8, 32).repeat_interleave(2, 0).reshape(32, 32))
            key.mul_(30)
    tiny.save(model, tmp_path / "granite")
    for attention in ("eager", "sdpa"):
        assert main(["audit", str(tmp_path / "granite"), "--attention", attention]) == 0
        assert "left padding and padding beyond a sliding window can make their row NaN" in capsys.readouterr().out
