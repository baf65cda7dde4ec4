"""A recipe of five lines works, what nobody reads is refused, and every refusal is one line of what to do."""

import json
from pathlib import Path
from typing import Any

import pytest

from bf16_to_fp16.errors import UserError
from bf16_to_fp16.finetuning.recipe import Data, Penalty, Recipe, Schedule, parse_recipe, read_recipe

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


def test_describe_is_json_that_reads_back_as_the_same_recipe(tmp_path: Path) -> None:
    """With every default written out, too."""
    recipe = read_recipe(write(tmp_path, FIVE_LINES), ["precision=fp32", "seed=1"])
    assert parse_recipe(json.loads(json.dumps(recipe.describe()))) == recipe


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("1.5E-3", 1.5e-3), ("2e1", 20.0), (".5", 0.5), ("2", 2.0), ("1_0", 10.0), ("010", 10.0)],
)
def test_numbers_words_a_byte_order_mark_and_empty_sections_are_read_as_people_write_them(
    tmp_path: Path, text: str, value: float
) -> None:
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
        ("schedule.steps=-3", "schedule.steps is -3; it should be greater than or equal to 1"),
        ("schedule.steps='3'", "schedule.steps is '3'; it should be a valid integer"),
        ("schedule.learning_rate=.inf", "schedule.learning_rate is inf; it should be a finite number"),
        ("source=", "source is null; it should be a valid string"),
        ("source='  '", "source is empty; give the checkpoint"),
        ("data=texts.jsonl", "data is 'texts.jsonl'; it should be a section"),
        ("target=full", "target is 'full'; it should be 'auto', 'half', 'norm-safe', 'fp16-accumulate' or 'train'"),
        ("precision=[bf16, fp16]", "precision is ['bf16', 'fp16']; it should be 'fp16' or 'fp32'"),
        ("optimizer.name=torchao.optim.Nothing", "optimizer.name is 'torchao.optim.Nothing', no class of an installed"),
        ("optimizer.arguments={fused: true}", "arguments are another optimizer's; name it"),
        ("penalty.certify=true; target=train", "penalty.certify is for target half, and target is train"),
        ("data={}", "data.path is missing; add it: a .jsonl"),
        ("data.path.x=1", "data.path is not a section"),
        # An unknown key rather than one that is needed and missing.
        ("data={}; steps=1", "unknown key steps; did you mean schedule.steps?"),
        ("data={}; schedule.learningrate=1", "unknown key schedule.learningrate; did you mean schedule.learning_rate?"),
        ("data={}; penalty.headrom=1", "unknown key penalty.headrom; did you mean penalty.headroom_bits?"),
        ("data={}; wandd=1", "unknown key wandd; did you mean wandb?"),
        ("data={}; batch_size=1", "unknown key batch_size; did you mean data.batch_size?"),
        ("data={}; data.pth=1", "unknown key data.pth; did you mean data.path?"),
    ],
)
def test_a_wrong_value_and_an_unknown_key_are_one_line_with_file_and_key(
    tmp_path: Path, override: str, wanted: str
) -> None:
    message = refusal(write(tmp_path, FIVE_LINES), *override.split("; "))
    assert message.startswith(f"{tmp_path / 'recipe.yaml'}: ")
    assert wanted in message


@pytest.mark.parametrize("override", ["schedule.steps", "=3", ".a=3", "schedule..steps=3", ""])
def test_an_override_without_key_and_value_is_refused(tmp_path: Path, override: str) -> None:
    assert "sets nothing; write it like schedule.steps=200" in refusal(write(tmp_path, FIVE_LINES), override)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "the recipe is empty"),
        ("# only a comment\n", "the recipe is empty"),
        ("- a\n- b\n", "made of `key: value` lines"),
        ("source: a\nout: b\n", "data is missing"),
        (
            "out: b\n",
            "source is missing; add it: the checkpoint: a folder or a Hub id (name[@revision]) (1 more after it)",
        ),
        ("source: [\n", "not YAML at line 2"),
        ("source: a\n\tout: b\n", "not YAML at line 2"),
        ("source: a\nout: b\nsource: c\n", "not YAML at line 3 (the key source is given twice)"),
        ("data: {path: a, path: b}\n", "not YAML at line 1 (the key path is given twice)"),
        ("? [a]\n: b\n", "not YAML at line 1 (the key of a section is not a word)"),
        ("3: b\n", "not YAML at line 1 (the key 3 is not a word)"),
        ("a: &x [*x]\n", "not YAML at line 1"),
        ("a: !!python/object/apply:os.getcwd []\n", "not YAML at line 1"),
        ("a: " + "[" * 20000, "not YAML"),
        ("a\0b", "not YAML"),
        (b"source: \xff", "not UTF-8 at byte 8; save the recipe as UTF-8"),
        ("source: a\n".encode("utf-16"), "not UTF-8"),
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
    assert "is a folder; give the recipe's YAML file" in refusal(tmp_path)
    assert "write it first: bf16-to-fp16 recipe demo > demo.yaml" in refusal(tmp_path / "demo")


def test_a_short_run_has_a_short_default_warmup() -> None:
    assert Schedule(steps=1000).warmup_steps == 50
    assert Schedule(steps=30).warmup_steps == 3
    assert Schedule(steps=1).warmup_steps == 1


def test_a_certificate_that_nothing_is_said_of_is_trained_where_it_can_be() -> None:
    """For half and auto, by a penalty; what is asked for stays as it is."""

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
        (4, 2, 4, (2, 1)),
        (8, 3, 2, (6, 2)),
        (8, 1, 3, "a step of 8 examples .* 3 processes; the nearest that does has 9: .*size=3 .*accumulation=3"),
        (1, 1, 4, "the nearest that does has 4: --set data.batch_size=1 --set data.gradient_accumulation=4"),
        (4, 5, 8, "a step of 20 .* has 16: --set data.batch_size=2 --set data.gradient_accumulation=8"),
    ],
)
def test_the_batch_is_divided_among_processes_and_stays_the_recipes(
    size: int, passes: int, processes: int, share: tuple[int, int] | str
) -> None:
    data = Data(path="a.txt", batch_size=size, gradient_accumulation=passes)
    if isinstance(share, str):
        with pytest.raises(UserError, match=share):
            data.share(processes)
        return
    each = data.share(processes)
    assert (each.batch_size, each.gradient_accumulation) == share
    assert each.batch_size * each.gradient_accumulation * processes == size * passes
