"""Recipes are read and refused; what a finetune was asked for and missed is told with the command that goes on."""

import math
import shlex
from pathlib import Path
from typing import Any

import pytest
from support import fakes

from bf16_to_fp16.errors import UserError
from bf16_to_fp16.finetuning.goals import Command, lost_quality, with_goals
from bf16_to_fp16.finetuning.recipe import Data, Penalty, Recipe, parse_recipe, read_recipe
from bf16_to_fp16.report.card import notice
from bf16_to_fp16.report.facts import verdict_sentence
from bf16_to_fp16.report.page import render
from bf16_to_fp16.report.remedies import PENALTY
from bf16_to_fp16.report.schema import FinetuneEntry, Report, UnsafeEntry, read
from bf16_to_fp16.report.terminal import print_conversion
from bf16_to_fp16.results import AttackEntry, dump

FIVE_LINES = """\
source: org/model
out: model-fp16
data:
  path: texts.jsonl
seed: 3
"""


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        read_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_five_lines_are_a_recipe_with_usable_defaults(tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, FIVE_LINES))
    assert (recipe.source, recipe.out, recipe.data.path) == ("org/model", "model-fp16", "texts.jsonl")
    assert (recipe.precision, recipe.rescale, recipe.target) == ("fp16", True, "half")
    assert (recipe.optimizer.relative, recipe.schedule.learning_rate) == (True, 4e-3)
    assert recipe.data.noise_density is None
    assert recipe.wandb == "off"
    assert recipe.seed == 3
    assert parse_recipe(recipe.describe()) == recipe


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("1.5E-3", 1.5e-3), ("2e1", 20.0), (".5", 0.5), ("2", 2.0), ("1_0", 10.0), ("010", 10.0)],
)
def test_recipes_are_read_as_people_write_them(tmp_path: Path, text: str, value: float) -> None:
    lines = "\ufeff" + FIVE_LINES.replace("model-fp16", "2020-01-01").replace("texts.jsonl", "no") + "wandb: off\n"
    recipe = read_recipe(write(tmp_path, f"{lines}penalty:\n  # form: none\nschedule: {{learning_rate: {text}}}\n"))
    assert recipe.schedule.learning_rate == value and recipe.penalty == Penalty()
    assert (recipe.wandb, recipe.data.path, recipe.out) == ("off", "no", "2020-01-01")


def test_overrides_are_yaml_and_make_the_sections_that_lack(tmp_path: Path) -> None:
    path = write(tmp_path, FIVE_LINES + "penalty: {form: none}\n")
    overrides = ("penalty.headroom_bits=3", "wandb=offline", "precision=fp32", "out=a=b", "rescale=false")
    recipe = read_recipe(path, overrides)
    assert (recipe.penalty.form, recipe.penalty.headroom_bits) == ("none", 3.0)
    assert (recipe.wandb, recipe.precision, recipe.out) == ("offline", "fp32", "a=b")
    assert recipe.rescale is False


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("schedule.steps=-3", "schedule.steps is -3: it should be greater than or equal to 1"),
        ("schedule.steps='3'", "schedule.steps is '3': it should be a valid integer"),
        ("schedule.learning_rate=.inf", "schedule.learning_rate is inf: it should be a finite number"),
        ("source=", "source is None: it should be a valid string"),
        ("source='  '", "source is '  ': it should match pattern"),
        ("data=texts.jsonl", "data is 'texts.jsonl': it should be a valid dictionary or instance of Data"),
        ("target=full", "target is 'full': it should be 'auto', 'half', 'norm-safe', 'fp16-accumulate' or 'train'"),
        ("precision=[bf16, fp16]", "precision is ['bf16', 'fp16']: it should be 'fp16' or 'fp32'"),
        ("optimizer.name=torchao.optim.Nothing", "optimizer.name is 'torchao.optim.Nothing': it is no class of an"),
        ("optimizer.arguments={fused: true}", "it has arguments for another optimizer; name its class"),
        ("penalty.certify=true; target=train", "sets penalty.certify, but target train is not half or auto"),
        ("data={}", "data.path is missing; add it"),
        ("data.path.x=1", "data.path is not a section"),
        # An unknown key rather than one that is needed and missing.
        ("data={}; steps=1", "unknown key steps; did you mean schedule.steps?"),
        ("data={}; schedule.learningrate=1", "unknown key schedule.learningrate; did you mean schedule.learning_rate?"),
    ],
)
def test_a_wrong_value_or_key_is_one_line_that_names_it(tmp_path: Path, override: str, wanted: str) -> None:
    message = refusal(write(tmp_path, FIVE_LINES), *override.split("; "))
    assert message.startswith(f"{tmp_path / 'recipe.yaml'}: ")
    assert wanted in message


@pytest.mark.parametrize("override", ["schedule.steps", "=3", ".a=3", "schedule..steps=3", ""])
def test_an_override_without_key_and_value_is_refused(tmp_path: Path, override: str) -> None:
    assert "has no key or no value; write it like schedule.steps=200" in refusal(write(tmp_path, FIVE_LINES), override)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "the recipe is empty"),
        ("- a\n- b\n", "made of `key: value` lines"),
        ("source: a\nout: b\n", "data is missing"),
        ("out: b\n", "source is missing; add it"),
        ("source: [\n", "not YAML at line 2"),
        ("source: a\nout: b\nsource: c\n", "not YAML at line 3 (the key source is given twice)"),
        ("data: {path: a, path: b}\n", "not YAML at line 1 (the key path is given twice)"),
        ("? [a]\n: b\n", "not YAML at line 1 (the key of a section is not a word)"),
        ("a: !!python/object/apply:os.getcwd []\n", "not YAML at line 1"),
        ("a: " + "[" * 2000, "not YAML"),
        ("a\0b", "not YAML"),
        (b"source: \xff", "not UTF-8 at byte 8; save the recipe as UTF-8"),
    ],
    ids=repr,
)
def test_a_file_that_is_no_recipe_is_one_line(tmp_path: Path, text: str | bytes, wanted: str) -> None:
    path = write(tmp_path, text)
    message = refusal(path)
    assert message.startswith(f"{path}: ")
    assert wanted in message


def test_a_missing_file_and_a_folder_are_one_line(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.yaml")
    assert "Is a directory; give the recipe's YAML file" in refusal(tmp_path)
    assert "write it to one: bf16-to-fp16 recipe demo > demo.yaml" in refusal(tmp_path / "demo")


def test_a_certificate_that_nothing_is_said_of_is_trained_where_it_can_be() -> None:

    def settled(*, penalty: dict[str, Any] | None = None, **settings: Any) -> Recipe:
        tree = {"source": "a", "out": "b", "data": {"path": "c"}, "penalty": penalty or {}, **settings}
        return parse_recipe(tree).settled()

    for target, certify in (("half", True), ("auto", True), ("norm-safe", False), ("train", False)):
        recipe = settled(target=target)
        assert recipe.penalty.certify is certify, target
        assert recipe.planned_target == ("half" if certify else target)
    assert settled(penalty={"form": "none"}).penalty.certify is False
    assert settled(penalty={"form": "none", "certify": True}).penalty.certify is True
    assert settled(penalty={"certify": False}).penalty.certify is False


@pytest.mark.parametrize(
    ("size", "passes", "processes", "share"),
    [
        (8, 1, 1, (8, 1)),
        (2, 8, 4, (2, 2)),
        (8, 1, 4, (2, 1)),
        (8, 3, 2, (6, 2)),
        (8, 1, 3, "for 9 examples in a step use --set data.batch_size=3 --set data.gradient_accumulation=3"),
    ],
)
def test_the_batch_is_divided(size: int, passes: int, processes: int, share: tuple[int, int] | str) -> None:
    data = Data(path="a.txt", batch_size=size, gradient_accumulation=passes)
    if isinstance(share, str):
        with pytest.raises(UserError, match=share):
            data.share(processes)
        return
    each = data.share(processes)
    assert (each.batch_size, each.gradient_accumulation) == share
    assert each.batch_size * each.gradient_accumulation * processes == size * passes


COMMAND = Command("r.yaml", ("schedule.steps=100", "seed=1"))


def recipe(**changes: Any) -> Recipe:
    return parse_recipe({"source": "a", "out": "folder/b", "data": {"path": "c.txt"}, **changes})


ASKED = recipe()


def evaluated(*found: tuple[float | None, float | None]) -> list[dict[str, Any]]:
    return [{"step": i, "held_out_loss": loss, "held_out_divergence": kl} for i, (loss, kl) in enumerate(found)]


def finetuned(headroom: float, *, kl: float = 0.01) -> Report:
    report = fakes.conversion()
    report["verdict"], report["unsafe"] = "safe", []
    for regime in report["regimes"].values():
        regime["headroom_bits"] = headroom + 1
    next(iter(report["regimes"].values()))["headroom_bits"] = headroom
    run = {"steps": 100, "evaluations": evaluated((2.0, 0.0), (2.01, kl))}
    return read(Report, report | {"finetune": run})


def after(report: Report, **changes: Any) -> tuple[Report, str]:
    result = with_goals(report, recipe(**changes), COMMAND)
    assert result.finetune is not None
    return result, result.finetune.next


def test_less_headroom_than_was_asked_for_is_unsafe_with_the_command_that_goes_on() -> None:
    for headroom in (1.0, 0.998):
        assert after(finetuned(headroom)) == (finetuned(headroom), "")
    result, go_on = after(finetuned(0.9))
    assert result.unsafe[-1].excess_bits == pytest.approx(0.1) and result.unsafe[-1].remedy == go_on
    assert result.unsafe[-1].reason.startswith("0.90 bits of headroom, of 1 (penalty.headroom_bits), at ")
    # Rounded down, as the headroom of the same site is everywhere else.
    assert "0.20 bits of headroom, of 1 " in after(finetuned(0.2087))[0].unsafe[-1].reason
    assert after(finetuned(2.9), penalty={"headroom_bits": 3.0})[0].verdict == "unsafe"
    assert after(finetuned(0.5), penalty={"form": "none"})[0].verdict == "safe"


FREE = {"penalty": {"form": "none"}}
HALF = "schedule.learning_rate=0.002"


@pytest.mark.parametrize(
    ("headroom", "kl", "changes", "begins", "has"),
    [
        (0.9, 0.01, {}, "go on: bf16-to-fp16 finetune r.yaml --set seed=1 --set schedule.steps=200 --force", ""),
        (math.nan, 9.0, {}, "go on: ", ""),
        # Without a target there is nothing that was asked for, until it overflows.
        (0.5, 9.0, FREE, "begin another run that stays nearer to its start: ", HALF),
        (3.0, 9.0, {}, "begin another run that stays nearer to its start: bf16-to-fp16 finetune r.yaml", HALF),
    ],
)
def test_the_next_command_goes_on(headroom: float, kl: float, changes: dict[str, Any], begins: str, has: str) -> None:
    result, said = after(finetuned(headroom, kl=kl), **changes)
    assert result.verdict == "unsafe" and result.next == said
    assert said.startswith(begins) and has in said
    assert ("checkpointing.folder=folder/b.run-2 " in said) is said.startswith("begin")


def test_a_folder_of_another_run_is_not_taken_twice(tmp_path: Path) -> None:
    for free in ("b.run-2", "b.run-2-2"):
        said = after(finetuned(3.0, kl=1060.0), out=str(tmp_path / "b"))[1]
        assert f"--set checkpointing.folder={tmp_path / free} " in said
        (tmp_path / free).mkdir()


def test_a_missed_goal_is_called_safe_but_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    proof = {"holds": True, "headroom_bits": 0.5, "max_length": 8, "splits": 8}
    result, go_on = after(read(Report, dump(finetuned(0.6)) | {"certificate": proof, "proof": "certified"}))
    # The contract's verdict, of which the exit status is made.
    assert result.verdict == "unsafe" and result.short
    sentence = verdict_sentence(result)
    assert sentence.startswith("Safe in fp16, but short of what was asked: 0.60 bits of headroom, of 1")
    assert "; proven for every input of up to 8 positions; " in sentence
    page, card = render(result), notice(result)
    assert '<span class="badge">safe, but short</span>' in page and "but short of" in page
    assert card.startswith("**Safe in fp16, but short of what was asked.** 0.60 bits of headroom")
    print_conversion(result, tmp_path)
    terminal = capsys.readouterr().out
    assert "\noutput: safe, but short of what was asked: 0.60 bits of headroom, of 1" in terminal
    assert "; proven for every input" in terminal and f"\nnext: {go_on}\n" in terminal and "\nload: " in terminal
    for said in (page.partition("<title>")[2], card, terminal):
        assert "unsafe" not in said.lower().replace('id="unsafe"', "").partition("<style>")[0]


def test_the_next_command_stands_once_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = {"bound": 9e4, "limit": 65504.0, "excess_bits": 0.5, "reason": "r", "remedy": PENALTY}
    found = [UnsafeEntry(signal=f"a.{i}", kind="found", excess_bits=0.5, reason="x", remedy=PENALTY) for i in (1, 2)]
    unproven = {"uncertified": [site | {"name": name} for name in ("a.1", "a.2")]}
    report = read(Report, dump(finetuned(0.6)) | unproven | {"verdict": "unsafe"})
    result, go_on = after(report.model_copy(update={"unsafe": found}))
    assert {*(e.remedy for e in result.unsafe), *(e.remedy for e in result.uncertified)} == {go_on}
    command = go_on.partition(": ")[2]
    print_conversion(result, tmp_path)
    for said in (render(result), notice(result), capsys.readouterr().out):
        assert said.count(command) == 1


def test_what_a_search_breaks_is_unsafe_and_goes_on_however_much_headroom_the_audit_saw() -> None:
    report = finetuned(2.0)
    entry = UnsafeEntry(signal="a.wi_0", kind="found", excess_bits=0.5, reason="90,000 on an input", remedy=PENALTY)
    search = AttackEntry(steps=64, seed=0, worst_headroom_bits=-0.5, sites=[])
    report = report.model_copy(update={"verdict": "unsafe", "unsafe": [entry], "attack": search})
    result, said = after(report)
    assert said == "go on: bf16-to-fp16 finetune r.yaml --set seed=1 --set schedule.steps=200 --force"
    assert result.verdict == "unsafe" and result.unsafe[0].remedy == said and not result.short


def test_the_last_evaluation_decides_quality() -> None:
    def missed(*found: tuple[float | None, float | None]) -> list[str]:
        return [entry.signal for entry in lost_quality(ASKED, FinetuneEntry(evaluations=evaluated(*found)))]

    assert missed() == missed((2.0, None), (2.2, None)) == []
    assert missed((2.0, 0.0), (math.nan, math.inf)) == ["divergence from the original"]


def test_the_worst_kind_of_input_is_judged_and_no_result_has_to_be_nearer_than_bf16() -> None:
    def lost(recipe: Recipe = ASKED, audit: tuple[float, float] = (0.1, 0.9), **evaluated: float) -> list[str]:
        close = {"kl_fp16": audit[0], "top1_fp16": audit[1], "kl_bf16": 5.0, "top1_bf16": 0.6}
        evaluations = [{"step": 1, **evaluated}, {"step": 2}]
        run = read(FinetuneEntry, {"kept": 1, "evaluations": evaluations, "fidelity": close})
        return [entry.reason for entry in lost_quality(recipe, run)]

    assert lost(held_out_divergence=0.1, held_out_agreement=0.9) == []
    wanted = "1.06×10³ nats per token from the original on held-out data, at most 0.2 (quality.max_kl)"
    assert lost(held_out_divergence=1060.0) == [wanted]
    wanted = "4 nats per token from the original on code, figures and other languages, at most 0.2 (quality.max_kl)"
    assert lost(held_out_divergence=0.3, unlike_divergence=4.0) == [wanted]
    assert lost(recipe(quality={"max_kl": None}), (9e9, 0.0), held_out_divergence=1060.0) == []
    wanted = "5.5 nats per token from the original on the audit's inputs, at most 5 (quality.max_kl)"
    assert lost(audit=(5.5, 0.6), held_out_divergence=0.205) == [wanted]


def test_a_command_begins_as_it_was_given_and_a_published_one_names_no_folder_of_this_machine() -> None:
    given = Command("/folder/of/mine/r.yaml", ('out="/folder/of/mine/b"', "data.path=texts/a.txt"))
    words = ["bf16-to-fp16", "finetune", "/folder/of/mine/r.yaml", "--set", given.overrides[0]]
    words += ["--set", given.overrides[1]]
    assert shlex.split(given.line()) == words
    assert given.published().line() == "bf16-to-fp16 finetune r.yaml --set out=b --set data.path=texts/a.txt"
    another = given.published().line(checkpointing__folder="/folder/of/mine/b.run-2")
    assert another.endswith(" --set checkpointing.folder=b.run-2 --force")
    launched = ("accelerate", "launch", "--config_file", "/folder/of/mine/ddp.yaml", "-m", "bf16_to_fp16", "finetune")
    given = Command("r.yaml", ("seed=1",), launched)
    assert given.line() == f"{shlex.join(launched)} r.yaml --set seed=1"
    assert given.published().line().startswith("accelerate launch --config_file ddp.yaml -m bf16_to_fp16 finetune ")


def test_a_certificate_that_was_asked_for_and_does_not_hold_is_unsafe_with_the_worst_bound() -> None:
    def with_bounds(*excess: float) -> Report:
        places = [
            {"name": f"h.{i}", "bound": 2.0**i, "limit": 65504.0, "excess_bits": bits, "reason": "r", "remedy": "m"}
            for i, bits in enumerate(excess)
        ]
        certificate = {"holds": not excess, "headroom_bits": 1.0, "max_length": 8, "splits": 8}
        return read(Report, dump(finetuned(2.0)) | {"uncertified": places, "certificate": certificate})

    assert after(with_bounds(), penalty={"certify": True})[0].safe
    assert after(with_bounds(0.5, 3.25, 1.0))[0].safe  # nobody asked
    result, said = after(with_bounds(0.5, 3.25, 1.0), penalty={"certify": True})
    said_of_it = "no certificate (penalty.certify), 3 bounds over the limit, most by 3.25 bits at h.1"
    assert result.verdict == "unsafe" and said_of_it in verdict_sentence(result)
    assert result.unsafe[-1].signal == "certificate" and result.unsafe[-1].excess_bits == 3.25
    assert said.startswith("begin another run that stays nearer to its start: bf16-to-fp16 finetune r.yaml")
    assert "schedule.learning_rate=0.002" in said
