"""The observer sees every operation, tells design from overflow, and leaves no trace."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.observed import model_of, padded, sites_in, sites_of
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from transformers.activations import NewGELUActivation

from bf16_to_fp16.measuring.batch import run_batch
from bf16_to_fp16.measuring.observer import SiteObserver
from bf16_to_fp16.measuring.probe import batches
from bf16_to_fp16.measuring.sites import CUBE_REASON, MASK_REASON, Site, sites_of_all
from bf16_to_fp16.numerics import GELU_CUBE_BACKWARD_LIMIT

pytestmark = pytest.mark.usefixtures("whole_probe")


def total(sites: dict[str, Site], what: str) -> int:
    return sum(getattr(site, what) for site in sites.values())


class Counter(TorchDispatchMode):
    """Floating outputs that share no memory with an input, counted without any of the observer's knowledge."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        flat = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        inputs = {x.untyped_storage().data_ptr() for x in flat}
        for item in torch.utils._pytree.tree_leaves(out):
            if isinstance(item, Tensor) and item.is_floating_point():
                self.count += item.untyped_storage().data_ptr() not in inputs
        return out


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["t5", "gated", "umt5", "pegasus", "t5-encoder"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_floating_output_of_the_forward_is_seen(kind: str, attention: str, dtype: torch.dtype) -> None:
    model = model_of(kind, attention).to(dtype)
    with torch.no_grad():
        with Counter() as counter:
            run_batch(model, padded(model))
        with SiteObserver(model, fast_products=False) as observer:
            run_batch(model, padded(model))
    assert observer.outputs == counter.count > 60


@pytest.mark.parametrize("kind", ["gated", "pegasus"])
def test_observing_changes_no_fp32_logit(kind: str) -> None:
    model = model_of(kind)
    with torch.no_grad():
        plain = run_batch(model, padded(model)).logits
        with SiteObserver(model):
            assert torch.equal(run_batch(model, padded(model)).logits, plain)


@pytest.mark.parametrize("kind", ["t5", "umt5", "pegasus"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_masks_are_benign_and_do_not_enter_amax(kind: str, attention: str, dtype: torch.dtype) -> None:
    model = model_of(kind, attention).to(dtype)
    sites = sites_of(model, padded(model))
    assert total(sites, "nonfinite") == total(sites, "saturated") == 0
    masked = [site for site in sites.values() if site.reason == MASK_REASON]
    assert (kind == "pegasus" and attention == "sdpa") or masked
    assert all(site.benign and site.amax < 1000 for site in masked)


def test_a_masked_score_that_overflows_is_benign_and_an_unmasked_one_is_not() -> None:
    model = model_of("t5").half()
    bias = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias
    bias.weight.data.fill_(-30000.0)  # plus the mask's -65504: -inf
    site = sites_of(model, padded(model))["encoder.block.0.layer.0.SelfAttention:add#2"]
    assert site.nonfinite == site.saturated == 0
    assert site.benign > 0
    assert 29000 < site.amax < 31000
    bias.weight.data.fill_(65504.0)
    model.encoder.block[0].layer[0].SelfAttention.q.weight.data.mul_(1000)
    site = sites_of(model, padded(model))["encoder.block.0.layer.0.SelfAttention:add"]
    assert site.nonfinite + site.saturated > 0


def hiding(chosen: Tensor, value: float = -65504.0, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.zeros(chosen.shape if chosen.dim() == 1 else (4, 4), dtype=dtype).masked_fill(chosen, value)


FIRST = torch.arange(4) == 0


def test_nan_from_an_entirely_masked_row_counts() -> None:
    def attend(x: Tensor) -> Tensor:
        return (x @ x.T + hiding(FIRST[:, None], -torch.inf)).softmax(-1)

    sites = sites_in(attend, torch.ones(4, 4, dtype=torch.float16))
    assert sites["model:add"].nonfinite == 0
    assert sites["model:add"].benign == 4
    assert sites["model:softmax"].nonfinite == 4


def test_a_mask_stays_one_through_views_and_where_it_is_filled_up_for_a_kernel() -> None:
    def rearranged(x: Tensor) -> Tensor:
        chosen = torch.where(torch.eye(4) > 0, torch.tensor(-torch.inf, dtype=x.dtype), x)
        return chosen[None].expand(2, 4, 4).transpose(1, 2)[:, 1:].clone()

    site = sites_in(rearranged, torch.full((4, 4), 7.0, dtype=torch.float16))["model:clone"]
    assert site.nonfinite == 0
    assert site.benign == 6
    assert site.amax == 7.0

    def filled_up(x: Tensor) -> Tensor:
        return functional.pad(x.masked_fill(FIRST[:3], -65504.0), (0, 5))[..., :3].clone()

    sites = sites_in(filled_up, torch.full((2, 3), 7.0, dtype=torch.float16))
    for name in ("model:constant_pad_nd", "model:clone"):
        assert (sites[name].saturated, sites[name].benign, sites[name].amax) == (0, 2, 7.0), name


class Efficient(TorchDispatchMode):
    """A stand-in for CUDA's memory-efficient attention, whose log-sum-exp goes on with inf to a multiple of 32 rows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._scaled_dot_product_efficient_attention.default:
            return func(*args, **(kwargs or {}))
        query = args[0]
        rest = torch.full((*query.shape[:2], 32), math.inf)
        return query.clone(), rest, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def test_what_fused_attention_keeps_for_its_backward_is_no_signal() -> None:
    def fused(x: Tensor) -> Any:
        return torch.ops.aten._scaled_dot_product_efficient_attention(x, x, x, None, True)[0]

    with Efficient():
        sites = sites_in(fused, torch.full((1, 2, 5, 8), 3.0, dtype=torch.float16))
    assert {site.name: (site.amax, site.nonfinite) for site in sites.values()} == {"model:context": (3.0, 0)}


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_infinity_or_nan_that_a_mask_cannot_hide_counts(value: float) -> None:
    x = torch.ones(4, 4, dtype=torch.float16)
    x[1, 0] = value
    site = sites_in(lambda x: x + hiding(FIRST[None]), x)["model:add"]
    assert (site.nonfinite, site.benign, site.amax) == (1, 3, math.inf)


def test_what_a_mask_was_added_to_is_no_signal_of_either_sign() -> None:
    x = torch.full((3, 4), -7.0)
    x[1, 0] = 45000.0
    site = sites_in(lambda x: x + hiding(FIRST, -40000.0, torch.float32), x)["model:add"]
    assert (site.nonfinite, site.saturated, site.benign, site.amax) == (0, 0, 3, 7.0)


@pytest.mark.parametrize(
    ("dtype", "saturated"), [(torch.float16, 3), (torch.bfloat16, 0), (torch.float32, 0), (torch.float64, 0)]
)
def test_what_is_infinite_nan_or_saturated_is_counted_in_every_dtype(dtype: torch.dtype, saturated: int) -> None:
    large = [math.inf, -math.inf, -math.inf, math.nan, 65504.0, -65504.0, -65504.0, 1000.0]
    site = sites_in(lambda x: x * 1.0, torch.tensor(large, dtype=dtype))["model:mul"]
    assert (site.nonfinite, site.saturated, site.amax) == (4, saturated, math.inf)


class Attention(nn.Module):
    hidden: Tensor

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.register_buffer("hidden", hidden)
        self.keys = nn.Parameter(torch.eye(4, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(self.hidden.shape, dtype=x.dtype).masked_fill(self.hidden, torch.finfo(x.dtype).min)
        return (x @ self.keys + mask).softmax(-1)


def test_a_masked_position_counts_where_it_has_a_weight_beside_seen_ones() -> None:
    last_two = [False, False, True, True]
    hidden = torch.tensor([[True] * 4, last_two, last_two, [False] * 4])
    rows = [
        [1.0, 1.0, 1.0, 1.0],  # sees nothing, so that the masked have weights by design
        [-1007.0, -2000.0, 64480.0, -5.0],  # 17 below the seen, a weight of 2^-24
        [-1000.0, -1007.0, 64512.0, -5.0],  # above the seen
        [1.0, 2.0, 3.0, 4.0],
    ]
    sites = sites_in(Attention(hidden), torch.tensor(rows, dtype=torch.float16))
    site = sites["model:masked"]
    assert sites["model:softmax"].amax == 1 and sites["model:add"].benign == 8
    assert (site.saturated, site.nonfinite) == (1, 0)
    assert site.amax == pytest.approx(64512 + 1000 + 24 * math.log(2))


def test_a_score_that_is_nan_hides_what_no_other_row_asks_of_the_mask() -> None:
    rows = torch.full((4, 4), 5.0, dtype=torch.float16)
    rows[1, 0] = rows[2, 3] = torch.nan
    sites = sites_in(Attention(torch.arange(4) == 3), rows)
    assert sites["model:scores"].nonfinite == 8  # NaN × 0 as well
    assert sites["model:masked"].amax == pytest.approx(24 * math.log(2))


def test_a_constant_that_an_activation_was_written_into_is_one_no_longer() -> None:
    def overwrite(x: Tensor) -> Tensor:
        buffer = torch.zeros(4, 4, dtype=x.dtype)
        buffer[:, 1:3] = x[:, :2] * 40000
        return buffer * 2

    sites = sites_in(overwrite, torch.ones(4, 4, dtype=torch.float16))
    assert sites["model:mul#2"].nonfinite == 8


def test_a_cube_is_benign_only_on_its_way_to_a_tanh() -> None:
    x = torch.full((8,), 60.0, dtype=torch.float16)
    alone = sites_in(lambda x: torch.pow(x, 3.0) * 0.5, x)
    assert alone["model:pow"].nonfinite == alone["model:mul"].nonfinite == 8
    gelu = sites_in(NewGELUActivation(), x)
    assert total(gelu, "nonfinite") == 0
    assert gelu["model:pow"].benign == gelu["model:mul#2"].benign == gelu["model:add"].benign == 8
    assert gelu["model:pow"].reason == CUBE_REASON
    assert gelu["model:tanh"].reason is None
    assert gelu["model:mul#4"].amax == 60.0
    nan = sites_in(NewGELUActivation(), torch.full_like(x, torch.nan))
    assert nan["model:pow"].nonfinite == 8


@pytest.mark.parametrize(("x", "breaks"), [(100.0, False), (160.0, True)])
def test_the_cube_breaks_the_backward_past_its_own_limit(x: float, breaks: bool) -> None:
    inputs = torch.full((8,), x, dtype=torch.float16, requires_grad=True)
    module = NewGELUActivation()
    with SiteObserver(module) as observer:
        module(inputs).sum().backward()
    sites = {site.name: site for site in observer.sites()}
    cubed = sites["model:cubed"]
    assert cubed.limit == GELU_CUBE_BACKWARD_LIMIT
    assert cubed.amax == x
    assert cubed.headroom_bits is not None
    assert (cubed.headroom_bits < 0) is breaks
    gradients = sum(site.nonfinite for name, site in sites.items() if ":grad" in name)
    assert (gradients > 0) is breaks
    assert sum(site.nonfinite for name, site in sites.items() if ":grad" not in name) == 0


def test_the_bounds_of_the_clamp_are_constants() -> None:
    model = model_of("t5").half()
    sites = sites_of(model, padded(model)).values()
    bounds = [site for site in sites if site.name.startswith("encoder.block.0:constant")]
    assert bounds
    assert all(site.limit is None and site.nonfinite == site.saturated == 0 for site in bounds)


@pytest.mark.parametrize("kind", ["gated", "pegasus"])
def test_eager_and_sdpa_share_the_names_of_what_both_run(kind: str) -> None:
    names = {}
    for attention in ("eager", "sdpa"):
        model = model_of(kind, attention)
        names[attention] = set(sites_of(model, padded(model)))
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    contexts = {name for name in names["eager"] if name.endswith(":context")}
    assert linear | contexts <= names["eager"] & names["sdpa"]
    assert len(contexts) == 4  # 2 encoder layers, twice 1 in the decoder
    only = {name.rpartition(":")[2].partition("#")[0] for name in names["eager"] - names["sdpa"]}
    assert "scores" in only
    constants = {"constant zeros", "constant where", "constant scalar_tensor"}
    assert only <= {"scores", "masked", "add", "mul", "softmax", "clone"} | constants


def test_a_gradient_that_overflows_is_named_after_its_forward() -> None:
    first, second = (nn.Linear(4, 4, bias=False) for _ in range(2))
    nn.init.ones_(first.weight)
    nn.init.constant_(second.weight, 100.0)
    model = nn.Sequential(first, nn.ReLU(), second).half()
    with SiteObserver(model) as observer:
        loss = model(torch.ones(2, 4, dtype=torch.float16)).sum() * 1000
        loss.backward()
    broken = [site.name for site in observer.sites() if site.nonfinite]
    assert broken == ["2:grad#2", "1:relu:grad", "0:grad"]


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        raise RuntimeError("in the middle")


def test_sites_of_runs_apart_are_those_of_one_run_after_another() -> None:
    """Also where the later site breaks in an earlier run, and a mask or a cube is in one of them only."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
            self.act = NewGELUActivation()
            self.one.weight.data.fill_(4.0)
            self.other.weight.data.fill_(64.0)

        def forward(self, x: Tensor, fill: float) -> Tensor:
            x = self.other(self.one(x))
            torch.where(x > 0, x, torch.full_like(x, fill))
            return self.act(x) if fill else x**3

    model, runs = Model().half(), [(1.0, 0.0), (1000.0, -65504.0), (1.0, -65504.0), (20000.0, 0.0), (-1.0, -65504.0)]

    def observed(some: list[tuple[float, float]]) -> list[Site]:
        observer = SiteObserver(model)
        for x, fill in some:
            with torch.no_grad(), observer:
                model(torch.tensor([[x]], dtype=torch.float16), fill)
        return observer.sites()

    whole, apart = observed(runs), [observed([run]) for run in runs]
    for _ in range(2):  # what is joined stays as it is
        joined = sites_of_all(apart)
        first, second = (sorted(sites, key=lambda s: s.order) for sites in (joined, whole))
        assert [replace(s, order=0) for s in first] == [replace(s, order=0) for s in second]
    order = {s.name: s.order for s in joined}
    assert order["other"] < order["one"] and len({order[name] >> 40 for name in order}) > 2
    assert {s.reason for s in joined} >= {MASK_REASON, CUBE_REASON}


def test_nothing_stays_behind_after_an_exception() -> None:
    model = Raises()
    observer = SiteObserver(model)
    with pytest.raises(RuntimeError, match="in the middle"), observer:
        model(torch.ones(1, 2))
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert not _get_current_dispatch_mode_stack()
    with observer:
        model.inner(torch.ones(1, 2))
    assert [site.name for site in observer.sites()] == ["inner"]
    assert observer.sites()[0].calls == 2


def test_generation_with_cache_and_beams_is_seen_and_its_own_bookkeeping_is_not() -> None:
    model = model_of("t5").half()
    generation = batches(model.config, None, None)[-1]
    assert generation.generate
    sites = sites_of(model, generation)
    assert sites["lm_head"].calls == 4
    assert sites["encoder.block.0.layer.0.SelfAttention.q"].calls == 1
    assert total(sites, "nonfinite") == 0
