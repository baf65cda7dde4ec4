"""What each output of a converted checkpoint is beside the source's, and checkpoints that are read as another class."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support import fakes, tiny
from support.contract import layout_of
from support.forging import copied

from bf16_to_fp16 import convert, make_fp16_safe, undo, verify
from bf16_to_fp16.families.signals import LOGITS
from bf16_to_fp16.measuring.fidelity import output_errors, smallest_batches, unscaled
from bf16_to_fp16.measuring.probe import few_rows, images
from bf16_to_fp16.measuring.stock import config_of
from bf16_to_fp16.report.card import render_card
from bf16_to_fp16.report.facts import scaled_outputs
from bf16_to_fp16.report.judgement import other_outputs
from bf16_to_fp16.report.schema import Report, read
from bf16_to_fp16.report.terminal import print_conversion
from bf16_to_fp16.rescaling import exponents
from bf16_to_fp16.rescaling.plan import Plan
from bf16_to_fp16.results import OutputEntry

IDS = torch.arange(3, 23).view(2, 10)


def last_states(folder: Path, kind: str = "AutoModel", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model: Any = getattr(transformers, kind).from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        states: torch.Tensor = model(input_ids=IDS).last_hidden_state
    return states.float()


def off(states: torch.Tensor, others: torch.Tensor) -> float:
    return float((states - others).norm() / others.norm())


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tied")
    source = tiny.save(tiny.small("gemma2"), folder / "source")
    convert(source, folder / "out")
    return source, folder / "out"


def test_a_tied_heads_last_state_has_the_factor_that_the_report_tells(tied: tuple[Path, Path]) -> None:
    source, out = tied
    report = read(Report, json.loads((out / "fp16_report.json").read_text()))
    factors = {name: entry.factor_log2 for name, entry in report.outputs.items()}
    r, last = factors["hidden_states"], factors["last_hidden_state"]
    assert isinstance(r, int) and r < 0 and last == -r and factors["logits"] == factors["attentions"] == 0
    ours, theirs = last_states(out), last_states(source)
    assert off(ours / 2.0**-r, theirs) < 1e-4 < 1 < off(ours, theirs)
    assert all(entry.error is not None and entry.error < 1e-6 for entry in report.outputs.values())


def test_a_factor_is_said_on_terminal_and_card_with_what_to_do(
    tied: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    report = read(Report, json.loads((tied[1] / "fp16_report.json").read_text()))
    r = report.outputs["hidden_states"].factor_log2
    assert isinstance(r, int)
    said = f"multiply hidden_states (all but the last) by {2**-r:,}"
    assert said in scaled_outputs(report)
    assert said.replace("_", r"\_") in render_card(report, {"architectures": ["Gemma2ForCausalLM"]})
    print_conversion(report, tied[1])
    assert "divide last_hidden_state by" in " ".join(capsys.readouterr().out.split())


def test_a_head_of_its_own_leaves_the_last_state_as_it_was(tmp_path: Path) -> None:
    """Also where a few small weights of the head would keep more bits behind other gains."""
    model = tiny.small("llama")
    with torch.no_grad():
        model.lm_head.weight.copy_((torch.randn_like(model.lm_head.weight) * 1e-3).bfloat16())
    source = tiny.save(model, tmp_path / "source")
    report = convert(source, tmp_path / "out", run_model=False).report
    assert report["weights"]["lossless_fraction"] < 1 and report["outputs"]["hidden_states"]["factor_log2"] < 0
    assert report["outputs"]["last_hidden_state"]["factor_log2"] == 0
    assert off(last_states(tmp_path / "out"), last_states(source)) < 1e-4


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_converted_for_the_class_without_a_head_the_last_states_are_the_sources(kind: str, tmp_path: Path) -> None:
    source = tiny.save(tiny.small(kind), tmp_path / "source")
    name = type(transformers.AutoModel.from_pretrained(source)).__name__
    result = convert(source, tmp_path / "out", as_class=name, run_model=False)
    assert result.safe and result.report["outputs"].keys() == {"last_hidden_state", "hidden_states", "attentions"}
    assert result.report["outputs"]["last_hidden_state"]["factor_log2"] == 0 and result.plan.residual_exponent < 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [name]
    theirs = last_states(source)
    assert off(last_states(tmp_path / "out"), theirs) < 1e-4
    assert off(last_states(tmp_path / "out", dtype=torch.float16), theirs) < 1e-2
    assert f"--as {name}" in result.report["command"]
    assert verify(tmp_path / "out", original=source, run_model=False)["verified"]
    # Undone, the tensors have their own names; a head that is not the embedding is gone.
    undo(tmp_path / "out", tmp_path / "back")
    weights, back = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    if kind == "gemma2":
        assert back.keys() == weights.keys() and all(torch.equal(back[name], weights[name]) for name in back)
        assert config["architectures"] == ["Gemma2ForCausalLM"]
    else:
        assert "lm_head.weight" not in back
    assert off(last_states(tmp_path / "back"), last_states(source)) == 0


def test_an_output_of_another_factor_is_unsafe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.save(tiny.small("llama"), tmp_path / "source")
    true = exponents.output_factors
    wrong = lambda layout, plan: true(layout, plan) | {"hidden_states": plan.residual_exponent + 1}  # noqa: E731
    monkeypatch.setattr("bf16_to_fp16.conversion.evidence.output_factors", wrong)
    result = convert(source, tmp_path / "wrong")
    assert not result.safe and [e["signal"] for e in result.report["unsafe"]] == ["hidden_states"]


@pytest.mark.parametrize(
    ("name", "drifts", "unsafe"),
    [
        ("logits", True, True),
        ("hidden_states", True, False),
        ("encoder_attentions", True, False),
        ("last_hidden_state", True, False),  # beside logits
        ("hidden_states", False, True),  # of an exact plan it is a mistake of the program
    ],
)
def test_inner_states_that_an_edit_changes_are_told(name: str, drifts: bool, unsafe: bool) -> None:
    right, off = OutputEntry(factor_log2=-2, error=1e-6, error_bf16=1e-5), OutputEntry(factor_log2=-2, error=0.02)
    entries = {"logits": right, "hidden_states": right} | {name: off.model_copy(update={"error_bf16": 1e-5})}
    assert [each.signal for each in other_outputs(entries, drifts=drifts, ran=True)] == [name] * unsafe
    said = scaled_outputs(read(Report, fakes.conversion()).model_copy(update={"outputs": entries}))
    told = f"do not use {name}: the relative squared error is 0.02, and 1.00×10⁻⁵ in bf16"
    assert (told in said) == (name != "logits")
    # Where a class gives nothing else, these are no inner ones.
    alone = {"last_hidden_state": off.model_copy(update={"error_bf16": 1e-5})}
    assert other_outputs(alone, drifts=True, ran=True)


def test_a_layer_that_is_off_is_not_hidden_by_one_that_bf16_rounds_more() -> None:
    one, two = torch.ones(4), torch.ones(4)
    source, bf16 = {"hidden_states": (one, two)}, {"hidden_states": (one * 1.001, two * 1.2)}
    found = {"hidden_states": (one * 1.1, two)}
    [(name, error)] = output_errors({"hidden_states": 0}, [source], [bf16], [found]).items()
    assert name == "hidden_states" and error.error == pytest.approx(0.01) and not error.fits(drifts=True)


def test_a_factor_of_two_fits_nowhere_however_far_bf16_is() -> None:
    far, near = (OutputEntry(factor_log2=0, error=error, error_bf16=0.5) for error in (0.25, 0.1))
    assert not far.fits(drifts=False) and near.fits(drifts=False)


def test_start_and_end_of_a_span_have_the_factors_of_their_choices() -> None:
    assert [float(unscaled(torch.ones(1), [1, -2], name)) for name in ("start_logits", "end_logits")] == [0.5, 4.0]


def test_logits_behind_a_cap_are_told_to_be_the_sources() -> None:
    layout = layout_of(tiny.small("gemma2"))
    plan = Plan(family=layout.family.name, exponents={LOGITS: -3})
    assert exponents.output_factors(layout, plan)["logits"] == 0


def test_a_batch_with_an_image_is_looked_at_besides_the_smallest() -> None:
    model = tiny.small("gemma3-images")
    text, [image] = few_rows(config_of(model)), images(model.config)
    larger = text.rows(torch.arange(len(text.input_ids)).repeat(2))
    assert smallest_batches([larger, image, text]) == [image, text]
    assert smallest_batches([image]) == [image]


def test_a_forged_factor_is_found(tied: tuple[Path, Path], tmp_path: Path) -> None:
    out = copied(tied[1], tmp_path / "out", lambda report: report["outputs"]["hidden_states"].update(factor_log2=0))
    assert "outputs.hidden_states" in [p["name"] for p in verify(out, run_model=False)["problems"]]


def test_a_model_made_safe_in_memory_tells_its_factors() -> None:
    model = tiny.small("gemma2")
    with torch.no_grad():
        before = model(input_ids=IDS, output_hidden_states=True).hidden_states
        made = make_fp16_safe(model)
        after = model(input_ids=IDS, output_hidden_states=True).hidden_states
    r, last = made.outputs["hidden_states"], made.outputs["last_hidden_state"]
    assert isinstance(r, int) and isinstance(last, int) and r < 0
    assert all(torch.equal(a * 2.0**r, b) for a, b in zip(before[:-1], after[:-1], strict=True))
    assert torch.equal(before[-1] * 2.0**last, after[-1])


@pytest.mark.parametrize(("kind", "name"), [("gated", "T5EncoderModel"), ("t5-classifier", "T5Model")])
def test_another_head_and_a_decoder_are_left_out_for_a_class_without_them(kind: str, name: str, tmp_path: Path) -> None:
    source = tiny.save(tiny.small(kind), tmp_path / "source")
    convert(source, tmp_path / "out", as_class=name, run_model=False)
    others = ("classif", "qa_outputs", *(("decoder.", "lm_head") if kind == "gated" else ()))
    assert [n for n in load_file(source / "model.safetensors") if n.startswith(others)]
    assert not [n for n in load_file(tmp_path / "out" / "model.safetensors") if n.startswith(others)]
    assert verify(tmp_path / "out", original=source, run_model=False)["problems"] == []
    assert kind != "gated" or off(last_states(tmp_path / "out", name), last_states(source, name)) < 1e-4
