"""The frozen teacher in parts says what it says whole, and no process holds more than its share."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import tiny
from support.launching import two_ranks

from bf16_to_fp16.finetuning.corpus import TrainingBatch
from bf16_to_fp16.finetuning.distillation import Teacher
from bf16_to_fp16.finetuning.processes import weights_in_parts

KINDS = ("t5", "pegasus", "t5-encoder")


def batch_of(decodes: bool) -> TrainingBatch:
    ids = torch.randint(2, 97, (3, 9), generator=torch.Generator().manual_seed(1))
    return TrainingBatch(ids, torch.ones_like(ids), ids[:, :5] if decodes else None, ((0, 0), (0, 1), (0, 2)))


def teacher_of(kind: str, **options: Any) -> Teacher:
    return Teacher(tiny.build(kind), torch.device("cpu"), **options)


def on_a_rank(rank: int) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        whole, parts = teacher_of(kind), teacher_of(kind, in_parts=True)
        batch = batch_of(kind != "t5-encoder")
        count = sum(p.numel() for p in whole.model.parameters())
        held = sum(p.to_local().numel() for p in parts.model.parameters())
        same = [torch.equal(whole.outputs(batch), parts.outputs(batch)) for _ in range(2)]
        found[kind] = {"share": held / count, "same": same}
    return found


@pytest.fixture(scope="module")
def ranks(warm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return two_ranks(warm_python, __file__, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_in_parts_says_the_same_and_each_process_has_half(ranks: list[dict[str, Any]], kind: str) -> None:
    for found in ranks:
        assert found[kind]["same"] == [True, True]
    assert sum(found[kind]["share"] for found in ranks) == pytest.approx(1.0)
    assert max(found[kind]["share"] for found in ranks) < 0.6


@pytest.mark.parametrize(
    ("kind", "stage", "processes", "parts"),
    [
        ("MULTI_GPU", None, 2, False),
        ("FSDP", None, 2, True),
        ("FSDP", None, 1, False),
        ("DEEPSPEED", 2, 2, False),
        ("DEEPSPEED", 3, 2, True),
        ("DEEPSPEED", 3, 1, False),
    ],
)
def test_the_teacher_is_in_parts_where_the_student_s_weights_are(
    kind: str, stage: int | None, processes: int, parts: bool
) -> None:
    plugin = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage)) if stage else SimpleNamespace()
    accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value=kind), state=plugin, num_processes=processes)
    assert weights_in_parts(accelerator) is parts
