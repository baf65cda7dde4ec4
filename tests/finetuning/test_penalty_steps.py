"""The activation penalty of a step in several passes: looked ahead or not, waited for or not, checkpointed or not."""

import math
from typing import Any

import pytest
import torch
from support.penalised import One, Scaled, built, gradients, ids_of, reached, same, two, waiting
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bf16_to_fp16.errors import UserError
from bf16_to_fp16.finetuning.penalty import ActivationPenalty
from bf16_to_fp16.numerics import FP16_MAX
from bf16_to_fp16.run.batch import run_batch
from bf16_to_fp16.run.probe import batches


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
