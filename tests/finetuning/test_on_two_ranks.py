"""Two processes: their penalties agree and pull as one with all rows, and a teacher in parts is the whole one."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import tiny
from support.launching import two_ranks
from support.penalised import LOGITS, SCORES, built, ids_of
from torch import Tensor, nn

from bf16_to_fp16.finetuning.corpus import TrainingBatch
from bf16_to_fp16.finetuning.distillation import Teacher
from bf16_to_fp16.finetuning.penalty import ActivationPenalty
from bf16_to_fp16.finetuning.processes import weights_in_parts
from bf16_to_fp16.measuring.observer import SiteObserver
from bf16_to_fp16.measuring.products import FastProducts
from bf16_to_fp16.numerics import FP16_MAX


class Both(nn.Module):
    """Sites by choice: each rank runs those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
        for parameter in self.parameters():
            nn.init.eye_(parameter)

    def forward(self, x: Tensor, names: str) -> list[Tensor]:
        return [self.parts[name](x) for name in names]


KINDS = ("t5", "pegasus", "t5-encoder")


def teachers_in_parts() -> dict[str, Any]:
    found, ids = {}, torch.randint(2, 97, (3, 9), generator=torch.Generator().manual_seed(1))
    for kind in KINDS:
        whole, parts = (Teacher(tiny.build(kind), torch.device("cpu"), in_parts=each) for each in (False, True))
        labels = ids[:, :5] if kind != "t5-encoder" else None
        batch = TrainingBatch(ids, torch.ones_like(ids), labels, ((0, 0), (0, 1), (0, 2)))
        count = sum(p.numel() for p in whole.model.parameters())
        held = sum(p.to_local().numel() for p in parts.model.parameters())
        same = [torch.equal(whole.outputs(batch), parts.outputs(batch)) for _ in range(2)]
        found[kind] = {"share": held / count, "same": same}
    return found


def on_a_rank(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {"world": torch.distributed.get_world_size()}
    for kind in ("ddp", "fsdp"):
        found[kind] = trained_on(rank, kind)
    found["teachers"] = teachers_in_parts()
    model = Both()
    penalty = ActivationPenalty(model, dual_step=1.0, headroom_bits=15.0)
    steps: list[tuple[str, float]] = [("ab", 4.0), ("a", 1.0), ("ab", 2.0)]
    if rank:
        steps = [("b", 16.0), ("ab", 1.0), ("bc", 64.0)]
    with penalty:
        for names, scale in steps:
            model(torch.full((1, 2), scale), names)
            penalty()
    found["sites"] = penalty.state_dict()
    found["dropped"] = after_a_dropped_step(rank)
    return found


def after_a_dropped_step(rank: int) -> list[float]:
    """The penalties of a step whose values are smaller than those of the one that was given up before it."""
    model = Both()
    with ActivationPenalty(model, targets={"parts.a": 1.0}, weight=1.0, accumulation=2) as penalty:
        model(torch.full((1, 2), 64.0), "a")
        penalty()
        penalty.drop_step()
        totals = []
        for scale in (4.0, 2.0):
            model(torch.full((1, 2), scale if rank else 0.1), "a")
            totals.append(float(penalty()))
    return totals


def trained_on(rank: int | None, kind: str) -> dict[str, Any]:
    """Three steps on a rank's rows, or alone on all of them; the ranks' largest values are not in the same one's."""
    from torch.distributed.fsdp import fully_shard

    model = built(train=False)
    targets = {SCORES: 2.0, LOGITS: 1.0}
    ids = torch.cat([ids_of(2, seed=0), ids_of(2, seed=1)]) if rank is None else ids_of(2, seed=rank)
    with SiteObserver(model) as observer:
        model(input_ids=ids, labels=ids)
    local = {site.name: site.amax for site in observer.sites() if site.name in targets}
    wrapper: Any = model
    if kind == "ddp":
        wrapper = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp":
        for block in [*model.encoder.block, *model.decoder.block]:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    penalty = ActivationPenalty(wrapper, targets=targets, dual_step=0.5).attach()
    weights, totals, gradients = [], [], []
    first: dict[str, float] = {}
    for _ in range(3):
        optimizer.zero_grad()
        with FastProducts():
            loss = wrapper(input_ids=ids, labels=ids).loss
            total = penalty()
            (loss + total).backward()
        if kind != "fsdp":
            gradients.append([float(p.grad.norm()) for p in model.parameters() if p.grad is not None])
        optimizer.step()
        observed = penalty.observations()
        first = first or {site: observed[site].amax for site in targets}
        weights.append([observed[site].weight for site in targets])
        totals.append(float(total))
    sites = list(penalty.observations())
    penalty.detach()
    whole = [p.full_tensor() if kind == "fsdp" else p for p in model.parameters()]
    parameters = [float(p.detach().double().sum()) for p in whole]
    seen = {"local": local, "sites": sites, "first": first, "weights": weights, "totals": totals}
    return seen | {"gradients": gradients, "parameters": parameters}


@pytest.fixture(scope="module")
def ranks(warm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return two_ranks(warm_python, __file__, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_agree_on_values_weights_and_model(ranks: list[dict[str, Any]], kind: str) -> None:
    assert [found["world"] for found in ranks] == [2, 2]
    first, second = (found[kind] for found in ranks)
    assert first["local"] != second["local"]
    for site, amax in first["first"].items():
        assert amax == pytest.approx(max(first["local"][site], second["local"][site]), rel=1e-6)
    for what in ("first", "weights", "parameters"):
        assert first[what] == second[what]
    assert first["weights"][-1] > first["weights"][0] > [0.0, 0.0]
    assert max(first["totals"]) > 0
    assert first["totals"] == second["totals"]


def test_two_ranks_pull_as_one_process_with_all_their_rows(ranks: list[dict[str, Any]]) -> None:
    """Each rank's own maximum pulling, at half weight, is another gradient. test_launch.py has two calls a step."""
    together, alone = [found["ddp"] for found in ranks], trained_on(None, "alone")
    means = [sum(totals) / 2 for totals in zip(*(found["totals"] for found in together), strict=True)]
    assert means == pytest.approx(alone["totals"], rel=1e-3) and min(means[1:]) > 0
    assert together[0]["weights"] == [pytest.approx(step, rel=1e-3) for step in alone["weights"]]
    for step, wanted in zip(together[0]["gradients"], alone["gradients"], strict=True):
        assert step == pytest.approx(wanted, rel=1e-2, abs=1e-3 * max(wanted))


def test_sharded_training_is_ddp_s(ranks: list[dict[str, Any]]) -> None:
    ddp, sharded = ranks[0]["ddp"], ranks[0]["fsdp"]
    assert ddp["sites"] == sharded["sites"]  # FSDP's own operations are none
    assert ddp["weights"] == [pytest.approx(step, rel=1e-3) for step in sharded["weights"]]
    assert ddp["totals"] == pytest.approx(sharded["totals"], rel=1e-3)


def test_a_dropped_step_leaves_no_trace_on_two_ranks(ranks: list[dict[str, Any]]) -> None:
    assert [found["dropped"] for found in ranks] == [pytest.approx([2.0, 1.0])] * 2


def test_ranks_that_see_different_sites_neither_hang_nor_disagree(ranks: list[dict[str, Any]]) -> None:
    first, second = (found["sites"] for found in ranks)
    assert first["order"] == second["order"] == ["parts.a", "parts.b", "parts.c"]
    assert first["weights"] == second["weights"]
    target = FP16_MAX * 2.0**-15
    bits = {amax: math.log2(amax / target) for amax in (1.0, 2.0, 4.0, 16.0, 64.0)}
    a = bits[4.0] + max(bits[1.0], -1.0) + bits[2.0]
    b = bits[16.0] + max(bits[1.0], -1.0) + bits[64.0]
    assert first["weights"]["parts.a"] == pytest.approx(a)
    assert first["weights"]["parts.b"] == pytest.approx(b)
    assert first["weights"]["parts.c"] == pytest.approx(bits[64.0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_in_parts_says_the_same_and_each_process_has_half(ranks: list[dict[str, Any]], kind: str) -> None:
    for found in ranks:
        assert found["teachers"][kind]["same"] == [True, True]
    assert sum(found["teachers"][kind]["share"] for found in ranks) == pytest.approx(1.0)
    assert max(found["teachers"][kind]["share"] for found in ranks) < 0.6


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
def test_the_teacher_is_in_parts_as_the_student(kind: str, stage: int | None, processes: int, parts: bool) -> None:
    plugin = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage)) if stage else SimpleNamespace()
    accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value=kind), state=plugin, num_processes=processes)
    assert weights_in_parts(accelerator) is parts
