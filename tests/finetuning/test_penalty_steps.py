"""The activation penalty of a step in several passes, on a device that is waited for or not, checkpointed or not."""

import math
from typing import Any

import pytest
import torch
from support.penalised import One, Scaled, built, gradients, ids_of, reached, same, waiting
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bf16_to_fp16.finetuning.penalty import ActivationPenalty
from bf16_to_fp16.run.batch import run_batch
from bf16_to_fp16.run.probe import batches


def test_a_step_is_the_mean_of_its_calls_in_any_order() -> None:
    one = One(accumulation=3)
    assert one.call(4.0, 2.0, 8.0, 0.5) == [2.0, 1.0, 3.0, 0.0]  # the last opens the next step
    assert one.seen.amax == 8.0


@pytest.mark.parametrize(("low", "counts"), [(0.45, False), (0.55, True)])
def test_a_token_more_than_a_bit_inside_does_not_count(low: float, counts: bool) -> None:
    model = Scaled(torch.ones(2, requires_grad=True))
    with ActivationPenalty(model, targets={"model:mul": 1.0}, weight=1.0) as penalty:
        model(torch.tensor([[[2.0]], [[low]]]))
        assert float(penalty()) == pytest.approx(math.log2(2.0**4 + counts * low**4) / 4, rel=1e-6)


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
