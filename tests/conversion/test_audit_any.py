"""``audit`` of models that belong to no family: the same regimes and sites, and what it cannot give is said."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import tiny
from support.folders import rewritten

from bf16_to_fp16 import audit, cli, convert
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.measuring.observer import SiteObserver

SMALL = {"vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 24, "intermediate_size": 32}
ONE_LAYER = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 32))}
ONE_LAYER |= {"vocab_size": 97, "d_model": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2}


def bart(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.BartConfig(max_position_embeddings=64, **ONE_LAYER)
    transformers.BartForConditionalGeneration(config).save_pretrained(folder)
    return folder


def test_a_decoder_that_overflows_is_named_where_it_does_with_its_true_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "eos_token_id": [1, 2]}
    model = transformers.Cohere2ForCausalLM(transformers.Cohere2Config(**SMALL, **ids, num_key_value_heads=2))
    model.model.layers[1].mlp.down_proj.weight.data.mul_(1e9)
    model.bfloat16().save_pretrained(tmp_path / "m")
    report = audit(tmp_path / "m", regimes=("stock", "half"))
    assert (report["verdict"], report["proof"], report["family"]) == ("unsafe", "observed", "Cohere2ForCausalLM")
    assert report.get("certificate") is None
    site = "model.layers.1:add#2"
    found = {entry["signal"]: entry for entry in report["unsafe"]}
    assert set(found[site]["regimes"]) >= {"stock", "half"} and "convert" not in found[site]["remedy"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    model.set_attn_implementation("eager")
    with SiteObserver(model) as observer, torch.no_grad():
        model(input_ids=torch.arange(97)[None])
    (alone,) = [s.amax for s in observer.sites() if s.name == site]
    (shown,) = [s for s in report["regimes"]["half"]["sites"] if s["name"] == site]
    # All ids were run, so that it is at least what one row of them has.
    assert shown["fp32"] >= 0.9 * alone > 65504
    kinds = {kind for run in report["regimes"]["half"]["runs"] for kind in run["kinds"]}
    assert "generate" in kinds and {run["attention"] for run in report["regimes"]["half"]["runs"]} == {"eager", "sdpa"}


def test_a_weight_past_fp16s_range_is_unsafe_though_no_input_met_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=20_000, n_embd=8, n_layer=1, n_head=2, tie_word_embeddings=False)
    model = transformers.GPT2LMHeadModel(config)
    model.transformer.wte.weight.data[14_321, 3] = -1e5
    model.save_pretrained(tmp_path / "m")
    report = audit(tmp_path / "m", regimes=("amp", "half"), attention=("eager",))
    (lost,) = report["unsafe"]
    assert (report["verdict"], lost["signal"], lost["regimes"]) == ("unsafe", "transformer.wte:weight", ["half"])
    half, amp = report["regimes"]["half"], report["regimes"]["amp"]
    assert (half["nonfinite"], half["sites"][0]["fp32"], amp["nonfinite"]) == (1, 1e5, 0)


@pytest.mark.parametrize("end", [0, 1])
def test_a_classifier_of_rows_has_one_end_token_in_each(tmp_path: Path, end: int) -> None:
    torch.manual_seed(0)
    config = transformers.BartConfig(max_position_embeddings=64, forced_eos_token_id=None, **ONE_LAYER)
    config.eos_token_id, config.pad_token_id, config.decoder_start_token_id = end, 1 - end, 1 - end
    model = transformers.BartForSequenceClassification(config)
    model.classification_head.out_proj.bias.data.fill_(7e4)
    model.save_pretrained(tmp_path / "m")
    report = audit(tmp_path / "m", regimes=("half",), attention=("eager",))
    assert report["verdict"] == "unsafe"
    assert "classification_head.out_proj" in {entry["signal"].partition(":")[0] for entry in report["unsafe"]}
    names = {site["name"].split(".")[1] for site in report["regimes"]["half"]["sites"] if site["name"].count(".") > 1}
    assert {"encoder", "decoder"} <= names


def test_an_attention_that_a_class_lacks_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.PegasusXConfig(block_size=8, num_global_tokens=4, **ONE_LAYER)
    model = transformers.PegasusXForConditionalGeneration(config)
    model.model.encoder.layers[0].fc1.bias.data.fill_(1e5)
    model.save_pretrained(tmp_path / "m")
    assert cli.main(["audit", str(tmp_path / "m"), "--regime", "half", "--json", str(tmp_path / "r.json")]) == 1
    said = capsys.readouterr()
    assert "has no sdpa attention; only eager is run" in said.err
    assert "no certificate: PegasusXForConditionalGeneration is none of the classes" in said.out
    assert "next: stay with bf16 (fp32 on a card without it)" in said.out and "convert it" not in said.out
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["attention"] == ["eager"]
    half = report["regimes"]["half"]
    assert half["nonfinite"] and "generate" in half["runs"][0]["kinds"]
    assert {"encoder", "decoder"} <= {part for site in half["sites"] for part in site["name"].split(".")}
    with pytest.raises(UserError, match="has no sdpa attention; give --attention eager"):
        audit(tmp_path / "m", attention=("sdpa",))


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({}, {"attack_steps": 2}, "needs bounds"),
        ({}, {"regimes": ("whole",)}, "whole: no such regime; choose from stock, amp, half"),
        ({"architectures": None}, {}, "names no class"),
        ({"architectures": ["MyOwnModel"]}, {}, "a checkpoint's own code is never run"),
        ({"architectures": ["BertTokenizer"]}, {}, "is no model of transformers"),
        ({"architectures": ["WhisperModel"]}, {}, "takes input_features, and the audit runs token ids"),
    ],
)
def test_what_is_impossible_is_a_line(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    folder = bart(tmp_path / "m")
    with rewritten(folder / "config.json") as config:
        config |= changes
    with pytest.raises(UserError, match=said) as error:
        audit(folder, **options)
    assert "\n" not in str(error.value)


def test_a_tensor_that_is_missing_is_not_drawn_at_random(tmp_path: Path) -> None:
    folder = bart(tmp_path / "m")
    model = transformers.BartModel.from_pretrained(folder)
    model.save_pretrained(folder)
    with rewritten(folder / "config.json") as config:
        config |= {"architectures": ["BartForSequenceClassification"]}
    with pytest.raises(UserError, match=r"tensor classification_head\.\S+ is missing"):
        audit(folder)


def test_a_model_whose_outputs_have_names_of_their_own_is_audited_by_the_first(tmp_path: Path) -> None:
    # It gives prediction_logits and seq_relationship_logits.
    model = transformers.BertForPreTraining(transformers.BertConfig(**SMALL))
    model.cls.predictions.bias.data.fill_(7e4)
    model.save_pretrained(tmp_path / "m")
    report = audit(tmp_path / "m", regimes=("half",), attention=("eager",))
    assert report["verdict"] == "unsafe" and report["regimes"]["half"]["nonfinite_logits"] > 0


def test_the_audit_of_a_converted_folder_says_what_older_versions_make_of_it(tmp_path: Path) -> None:
    done = convert(tiny.save(tiny.small("umt5"), tmp_path / "source"), tmp_path / "out", run_model=False)
    assert audit(tmp_path / "out", regimes=("half",), attention=("eager",))["older"] == done.report["older"] != []
