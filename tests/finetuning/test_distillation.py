"""The frozen teacher in parts says what it says whole, and no process holds more than its share."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import tiny

from bf16_to_fp16.finetuning.corpus import TrainingBatch
from bf16_to_fp16.finetuning.distillation import Teacher
from bf16_to_fp16.finetuning.processes import weights_in_parts

KINDS = ("t5", "umt5", "pegasus", "mbart", "t5-encoder")


def batch_of(decodes: bool) -> TrainingBatch:
    ids = torch.randint(2, 97, (3, 9), generator=torch.Generator().manual_seed(1))
    return TrainingBatch(ids, torch.ones_like(ids), ids[:, :5] if decodes else None, ((0, 0), (0, 1), (0, 2)))


def teacher_of(kind: str, **options: Any) -> Teacher:
    return Teacher(tiny.build(kind), torch.device("cpu"), **options)


def on_a_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    found = {}
    for kind in KINDS:
        whole, parts = teacher_of(kind), teacher_of(kind, in_parts=True)
        batch = batch_of(kind != "t5-encoder")
        count = sum(p.numel() for p in whole.model.parameters())
        held = sum(p.to_local().numel() for p in parts.model.parameters())
        same = [torch.equal(whole.outputs(batch), parts.outputs(batch)) for _ in range(2)]
        found[kind] = {"share": held / count, "same": same}
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # at an interpreter's end threads of gloo may still run


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(on_a_rank, (str(folder),), nprocs=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


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
