"""The penalty brings what is too large under its target, costs nothing elsewhere, and is the same however it is run."""

import copy
import json
import math
from typing import Any

import pytest
import torch
from support import masks
from support.penalised import LOGITS, SCORES, One, Scaled, built, gradients, ids_of, reached, two, waiting
from support.steps import same
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import bf16_to_fp16
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.finetuning.penalty import SHARPNESS, ActivationPenalty
from bf16_to_fp16.measuring.batch import run_batch
from bf16_to_fp16.measuring.observer import SiteObserver
from bf16_to_fp16.measuring.probe import batches
from bf16_to_fp16.numerics import FP16_MAX, GELU_CUBE_BACKWARD_LIMIT

pytestmark = pytest.mark.usefixtures("whole_probe")

GATE = "decoder.block.0.layer.2.DenseReluDense.act:cubed"


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


def limits(kind: str, train: bool) -> tuple[dict[str, float], dict[str, float]]:
    model = built(kind, train)
    batch = batches(model.config, None, None)[3]
    with ActivationPenalty(model, weight=0.0, headroom_bits=0.0, train_mode=True) as penalty:
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
        with ActivationPenalty(model, weight=0.0, train_mode=train_mode, headroom_bits=2.0) as penalty:
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


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_inf_pulls_a_nan_is_counted_and_no_gradient_is_nan(dtype: torch.dtype, waits: bool) -> None:
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
    resumed = ActivationPenalty(model)
    resumed.load_state_dict(penalty.state_dict())
    assert penalty.skipped == resumed.skipped == 1
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


def test_dual_ascent_adds_the_excess_decays_inside_and_stays_above_zero() -> None:
    one = One(targets={One.SITE: 4.0}, weight=None, dual_step=0.25)
    totals, weights = [], []
    for amax in (16.0, 8.0, 2.0, 0.5, 0.5, 0.5, 16.0, math.inf):
        totals += one.call(amax)
        weights.append(one.seen.weight)
    assert weights == [0.5, 0.75, 0.5, 0.25, 0.0, 0.0, 0.5, 0.5 + 0.25 * 16]  # an inf counts as 16 bits
    # A step's penalty has the weight that the step before left: first none.
    assert totals[:7] == [0.0, 0.5 * 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    fixed = One(targets={One.SITE: 4.0}, weight=2.0)
    assert fixed.call(16.0, 16.0, 16.0) == [4.0] * 3 and fixed.seen.weight == 2.0


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


def test_fused_attention_and_a_second_attachment_are_refused_in_a_line() -> None:
    fused, ids = built(), ids_of(2)
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


# ---- a step in several passes, on a device that is waited for or not -----------------------------------------------


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


def over_everywhere(model: Any) -> ActivationPenalty:
    targets = dict.fromkeys(reached(model, ids_of(3)), 0.05)
    return ActivationPenalty(model, targets=targets, weight=0.1)


def test_a_device_is_not_waited_for_in_the_forward_and_the_result_is_the_same() -> None:
    class Reads(TorchDispatchMode):
        count = 0

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
