"""``AdamW`` on shards: the bits of one process that has the whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.launching import two_ranks
from torch import Tensor, nn

from bf16_to_fp16.errors import UserError
from bf16_to_fp16.optim.adamw import AdamW

BF16, FP16 = torch.bfloat16, torch.float16


def test_a_parameter_that_is_placed_otherwise_than_in_rows_is_refused() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Placement, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        ways: tuple[Placement, ...] = (Partial(), Shard(1))
        for way in ways:
            with pytest.raises(UserError, match=r"only Shard\(0\) and Replicate are known"):
                AdamW([nn.Parameter(DTensor.from_local(torch.zeros(4, 4), mesh, [way], run_check=False))])
    finally:
        dist.destroy_process_group()


def on_a_rank(rank: int) -> bool:
    """Whether two processes of FSDP2, each with its shards, get the bits of one that has the whole."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    ways = [(BF16, "stochastic", "bfloat16"), (BF16, "nearest", "float32"), (FP16, "stochastic", "float32")]
    return all(all(map(torch.equal, trained(*way, None), trained(*way, mesh))) for way in ways)


def trained(dtype: torch.dtype, how: str, moments: str, mesh: Any) -> list[Tensor]:
    """What three steps leave, resumed in the middle: of a model, and of a matrix that is divided by its rows."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    def divided(tensor: Tensor) -> Tensor:
        return tensor if mesh is None else distribute_tensor(tensor, mesh, [Shard(0)])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 1), nn.Linear(1, 1)).to(dtype)
    rows = nn.Parameter(divided(torch.randn(3, 6, 7).to(dtype)))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
        parts = [p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor)]
        assert len(parts) == 6 and sum(parts) < sum(p.numel() for p in model.parameters())
    params = [*model.parameters(), rows]
    optimizer = AdamW(params, lr=1e-2, rounding=how, moments=moments)
    for step in range(3):
        torch.manual_seed(step)
        x, grad = torch.randn(4, 16).to(dtype), torch.randn(3, 6, 7).to(dtype)
        optimizer.zero_grad()
        (model(x).float().square().mean() * 4096).backward()  # FSDP2 halves gradients: exact above subnormals
        rows.grad = divided(grad)
        optimizer.step()
        if step == 1:
            state = optimizer.state_dict()
            optimizer = AdamW(params, moments=moments)
            optimizer.load_state_dict(state)
    kept = [*params, *(optimizer.state[p][name] for p in params for name in ("exp_avg", "exp_avg_sq"))]
    return [(t.full_tensor() if isinstance(t, DTensor) else t).detach() for t in kept]


def test_fsdp2_on_two_processes_gives_the_bits_of_one(warm_python: Path, tmp_path: Path) -> None:
    assert two_ranks(warm_python, __file__, tmp_path) == [True, True]
