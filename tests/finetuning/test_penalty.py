"""The penalty brings what is too large under its target, costs nothing elsewhere, and is the same however it is run."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support import exhaustive, masks, tiny
from support.launching import two_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import bf16_to_fp16
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.finetuning.penalty import SHARPNESS, ActivationPenalty, _where_largest
from bf16_to_fp16.numerics import FP16_MAX, GELU_CUBE_BACKWARD_LIMIT
from bf16_to_fp16.observe.observer import SiteObserver
from bf16_to_fp16.run.batch import run_batch
from bf16_to_fp16.run.probe import batches
from bf16_to_fp16.run.products import FastProducts

pytestmark = pytest.mark.usefixtures("whole_probe")

SCORES = "encoder.block.1.layer.0.SelfAttention:scores"
GATE = "decoder.block.0.layer.2.DenseReluDense.act:cubed"
LOGITS = "lm_head"


def built(kind: str = "gated", train: bool = False) -> Any:
    model = tiny.build(kind, factor=1.0).train(train)
    model.set_attn_implementation("eager")
    return model


def ids_of(rows: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 97, (rows, 12), generator=torch.Generator().manual_seed(seed))


def reached(model: Any, ids: Tensor) -> dict[str, float]:
    with ActivationPenalty(model, form="none", train_mode=True) as penalty:
        model(input_ids=ids, labels=ids)
        penalty()
    return {site: seen.amax for site, seen in penalty.observations().items()}


def waiting(penalty: ActivationPenalty, waits: bool) -> None:
    """Let a CPU count as a device whose values cost a wait, or not: it stands in for an accelerator."""
    penalty._waits = lambda x: waits


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# -- it works ---------------------------------------------------------------------------------------------------------


def trained(site: str, form: str = "smooth-max", steps: int = 40) -> tuple[list[float], list[float], float]:
    """Largest values and weights of a site over a training whose target is half of what it starts from."""
    model = built()
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
    ids = ids_of(4)
    target = reached(model, ids)[site] / 2
    penalty = ActivationPenalty(model, targets={site: target}, form=form, dual_step=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    largest, weights = [], []
    with penalty:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss + penalty()
            loss.backward()
            optimizer.step()
            seen = penalty.observations()[site]
            largest.append(seen.amax)
            weights.append(seen.weight)
    return largest, weights, target


@pytest.mark.parametrize("site", exhaustive.beyond([SCORES], [SCORES, GATE, LOGITS]))
def test_training_brings_a_site_under_its_target_and_its_weight_rises_and_falls(site: str) -> None:
    largest, weights, target = trained(site)
    assert largest[0] == pytest.approx(2 * target)
    assert min(largest) < target
    top = weights.index(max(weights))
    assert weights[0] == pytest.approx(0.5)  # a bit over, times dual_step
    assert 0 < top < len(weights) - 1
    assert weights[-1] < weights[top]
    largest, weights, target = trained(site, "none", steps=15)
    assert min(largest) > 1.5 * target and set(weights) == {0.0}


def test_training_brings_what_a_mask_must_add_under_what_it_adds() -> None:
    model = masks.spanning("gated", 48000.0)
    model.set_attn_implementation("eager")
    ids = torch.tensor([[5, 6, 7, 8, masks.LOUD, masks.LOUD]])
    mask = (ids != masks.LOUD).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    largest = []
    with ActivationPenalty(model, dual_step=0.5) as penalty:
        for _ in range(40):
            optimizer.zero_grad()
            logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids).logits
            (penalty() + 0 * logits.sum()).backward()
            optimizer.step()
            found = penalty.observations().items()
            largest.append([seen.amax for site, seen in found if site.endswith("SelfAttention:masked")])
    assert all(seen.target == FP16_MAX / 2 for site, seen in found if site.endswith(":masked"))
    assert min(largest[0]) > FP16_MAX and len(largest[-1]) == 2 and max(largest[-1]) < FP16_MAX / 2


# -- which sites ------------------------------------------------------------------------------------------------------


def limits(kind: str, train: bool) -> tuple[dict[str, float], dict[str, float]]:
    """The fp16 limits of the audit's sites, and the targets of the penalty's."""
    model = built(kind, train)
    batch = batches(model.config, None, None)[3]
    with ActivationPenalty(model, form="none", headroom_bits=0.0, train_mode=True) as penalty:
        run_batch(model, batch)
        penalty()
    targets = {site: seen.target for site, seen in penalty.observations().items()}
    half = copy.deepcopy(model).half()
    with SiteObserver(half) as observer:
        run_batch(half, batch)
    return {site.name: site.limit for site in observer.sites() if site.limit is not None}, targets


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kind", ["t5", "gated", "silu", "umt5", "pegasus", "mbart", "t5-encoder"])
def test_by_default_sites_and_limits_are_the_audit_s_but_for_what_another_bounds(kind: str, train: bool) -> None:
    audited, targets = limits(kind, train)
    # In train mode a dropout's copies are numbered among Pegasus's products.
    assert set(targets) <= set(audited)
    assert all(targets[site] == audited[site] for site in targets)
    rest = {site for site in set(audited) - set(targets) if ":grad" not in site}
    endings = {"clone", "to", "clamp", "softmax", "relu", "silu", "tanh", "mul", "add", "context", "embedding"}
    endings |= {"layer_norm.1", "layer_norm.2", "bernoulli", "div", "native_dropout", "_log_softmax", "nll_loss"}
    operations = {site.partition(":")[2].partition("#")[0] for site in rest}
    assert operations <= endings
    bounded = ("Attention", "attn", "act", "dropout", "norm", "embed_positions")
    for site in rest:
        path, _, operation = site.partition(":")
        if operation.partition("#")[0] in ("mul", "add", "context", "embedding"):
            assert path.rpartition(".")[2].endswith(bounded), site


def test_the_gelu_cube_s_limit_belongs_to_training() -> None:
    model = built()
    for train_mode in (True, False):
        with ActivationPenalty(model, form="none", train_mode=train_mode, headroom_bits=2.0) as penalty:
            model(input_ids=ids_of(2), labels=ids_of(2))
            penalty()
        assert penalty.train_mode is train_mode
        seen = penalty.observations()
        assert (GATE in seen) is train_mode
        if train_mode:
            assert seen[GATE].target == GELU_CUBE_BACKWARD_LIMIT / 4
        assert seen[LOGITS].target == FP16_MAX / 4


def test_only_given_targets_are_watched_and_an_unknown_one_is_named() -> None:
    model = built()
    with ActivationPenalty(model, targets={LOGITS: 1.0}) as penalty:
        model(input_ids=ids_of(2), labels=ids_of(2))
        penalty()
    assert set(penalty.observations()) == {LOGITS}
    with ActivationPenalty(model, targets={LOGITS: 1.0, "decoder.nowhere": 2.0}) as penalty:
        model(input_ids=ids_of(2), labels=ids_of(2))
        with pytest.raises(UserError, match=r"decoder\.nowhere"):
            penalty()


# -- the value and the gradient ---------------------------------------------------------------------------------------


class Two(nn.Module):
    """Two linears, the values of which a test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5, bias=False), nn.Linear(5, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def two() -> tuple[Two, Tensor]:
    torch.manual_seed(0)
    return Two(), torch.randn(2, 6, 3)


def excess(x: Tensor, target: float) -> Tensor:
    """That of the smooth maximum of the tokens' largest values."""
    tokens = x.abs().amax(-1).log2() * SHARPNESS * math.log(2)
    return tokens.flatten().logsumexp(0) / (SHARPNESS * math.log(2)) - math.log2(target)


@pytest.mark.parametrize("waits", [False, True])
def test_value_and_gradient_are_those_of_the_formula(waits: bool) -> None:
    model, x = two()
    penalty = ActivationPenalty(model, targets={"first": 0.1, "second": 0.2}, weight=3.0)
    waiting(penalty, waits)
    with penalty:
        model(x)
        total = penalty()
    total.backward()
    found = gradients(model)
    first = model.first(x)
    wanted = 3.0 * (excess(first, 0.1) + excess(model.second(first), 0.2))
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(wanted.item(), rel=1e-5)
    wanted.backward()
    for name, gradient in gradients(model).items():
        assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_of_every_row_is_found_in_every_dtype(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape in ((1, 1), (64, 300), (3, 1 << 16), (9, 1 << 16), (2, (1 << 16) + 3)):
        rows = (torch.randn(shape) * torch.randn(shape).exp()).to(dtype)
        rows[0, shape[1] // 2] = math.inf
        rows[-1, 0] = rows[-1, -1] = -torch.finfo(dtype).max
        found = rows.abs().gather(1, _where_largest(rows)[:, None])[:, 0]
        assert torch.equal(found, rows.abs().amax(1))
        rows[0, -1] = math.nan
        assert int(_where_largest(rows)[0]) == shape[1] - 1
    assert _where_largest(torch.zeros(2, 5, dtype=dtype).neg_()).max() < 5
    for count in (1 << 16, (1 << 16) + 3):
        assert _where_largest(torch.eye(1, count, dtype=dtype)).tolist() == [0]


def test_it_pulls_at_one_element_of_every_token() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    with ActivationPenalty(model, targets={"model": 0.01}, weight=1.0) as penalty:
        model(torch.eye(4)[None])  # y = Wᵀ, a token a column of W
        penalty().backward()
    assert (gradients(model)["weight"] != 0).sum(0).tolist() == [1, 1, 1, 1]


class Scaled(nn.Module):
    """x times a tensor of any values."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class One:
    """A site whose values are all of one size, attached to a penalty of target and weight 1."""

    SITE = "model:mul"

    def __init__(self, **options: Any) -> None:
        self.model = Scaled(torch.ones(2, requires_grad=True))
        given: dict[str, Any] = {"targets": {self.SITE: 1.0}, "weight": 1.0, **options}
        self.penalty = ActivationPenalty(self.model, **given).attach()

    def ahead(self, *sizes: float) -> None:
        for size in sizes:
            with self.penalty.look_ahead():
                self.model(torch.tensor(size))

    def call(self, *sizes: float) -> list[float]:
        """The totals of a call for each size."""
        return [total.item() for total in self.called(*sizes)]

    def called(self, *sizes: float) -> list[Tensor]:
        totals = []
        for size in sizes:
            self.model(torch.tensor(size))
            totals.append(self.penalty())
        return totals

    @property
    def seen(self) -> Any:
        return self.penalty.observations()[self.SITE]


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_inf_pulls_down_and_a_nan_is_counted_and_neither_gives_nan_gradients(
    dtype: torch.dtype, waits: bool
) -> None:
    weight = torch.tensor([[1.0, -torch.inf], [2.0, 3.0]], dtype=dtype, requires_grad=True)
    model = Scaled(weight)
    penalty = ActivationPenalty(model, targets={"model:mul": 1.0}, weight=1.0)
    waiting(penalty, waits)
    with penalty:
        model(torch.ones((), dtype=dtype))
        total = penalty()
        assert bool(total.isfinite())
        (total * 1024).backward()
        assert weight.grad is not None
        assert bool(weight.grad.isfinite().all())
        if dtype == torch.float16:
            assert float(weight.grad[0, 1]) < 0  # to a smaller magnitude: up
        assert penalty.observations()["model:mul"].amax == math.inf
        assert penalty.observations()["model:mul"].excess_bits == math.inf
        weight.grad = None
        with torch.no_grad():
            weight[1, 0] = torch.nan
        model(torch.ones((), dtype=dtype))
        total = penalty()
    assert float(total) == 0
    assert penalty.skipped == 1
    assert penalty.observations()["model:mul"].amax == math.inf


def test_the_penalty_is_fp32_under_autocast_and_beyond_bf16_s_precision() -> None:
    model, x = two()
    with (
        ActivationPenalty(model, targets={"second": 1e-3}, weight=1.0) as penalty,
        torch.autocast("cpu", torch.bfloat16),
    ):
        y = model(x)
        total = penalty()
    assert y.dtype == torch.bfloat16
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(float(excess(y.detach().float(), 1e-3)), rel=1e-6)


def test_inside_the_targets_there_is_no_graph_and_no_change() -> None:
    model, x = two()
    model(x).sum().backward()
    plain = gradients(model)
    with ActivationPenalty(model, weight=1.0) as penalty:
        y = model(x).sum()
        total = penalty()
        assert float(total) == 0
        assert not total.requires_grad
        assert not penalty._terms  # nothing else shows what would be kept until the step
        (y + total).backward()
    assert same(gradients(model), plain)
    assert all(seen.excess_bits < 0 and seen.weight == 1.0 for seen in penalty.observations().values())


def test_a_call_forgets_what_it_saw_and_wants_a_forward_with_gradients() -> None:
    model, x = two()
    with ActivationPenalty(model, targets={"second": 0.01}, weight=1.0) as penalty:
        with pytest.raises(UserError, match="saw no forward"):
            penalty()
        model(100 * x)
        large = penalty()
        with torch.no_grad():
            model(1000 * x)
        with pytest.raises(UserError, match="saw no forward"):
            penalty()
        model(x)
        small = penalty()
    assert large.item() == pytest.approx(small.item() + math.log2(100), rel=1e-4)
    model(x)
    with pytest.raises(UserError, match="attach"):
        penalty()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_site_that_runs_twice_pulls_as_one_that_runs_on_all_rows() -> None:
    model, x = two()
    with ActivationPenalty(model, targets={"second": 0.01}, weight=1.0) as penalty:
        totals = []
        for parts in ([x, 8 * x], [8 * x, x], [torch.cat([x, 8 * x])]):
            for part in parts:
                model(part)
            totals.append(penalty().item())
    assert totals == pytest.approx([totals[2]] * 3, rel=1e-6)


# -- weights ----------------------------------------------------------------------------------------------------------


def test_dual_ascent_adds_the_excess_decays_inside_and_stays_above_zero() -> None:
    one = One(targets={One.SITE: 4.0}, weight=None, dual_step=0.25)
    totals, weights = [], []
    for amax in (16.0, 8.0, 2.0, 0.5, 0.5, 0.5, 16.0, math.inf):
        totals += one.call(amax)
        weights.append(one.seen.weight)
    assert weights == [0.5, 0.75, 0.5, 0.25, 0.0, 0.0, 0.5, 0.5 + 0.25 * 16]  # an inf counts as 16 bits
    # A step's penalty has the weight that the step before left: first none.
    assert totals[:7] == [0.0, 0.5 * 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_a_fixed_weight_stays() -> None:
    one = One(targets={One.SITE: 4.0}, weight=2.0)
    assert one.call(16.0, 16.0, 16.0) == [4.0] * 3 and one.seen.weight == 2.0


def test_the_worst_site_is_the_one_nearest_its_target() -> None:
    model, x = two()
    penalty = ActivationPenalty(model, targets={"first": 1e-3, "second": 1e6})
    with pytest.raises(UserError, match="no complete"):
        penalty.worst()
    with penalty:
        model(x)
        penalty()
    name, seen = penalty.worst()
    assert name == "first"
    assert seen == penalty.observations()["first"]
    assert seen.excess_bits == pytest.approx(math.log2(seen.amax / 1e-3))


def resumed(stop: int | None) -> tuple[list[float], dict[str, Any]]:
    model, x = two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def made() -> ActivationPenalty:
        return ActivationPenalty(model, targets={"first": 0.3, "second": 0.2}, accumulation=2).attach()

    penalty = made()
    totals = []
    for call in range(12):
        if call == stop:
            state = json.loads(json.dumps(penalty.state_dict()))
            penalty.detach()
            penalty = made()
            penalty.load_state_dict(state)
        model((1 + (call ^ 1)) * x)  # of a step the first call is the larger
        total = penalty()
        totals.append(float(total))
        if total.requires_grad:
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
    penalty.detach()
    return totals, penalty.state_dict()


@pytest.mark.parametrize("stop", [4, 5])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(stop: int) -> None:
    assert resumed(stop) == resumed(None)
    assert any(resumed(None)[0])
    with pytest.raises(UserError, match="weights"):
        ActivationPenalty(nn.Linear(1, 1)).load_state_dict({"order": []})


def test_a_state_keeps_how_many_outputs_were_nan() -> None:
    model = Scaled(torch.tensor([1.0, torch.nan], requires_grad=True))
    penalty, other = (ActivationPenalty(model, targets={"model:mul": 1.0}) for _ in range(2))
    with penalty:
        for _ in range(3):
            model(torch.ones(()))
            penalty()
    other.load_state_dict(penalty.state_dict())
    assert other.skipped == penalty.skipped == 3


# -- accumulation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("scales", [(1.0, 0.01, 0.5), (0.01, 1.0, 0.9), (0.9, 1.0, 1.1), (1.0, 1.0, 1.0)])
def test_micro_batches_are_one_large_batch(scales: tuple[float, ...], waits: bool) -> None:
    """Wherever the largest value is, and where every one of them passes the target."""
    model, x = two()
    parts = [scale * x[i % 2 :][:1] for i, scale in enumerate(scales)]
    results = []
    for calls in ([torch.cat(parts)], parts):
        targets = {"first": 0.1, "second": 0.1}
        penalty = ActivationPenalty(model, targets=targets, accumulation=len(calls), dual_step=0.5)
        penalty._weights = {"first": 2.0, "second": 3.0}  # as after steps of raising them
        penalty._waits = lambda x: waits
        with penalty:
            for call in calls if len(calls) > 1 else ():
                with penalty.look_ahead():
                    model(call)
            totals = []
            for call in calls:
                model(call)
                totals.append(penalty() / len(calls))
                (totals[-1] + 0 * sum(p.sum() for p in model.parameters())).backward()
        results.append((gradients(model), penalty.observations(), float(sum(totals))))
    (whole, one, total), (accumulated, several, sum_of_parts) = results
    assert one == several
    assert one["first"].excess_bits > 0
    assert one["first"].weight > 2.0
    assert total == pytest.approx(sum_of_parts, rel=1e-6) and total > 0
    for name in whole:
        assert float(whole[name].abs().max()) > 0
        assert torch.allclose(whole[name], accumulated[name], rtol=1e-6, atol=1e-6 * float(whole[name].abs().max()))


def test_without_a_look_ahead_a_step_is_the_mean_of_its_calls_in_any_order() -> None:
    one = One(accumulation=3)
    assert one.call(4.0, 2.0, 8.0, 0.5) == [2.0, 1.0, 3.0, 0.0]  # the last opens the next step
    assert one.seen.amax == 8.0


def test_a_look_ahead_keeps_no_graph_counts_nothing_and_comes_before_all_calls() -> None:
    one = One(accumulation=2)
    assert one.penalty.pulls and not One(weight=None).penalty.pulls
    with one.penalty.look_ahead():
        assert not one.model(torch.tensor(math.nan)).requires_grad
    assert one.penalty.skipped == 0 and one.penalty.observations() == {}
    with pytest.raises(UserError, match=r"1 of the 2 calls"):
        one.call(4.0)
    one.penalty.drop_step()
    one.ahead(0.4, 16.0)
    with pytest.raises(UserError, match="2 times before"):
        one.ahead(4.0)
    totals = one.called(0.4, 16.0)
    # Each says the step's penalty, and a call far inside has no part in its gradient.
    assert [total.item() for total in totals] == [4.0, 4.0]
    assert not totals[0].requires_grad and totals[1].requires_grad
    assert one.call(4.0) == [2.0]  # the next step is one without


@pytest.mark.parametrize(("low", "counts"), [(0.45, False), (0.55, True)])
def test_a_token_more_than_a_bit_inside_counts_neither_in_a_large_batch_nor_in_a_call(low: float, counts: bool) -> None:
    model, totals = Scaled(torch.ones(2, requires_grad=True)), []
    rows = torch.tensor([[[2.0]], [[low]]])
    for calls in ([rows], list(rows)):
        with ActivationPenalty(model, targets={"model:mul": 1.0}, weight=1.0, accumulation=len(calls)) as penalty:
            for call in calls if len(calls) > 1 else ():
                with penalty.look_ahead():
                    model(call)
            found = []
            for call in calls:
                model(call)
                found.append(float(penalty()))
            totals.append(sum(found) / len(calls))
    assert totals == pytest.approx([math.log2(2.0**4 + counts * low**4) / 4] * 2, rel=1e-6)


class Unwatched(nn.Module):
    """A block that measures its input without gradients before it scales it, as routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factor = nn.Identity(), nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner((5.0 - x) * 1000.0)
        return x * self.factor


def test_a_look_ahead_gives_sites_the_names_that_they_have_with_gradients() -> None:
    """What a model runs without gradients of its own is no site, and does not number those behind it anew."""
    model = Unwatched()
    with ActivationPenalty(model, headroom_bits=15.0, weight=1.0, accumulation=2) as penalty:
        for amax in (0.1, 4.0):
            with penalty.look_ahead():
                model(torch.tensor(amax))
        totals = []
        for amax in (0.1, 4.0):
            model(torch.tensor(amax))
            totals.append(penalty())
    assert {site: seen.amax for site, seen in penalty.observations().items()} == {"model:mul": 12.0}
    assert [float(total) for total in totals] == pytest.approx([math.log2(12.0 * 2**15 / FP16_MAX)] * 2)
    assert not totals[0].requires_grad and totals[1].requires_grad


def test_no_state_is_taken_in_the_middle_of_a_step_that_was_looked_ahead_and_a_loaded_one_forgets_it() -> None:
    one = One(accumulation=2)
    before = one.penalty.state_dict()
    for amax in (4.0, 16.0):
        one.ahead(amax)
        with pytest.raises(UserError, match="between two steps"):
            one.penalty.state_dict()
    one.penalty.load_state_dict(before)
    assert one.call(4.0, 16.0) == [2.0, 4.0] and one.penalty.state_dict()["calls"] == 0


def test_on_a_device_that_waits_a_look_ahead_finds_what_was_far_inside_in_the_step_before() -> None:
    one = One(accumulation=2)
    waiting(one.penalty, True)
    one.ahead(0.1, 0.1)
    one.call(0.1, 0.1)
    one.ahead(4.0, 16.0)
    totals = one.called(4.0, 16.0)
    assert [total.item() for total in totals] == pytest.approx([4.0, 4.0], abs=0.01) and totals[1].requires_grad


# -- how it is run ----------------------------------------------------------------------------------------------------


def step_of(model: Any, penalty: ActivationPenalty) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    # Padded: without masks stock T5's own gradients differ in their last bit under checkpointing.
    with penalty:
        loss = run_batch(model, batches(model.config, None, None)[3], labels=True).loss
        total = penalty()
        (loss + total).backward()
    return float(total), gradients(model)


def over_everywhere(model: Any) -> ActivationPenalty:
    targets = dict.fromkeys(reached(model, ids_of(3)), 0.05)
    return ActivationPenalty(model, targets=targets, weight=0.1)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize("waits", [False, True])
def test_checkpointing_changes_no_bit(waits: bool) -> None:
    results = []
    for checkpointing in (False, True):
        model = built(train=True)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        penalty = over_everywhere(model)
        waiting(penalty, waits)
        results.append((*step_of(model, penalty), penalty.observations()))
    assert results[0][0] == results[1][0] > 0
    assert same(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]


def test_a_device_is_not_waited_for_in_the_forward_and_the_result_is_the_same() -> None:
    class Reads(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += "_local_scalar_dense" in str(func)
            return func(*args, **(kwargs or {}))

    ids = ids_of(3)
    results = []
    reads = []
    for waits in (False, True):
        model = built()
        penalty = over_everywhere(model)
        waiting(penalty, waits)
        with penalty, Reads() as counted:
            loss = model(input_ids=ids, labels=ids).loss
            reads.append(counted.count)
            total = penalty()
            assert counted.count == reads[-1]
            (loss + total).backward()
        results.append((float(total), gradients(model), penalty.observations()))
    with Reads() as counted:
        built()(input_ids=ids, labels=ids)
    assert reads[1] == counted.count < reads[0]
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert results[0][2] == results[1][2]
    for name, gradient in results[0][1].items():
        assert torch.allclose(gradient, results[1][1][name], rtol=1e-4, atol=1e-6)


def test_where_a_device_waits_a_site_far_inside_is_pulled_from_the_next_step_on() -> None:
    one = One(targets={One.SITE: 4.0})
    waiting(one.penalty, True)
    assert one.call(16.0, 1.0, 16.0, 16.0, 3.0, 16.0) == [2.0, 0.0, 0.0, 2.0, 0.0, 2.0]


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
def test_what_hides_the_sites_is_refused_in_a_line() -> None:
    model = built(train=True)
    ids = ids_of(2)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(UserError, match="use_reentrant"), ActivationPenalty(model):
        model(input_ids=ids, labels=ids)
    compiled: Any = torch.compile(built(), backend="eager")
    with pytest.raises(UserError, match="compile"):
        ActivationPenalty(compiled).attach()
    fused = built()
    fused.set_attn_implementation("sdpa")
    with pytest.raises(UserError, match=r"set_attn_implementation\('eager'\)"):
        ActivationPenalty(fused).attach()
    with pytest.raises(UserError, match="set_attn_implementation"):
        ActivationPenalty(fused, targets={SCORES: 1.0}).attach()
    with ActivationPenalty(fused, targets={LOGITS: 1.0}) as penalty:
        fused(input_ids=ids, labels=ids)
        penalty()
    with pytest.raises(UserError, match="attached already"):
        penalty.attach().attach()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "l2"}, "form"),
        ({"headroom_bits": -1.0}, "headroom_bits"),
        ({"dual_step": 0.0}, "dual_step"),
        ({"weight": -1.0}, "weight"),
        ({"accumulation": 0}, "accumulation"),
        ({"targets": {"lm_head": math.inf}}, "lm_head"),
    ],
)
def test_unusable_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        bf16_to_fp16.ActivationPenalty(nn.Linear(1, 1), **options)


# -- two processes ----------------------------------------------------------------------------------------------------


class Both(nn.Module):
    """Sites by choice: each rank runs those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
        for parameter in self.parameters():
            nn.init.eye_(parameter)

    def forward(self, x: Tensor, names: str) -> list[Tensor]:
        return [self.parts[name](x) for name in names]


def on_a_rank(rank: int) -> dict[str, Any]:
    """Train under DDP and FSDP2, and run different sites on each rank; return what was seen."""
    found: dict[str, Any] = {"world": torch.distributed.get_world_size()}
    for kind in ("ddp", "fsdp"):
        found[kind] = trained_on(rank, kind)
    found["watched"] = watched_under_fsdp()
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


def watched_under_fsdp() -> list[str]:
    """The sites of one step with FSDP2's own operations in between."""
    from torch.distributed.fsdp import fully_shard

    model = built(train=False)
    fully_shard(model)
    with ActivationPenalty(model, form="none") as penalty:
        model(input_ids=ids_of(2), labels=ids_of(2))
        penalty()
    return list(penalty.observations())


def trained_on(rank: int | None, kind: str) -> dict[str, Any]:
    """Three steps on a rank's rows, or alone on all of them; the ranks' largest values are not in the same one's."""
    from torch.distributed.fsdp import fully_shard

    model = built(train=False)
    targets = {SCORES: 2.0, LOGITS: 1.0}
    ids = torch.cat([ids_of(2, seed=0), ids_of(2, seed=1)]) if rank is None else ids_of(2, seed=rank)
    local = {site: reached_alone(model, ids)[site] for site in targets}
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
        seen = penalty.observations()
        first = first or {site: seen[site].amax for site in targets}
        weights.append([seen[site].weight for site in targets])
        totals.append(float(total))
    penalty.detach()
    parameters = [full(p) for p in model.parameters()]
    return {
        "local": local,
        "first": first,
        "weights": weights,
        "totals": totals,
        "gradients": gradients,
        "parameters": [float(p.detach().double().sum()) for p in parameters],
    }


def full(parameter: Any) -> Tensor:
    """A whole parameter, also of one that lies in parts on the ranks."""
    if hasattr(parameter, "full_tensor"):
        return parameter.full_tensor()
    return parameter


def reached_alone(model: Any, ids: Tensor) -> dict[str, float]:
    """What one rank's own batch reaches."""
    with SiteObserver(model) as observer:
        model(input_ids=ids, labels=ids)
    return {site.name: site.amax for site in observer.sites()}


@pytest.fixture(scope="module")
def ranks(warm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return two_ranks(warm_python, __file__, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_agree_on_the_largest_values_the_weights_and_the_model(
    ranks: list[dict[str, Any]], kind: str
) -> None:
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


def test_under_fsdp_the_sites_are_those_of_the_model(ranks: list[dict[str, Any]]) -> None:
    with ActivationPenalty(model := built(train=False), form="none") as penalty:
        model(input_ids=ids_of(2), labels=ids_of(2))
        penalty()
    assert ranks[0]["watched"] == list(penalty.observations())


def test_sharded_training_is_ddp_s(ranks: list[dict[str, Any]]) -> None:
    ddp, sharded = ranks[0]["ddp"], ranks[0]["fsdp"]
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
