"""What finetunes of tests do less of than those of users, and what several tests of them are given."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import brief
from support.corpora import TEXTS, TOKENIZERS, Open
from support.learner import Damage, Fix, Make, kept, recipe_for, saved, tiny_model, trainer_of

from bf16_to_fp16.finetuning.corpus import Corpus
from bf16_to_fp16.finetuning.recipe import Data
from bf16_to_fp16.finetuning.trainer import Trainer


@pytest.fixture(scope="package", autouse=True)
def brief_evaluations() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        brief.evaluate_briefly(patch)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("source"), 120)


@pytest.fixture
def fix(monkeypatch: pytest.MonkeyPatch) -> Fix:
    """Set constants of a module of finetuning, as for a longer run than a test's."""

    def fixed(module: str, **constants: Any) -> None:
        for name, value in constants.items():
            monkeypatch.setattr(f"bf16_to_fp16.finetuning.{module}.{name}", value)

    return fixed


@pytest.fixture
def make(folder: Path, tmp_path: Path) -> Make:

    def made(run: str = "run", *, model: Any = None, damage: Damage = kept, **changes: Any) -> Trainer:
        recipe = recipe_for(folder, tmp_path / "out", **changes)
        return trainer_of(recipe, folder, tmp_path / run, model or tiny_model(), tiny_model(), damage)

    return made


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    made = {}
    for kind, make in TOKENIZERS.items():
        folder = tmp_path_factory.mktemp(kind)
        tokenizer = make()
        tokenizer.save_pretrained(folder)
        config = SimpleNamespace(
            vocab_size=len(tokenizer), is_encoder_decoder=True, architectures=["ForConditionalGeneration"], to_dict=dict
        )
        made[kind] = (folder, config)
    return made


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "texts.txt"
    path.write_text("\n".join(text[: 20 + 7 * k] for k, text in enumerate(TEXTS[:40])) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def opened(checkpoints: dict[str, tuple[Path, Any]], text_file: Path) -> Open:

    def open_it(
        kind: str = "byt5", seed: int = 0, path: Path = text_file, changes: dict[str, Any] | None = None, **data: Any
    ) -> Corpus:
        """Changes: to the config of the checkpoint."""
        folder, config = checkpoints[kind]
        config = SimpleNamespace(**vars(config) | (changes or {}))
        return Corpus(Data(path=str(path), **({"held_out": 0.0} | data)), folder, config, seed=seed)

    return open_it
