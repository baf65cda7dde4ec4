"""The recipe of a finetune: one YAML file that decides the whole run and is checked before anything loads. Relative
paths start at the working directory."""

from __future__ import annotations

import difflib
import json
import pydoc
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ..errors import UserError, shortened
from ..targets import AskedTarget
from ..yaml_files import parse_yaml, read_yaml

SHIPPED = Path(__file__).parents[1] / "recipes"

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
NonBlank = Annotated[str, Field(min_length=1, pattern=r"\S")]


def _key(default: Any, description: str, **limits: Any) -> Any:
    return Field(default=default, description=description, **limits)


class Section(BaseModel):
    """Base class of the sections of a recipe. It is frozen and strictly typed, and refuses undeclared keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, value: Any) -> Any:
        # `schedule:` with every line under it commented out is an empty section.
        return {} if value is None else value


class Data(Section):
    """Settings of the training data: its source, and how examples are cut into batches. Lengths are in tokens."""

    path: NonBlank = Field(description="a .jsonl, .csv, .parquet or .txt (.gz too), or the id of a dataset on the Hub")
    subset: NonBlank | None = _key(None, "name of the Hub dataset's configuration")
    split: NonBlank = _key("train", "split of the Hub dataset")
    input_column: NonBlank | None = _key(None, "column of the texts; default: `input`, `text` or the first text")
    target_column: NonBlank | None = _key(None, "column of the targets; default: `target`, if the data has it")
    noise_density: float | None = _key(
        None, "share of the tokens taken out in spans; default 0.15, for denoising 0.35", gt=0, lt=1
    )
    mean_span_length: float | None = _key(None, "tokens per span; default 3, for denoising 3.5, for bytes 20", ge=1)
    first_sentinel: NonNegative | None = _key(
        None, "id of the first sentinel, from which the others count down; default: the tokenizer's"
    )
    input_length: int = _key(512, "largest number of tokens in an input", ge=4)
    target_length: int = _key(128, "largest number of tokens in a target", ge=4)
    held_out: float = _key(0.02, "share of the examples kept for evaluation", ge=0, lt=1)
    held_out_path: NonBlank | None = _key(None, "other data for evaluation, used instead of the share `held_out`")
    batch_size: Positive = _key(8, "number of examples in a forward pass")
    gradient_accumulation: Positive = _key(1, "number of forward passes in a step, divided among the processes")

    def share(self, processes: int) -> Data:
        """Return the settings for one process when a step's examples are divided equally among ``processes``. Raises
        UserError if they do not divide evenly."""
        whole = self.batch_size * self.gradient_accumulation
        nearest = max(1, round(whole / processes)) * processes
        each = nearest // processes
        size = next(size for size in range(min(self.batch_size, each), 0, -1) if each % size == 0)
        if whole != nearest:
            raise UserError(
                f"a step of {whole} examples (data.batch_size × data.gradient_accumulation) does not divide among"
                f" {processes} processes; for {nearest} examples in a step use"
                f" --set data.batch_size={size} --set data.gradient_accumulation={nearest // size}"
            )
        return self.model_copy(update={"batch_size": size, "gradient_accumulation": each // size})


class Optimizer(Section):
    """Settings of the optimizer: torch's AdamW (Loshchilov and Hutter 2019), or another class."""

    relative: bool = _key(True, "make steps proportional to each tensor's median magnitude, which rescaling changes")
    name: str | None = _key(None, "class of an optimizer to use instead of AdamW, such as torchao.optim.AdamW8bit")
    arguments: dict[str, Any] = _key({}, "arguments of that class besides parameters and learning rate")

    @field_validator("name")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        # Imported before a state is read, in which torch allows such classes alone whose module is there.
        try:
            located = value and pydoc.locate(value)
        except pydoc.ErrorDuringImport as error:
            raise ValueError(f"cannot be imported ({error.value})") from error
        if value is not None and not isinstance(located, type):
            raise ValueError("is no class of an installed package")
        return value

    @model_validator(mode="after")
    def _agree(self) -> Optimizer:
        if self.name is None and self.arguments:
            raise ValueError("has arguments for another optimizer; name its class in optimizer.name")
        return self


WARMUP = 50  # steps of the linear rise, the time that Adam's second moments need


class Schedule(Section):
    steps: Positive = _key(1000, "optimizer steps of the whole run")
    learning_rate: float = _key(4e-3, "its highest value; about 1e-4 where optimizer.relative is false", gt=0)

    @property
    def warmup_steps(self) -> int:
        return WARMUP if self.steps >= 2 * WARMUP else max(1, self.steps // 10)


CERTIFIABLE = ("half", "auto")  # targets with which bounds can be held; auto is then half


class Penalty(Section):
    """Settings of the penalty on large activations, and the headroom that it enforces, in bits below each limit."""

    form: Literal["smooth-max", "none"] = _key(
        "smooth-max", "smooth-max: penalise a site's smooth maximum of |x| where it exceeds a target; none: no penalty"
    )
    headroom_bits: float = _key(1.0, "bits that every site keeps below its limit", ge=0, lt=24)
    certify: bool | None = _key(
        None,
        "true: also lower the bounds, so that no input can overflow the model; a bound over its limit makes the result"
        " unsafe. null: lower the bounds if form is smooth-max and target is half or auto, but a bound over its limit"
        " does not make the result unsafe. false: lower no bounds",
    )

    @property
    def trained_bits(self) -> float:
        """The headroom in bits that training aims for: half a bit more than ``headroom_bits``."""
        return self.headroom_bits + 0.5


class Distillation(Section):
    """Settings of the loss that keeps the source's function: the KL divergence from the logits of the frozen source."""

    weight: float = _key(
        1.0, "share of the KL in the loss; below 1, the rest is the loss of the text's own task", ge=0, le=1
    )


class Quality(Section):
    max_kl: float | None = _key(
        0.2, "largest KL to the original in nats per token (for encoders: squared error); null: no limit", gt=0
    )


class Evaluation(Section):
    every: Positive = _key(100, "steps between evaluations")
    attack_steps: NonNegative = _key(
        64, "gradient steps of the search after training for inputs that overflow sites without a proof; 0: no search"
    )


class Checkpointing(Section):
    every: Positive = _key(100, "steps between checkpoints")
    folder: NonBlank | None = _key(None, "folder of the checkpoints; default: beside the output")


class Recipe(Section):
    source: NonBlank = Field(description="the checkpoint: a folder or a Hub id (name[@revision])")
    out: NonBlank = Field(description="the folder to write")
    subfolder: NonBlank | None = _key(None, "folder inside the source")
    target: AskedTarget = _key(
        "half", "what rescaling aims at, as in convert: half, auto, norm-safe, fp16-accumulate or train"
    )
    rescale: bool = _key(True, "rescale exactly before the first step")
    precision: Literal["fp16", "fp32"] = _key("fp16", "fp16 (until all values fit, bf16 or else fp32) or fp32")
    gradient_checkpointing: bool = _key(False, "recompute activations in the backward pass")
    device: str = _key("auto", "auto (CUDA where there is one), cpu, cuda, cuda:N or mps")
    seed: Seed = _key(0, "seed of dropout, stochastic rounding, and the data's order and noise")
    data: Data = Field(description="the section that says what to train on")
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    penalty: Penalty = Penalty()
    distillation: Distillation = Distillation()
    quality: Quality = Quality()
    evaluation: Evaluation = Evaluation()
    wandb: Literal["off", "offline", "online"] = _key("off", "Weights & Biases too: off, offline or online")
    checkpointing: Checkpointing = Checkpointing()

    @model_validator(mode="after")
    def _agree(self) -> Recipe:
        if self.penalty.certify and self.target not in CERTIFIABLE:
            raise ValueError(f"sets penalty.certify, but target {self.target} is not half or auto; leave out one key")
        return self

    def is_met_by(self, headroom_bits: float) -> bool:
        """Return whether a certified checkpoint with ``headroom_bits`` fulfils the recipe without training. A recipe
        without a penalty, with a task to learn, or with a null ``quality.max_kl`` always trains. Headroom is required
        only if the recipe sets ``penalty.headroom_bits``."""
        learns = self.penalty.form == "none" or self.distillation.weight < 1 or self.quality.max_kl is None
        return not learns and (
            "headroom_bits" not in self.penalty.model_fields_set or headroom_bits >= self.penalty.headroom_bits
        )

    def settled(self) -> Recipe:
        """Return the recipe with a value for ``penalty.certify`` if that key is null. The value is True for target
        "half" or "auto" with a penalty, and False otherwise."""
        if self.penalty.certify is not None:
            return self
        certify = self.target in CERTIFIABLE and self.penalty.form != "none"
        return self.model_copy(update={"penalty": self.penalty.model_copy(update={"certify": certify})})

    @property
    def planned_target(self) -> str:
        return "half" if self.penalty.certify else self.target

    def describe(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


def read_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Return the recipe in a YAML file. overrides: new values for keys of the file, such as ``schedule.steps=200``.
    Raises UserError for an invalid recipe."""
    path = Path(path)
    if path.name in shipped_names() and not path.exists():
        raise UserError(f"{path} is not a file; write it to one: bf16-to-fp16 recipe {path.name} > {path.name}.yaml")
    tree = read_yaml(path)
    if tree is None:
        raise UserError(f"{path}: the recipe is empty; it needs at least source, out and data")
    if not isinstance(tree, dict):
        raise UserError(f"{path}: a recipe is made of `key: value` lines; write it so")
    for override in overrides:
        _override(tree, override, str(path))
    return parse_recipe(tree, str(path))


def read_recipe_for(
    path: str | Path, source: str | Path, out: Path, target: str, subfolder: str | None
) -> tuple[Recipe, tuple[str, ...]]:
    given = {"source": str(source), "out": str(out), "target": target, "subfolder": subfolder}
    # A JSON string is a YAML string, whatever is in it.
    overrides = tuple(f"{key}={json.dumps(value)}" for key, value in given.items())
    return read_recipe(path, overrides), overrides


def shipped_names() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def shipped_text(name: str | None) -> str:
    if name not in shipped_names():
        problem = "no recipe is named" if name is None else f"there is no recipe {shortened(name)!r}"
        raise UserError(f"{problem}; choose {', '.join(shipped_names())}")
    return (SHIPPED / f"{name}.yaml").read_text(encoding="utf-8")


def parse_recipe(tree: Mapping[str, Any], name: str = "recipe") -> Recipe:
    try:
        return Recipe.model_validate(dict(tree))
    except ValidationError as error:
        # An unknown key first: a key that is missing may be the one that it was meant for.
        problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        raise UserError(f"{name}: {_problem(problems[0])}") from None


def _override(tree: dict[Any, Any], override: str, name: str) -> None:
    key, equals, value = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise UserError(f"{override!r} has no key or no value; write it like schedule.steps=200")
    place = tree
    for depth, part in enumerate(parts[:-1], 1):
        if place.get(part) is None:
            place[part] = {}
        place = place[part]
        if not isinstance(place, dict):
            raise UserError(
                f"{name}: {'.'.join(parts[:depth])} is not a section but a value; shorten the key in {override!r}"
            )
    place[parts[-1]] = parse_yaml(value, override)


def _problem(error: Any) -> str:
    key = ".".join(part for part in error["loc"] if isinstance(part, str)) or "recipe"
    if error["type"] == "extra_forbidden":
        known = (".".join(each) for each in _key_paths(Recipe))
        return f"unknown key {key}; did you mean {difflib.get_close_matches(key, known, n=1, cutoff=0)[0]}?"
    if error["type"] == "missing":
        return f"{key} is missing; add it"
    reason = error["ctx"]["error"] if error["type"] == "value_error" else error["msg"].partition(" ")[2]
    return f"{key} is {shortened(repr(error['input']))}: it {reason}"


def _key_paths(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        yield (*above, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _key_paths(field.annotation, (*above, name))
