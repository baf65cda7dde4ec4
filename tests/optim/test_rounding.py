"""Rounding against tables of all 16-bit values and random words that matter, and ``AdamW`` on shards."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launching import two_ranks
from torch import Tensor, nn

from bf16_to_fp16.errors import UserError
from bf16_to_fp16.optim import rounding
from bf16_to_fp16.optim.adamw import AdamW

BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
WORDS = {BF16: 1 << 16, FP16: 1 << 13}  # of the random bits, those that matter (fp16: above its subnormals)


def every_value(dtype: torch.dtype) -> Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).to(torch.float32)


def grid(dtype: torch.dtype) -> Tensor:
    """Return the finite values of a format in fp64, ascending, 0 once."""
    values = every_value(dtype).double()
    return values[values.isfinite()].unique()


def pattern(*words: int) -> Tensor:
    return torch.tensor([word - ((word >> 31) << 32) for word in words], dtype=torch.int32).view(torch.float32)


def neighbours(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values of a format around x in fp64 and (x − down)/(up − down), exactly, by magnitude."""
    table = grid(dtype)
    table = table[table >= 0]
    size = x.double().abs()
    above = torch.searchsorted(table, size, right=True).clamp(max=len(table) - 1)
    down, up = table[above - 1], table[above]
    return down, up, (size - down) / (up - down)


def interesting(dtype: torch.dtype) -> Tensor:
    """Return fp32 values between those of a format, of both signs: all binades, their edges, odd fractions."""
    torch.manual_seed(0)
    span = (*range(-14, 15, 3), 15) if dtype == FP16 else range(-126, 128, 23)
    edges = torch.tensor([2.0**e for e in span])
    inside = edges * (1 + torch.rand(len(edges)))
    below, above = (torch.nextafter(edges, torch.tensor(to)) for to in (0.0, math.inf))
    x = torch.cat([inside, below, above, edges * (1 + 2.0**-9), edges * (1 + 2.0**-12)])
    if dtype == FP16:
        x = x[(x >= 2.0**-14) & (x < 65504)]
    else:
        x = torch.cat([x, torch.tensor([1e-45, 1e-41, 3e-40, 1.17549421e-38])])  # subnormal in bf16
    return torch.cat([x, -x])


@DTYPES
def test_stochastic_rounding_is_exact(dtype: torch.dtype) -> None:
    values = every_value(dtype)
    values = values[values.isfinite()]
    for word in (0, 1, 0x1FFF, 0xFFFF, 0x40000000, 0x7FFFFFFF):
        kept = rounding.stochastic(values.clone(), dtype, torch.full(values.shape, word, dtype=torch.int32))
        assert torch.equal(kept.view(torch.int32), values.view(torch.int32)), "a value of the format moved"

    words = torch.arange(WORDS[dtype], dtype=torch.int32)
    for x in interesting(dtype):
        down, up, probability = neighbours(x, dtype)
        size = rounding.stochastic(x.expand(len(words)).contiguous(), dtype, words).double() * torch.sign(x)
        assert ((size == down) | (size == up)).all()
        assert (size == up).sum() == probability * len(words)


def test_all_31_bits_decide_in_fp16s_subnormals() -> None:
    """The rounding is up for exactly the words below a limit."""
    torch.manual_seed(1)
    x = torch.cat([torch.rand(300) * 1023, torch.rand(100), torch.arange(40) + 0.5]).float() * 2.0**-24
    x = x[x >= 2.0**-31]
    down, up, probability = neighbours(x, FP16)
    limit = probability * 2.0**31
    assert torch.equal(limit, limit.round())
    for draw, neighbour in ((limit - 1, up), (limit, down)):
        inside = (draw >= 0) & (draw < 2.0**31)
        got = rounding.stochastic(x[inside], FP16, draw[inside].to(torch.int32))
        assert torch.equal(got.double(), neighbour[inside])


@DTYPES
def test_too_large_a_value_is_the_last_one_and_inf_and_nan_stay(dtype: torch.dtype) -> None:
    last = torch.finfo(dtype).max
    over = torch.tensor([last * (1 + 2.0**-20), 65535.0 if dtype == FP16 else 3.4e38, 3.4028234e38])
    nans = pattern(0x7FC00000, 0x7FFFFFFF, 0x7FFFE001, 0xFFFFFFFF, 0xFFC00001)
    for word in (0, 1, 0x1FFF, 0xFFFF, 0x7FFFFFFF):
        for x, want in ((over, last), (-over, -last), (torch.tensor([math.inf]), math.inf)):
            got = rounding.stochastic(x.clone(), dtype, torch.full(x.shape, word, dtype=torch.int32))
            assert (got == want).all()
        bits = torch.full(nans.shape, word, dtype=torch.int32)
        assert rounding.stochastic(nans.clone(), dtype, bits).to(dtype).isnan().all()


@DTYPES
def test_nearest_is_the_cast_except_that_it_saturates(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    any_bits = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    values = grid(dtype)
    ties = ((values[1:] + values[:-1]) / 2).float()
    x = torch.cat([any_bits, ties, torch.rand(1 << 14) * 2.0**-13, torch.tensor([0.0, -0.0, math.inf, -math.inf])])
    x = x[~x.isnan()]
    got, cast = rounding.nearest(x, dtype), x.to(dtype).to(torch.float32)
    last = torch.finfo(dtype).max
    cast = torch.where(x.isfinite(), cast.clamp(-last, last), cast)
    assert torch.equal(got.view(torch.int32), cast.view(torch.int32))
    assert rounding.nearest(pattern(0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF), dtype).isnan().all()


def test_fp32_is_left_alone() -> None:
    x = torch.randn(5)
    assert rounding.stochastic(x, torch.float32, torch.zeros(5, dtype=torch.int32)) is x
    assert rounding.nearest(x, torch.float32) is x


def hashed(counter: int, key: tuple[int, int, int]) -> int:
    x = (counter + key[0]) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x21F0AAAD + key[1]) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0xD35A2D97) & 0xFFFFFFFF
    return x ^ (x >> 16) ^ (0xFFFF0000 if x >> 31 else 0)


def test_random_bits_are_the_documented_hash() -> None:
    key = rounding.make_key(3, 5, 7)
    assert key == (-1870683330, 1752755086, -160228151)  # a resumed run must find the same bits in every version
    index = torch.tensor([0, 1, 2, 12345, (1 << 31) - 1], dtype=torch.int32)
    got = rounding.random_bits(index * (0x9E3779B1 - (1 << 32)), key)
    assert got.tolist() == [hashed(i * 0x9E3779B1, key) for i in index.tolist()]
    assert (got >= 0).all()
    more = [(bits + key[2]) * 0x85EBCA6B & 0xFFFFFFFF for bits in got.tolist()]
    wanted = [x >> 16 for x in more], [(x ^ x >> 16) & 0xFFFF for x in more]
    assert tuple([x & 0xFFFF for x in each.tolist()] for each in rounding.more_bits(got, key)) == wanted


def bits_of(begin: int, end: int, chunk: int = 1 << 16) -> Tensor:
    pieces = []
    for start, stop, block, first in rounding.index_blocks(begin, end, chunk):
        key = rounding.make_key(0, 0, 0, block, first)
        pieces.append(rounding.random_bits(rounding.counters(stop - start), key))
    return torch.cat(pieces)


def test_bits_are_the_same_in_any_pieces_and_others_beyond_a_block() -> None:
    block = 1 << 31
    across = bits_of(block - 32, block + 32)
    for chunk in (1, 5, 1000):
        assert torch.equal(across, bits_of(block - 32, block + 32, chunk))
    assert torch.equal(across[32:], bits_of(block, block + 32)) and not torch.equal(across[32:], bits_of(0, 32))


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
            with pytest.raises(UserError, match=r"use Shard\(0\) or Replicate"):
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
