"""Precision on a CPU: loss scales, clipping, relative learning rates, and the gradient of a divergence."""

import math
from pathlib import Path

import pytest
import torch
import transformers
from support.learner import Fix, Make, amp, losses_of, tiny_model

from bf16_to_fp16.finetuning.distillation import hidden_error, kl_divergence
from bf16_to_fp16.finetuning.mixed_precision import LossScale, each_norm
from bf16_to_fp16.finetuning.recipe import Schedule
from bf16_to_fp16.finetuning.trainer import learning_rate


def test_learning_rate_rises_linearly_in_few_steps_of_a_short_run_and_then_falls_as_a_cosine() -> None:
    assert [Schedule(steps=steps).warmup_steps for steps in (1000, 30, 1)] == [50, 3, 1]
    schedule = Schedule(steps=150, learning_rate=2.0)
    assert [learning_rate(schedule, step) for step in (0, 24, 49, 50)] == [0.04, 1.0, 2.0, 2.0]
    assert learning_rate(schedule, 100) == pytest.approx(1.0)
    assert learning_rate(schedule, 75) == pytest.approx(1 + math.cos(math.pi / 4))


def test_loss_scale_halves_at_an_overflow_and_doubles_after_a_calm_window(fix: Fix) -> None:
    fix("mixed_precision", CALM_STEPS=3)
    scale = LossScale(8.0)
    seen = []
    for overflowed in (True, True, False, False, False, False, False, True, False):
        scale.update(overflowed=overflowed)
        seen.append(scale.scale)
    assert seen == [4, 2, 2, 2, 4, 4, 4, 2, 2]
    highest = LossScale(2.0**24, calm=2)
    highest.update(overflowed=False)
    assert highest.scale == 2.0**24


def test_gradients_are_unscaled_and_clipped_and_an_overflow_leaves_them(fix: Fix) -> None:
    mixed_precision = amp("fp16", 1024.0)
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0]) * 1024
    assert mixed_precision.finish([weight]) == pytest.approx(5.0)
    assert torch.allclose(weight.grad, torch.tensor([0.6, 0.8]))
    weight.grad = torch.tensor([3.0, 4.0]) * 1024
    fix("mixed_precision", CLIP_NORM=100.0)
    assert mixed_precision.finish([weight]) == pytest.approx(5.0)
    assert torch.equal(weight.grad, torch.tensor([3.0, 4.0]))
    for bad in (math.inf, math.nan):
        weight.grad = torch.tensor([bad, 1.0])
        before = mixed_precision.scale
        assert not mixed_precision.finish([weight]) < math.inf
        assert mixed_precision.scale == before / 2 and weight.grad[1] == 1.0
    assert len(each_norm([])) == 0


def test_amp_on_a_cpu_really_computes_in_fp16_forward_and_backward() -> None:
    """Libraries quietly train in fp32 here: a product past 65504 shows which it is."""
    linear = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(linear.weight, 300.0)
    for precision, finite in (("fp16", False), ("bf16", True), ("fp32", True)):
        mixed_precision = amp(precision, 4.0)
        with mixed_precision.whole_step(), mixed_precision.forward():
            out = linear(torch.full((1, 2), 200.0))
        assert bool(torch.isfinite(out).all()) is finite
        assert mixed_precision.scale == (4.0 if precision == "fp16" else 1.0)
    mixed_precision = amp("fp16")
    x = torch.full((1, 2), 1.0, requires_grad=True)
    with mixed_precision.whole_step():
        with mixed_precision.forward():
            out = linear(x)
        (out.float() * 400).sum().backward()
    assert x.grad is not None and not bool(torch.isfinite(x.grad).any())  # 300 * 400 in fp16
    assert linear.weight.dtype == torch.float32 and linear.weight.grad is not None
    assert linear.weight.grad.dtype == torch.float32


def test_the_cube_of_a_gate_has_a_gradient_under_fp16_as_on_cuda() -> None:
    """CUDA's autocast takes powers in fp32; a CPU's does not, and 3x² is inf beyond 147.8."""
    x = torch.tensor([150.0, 1.0], requires_grad=True)
    mixed_precision = amp("fp16")
    with mixed_precision.whole_step():
        with mixed_precision.forward():
            y = transformers.activations.NewGELUActivation()(x.half())
        y.float().sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, torch.tensor([1.0, 1.083]), atol=2e-3)


@pytest.mark.parametrize("clip_norm", [1e9, 0.02])
def test_a_relative_learning_rate_goes_with_each_tensor(make: Make, fix: Fix, tmp_path: Path, clip_norm: float) -> None:
    """Multiplying a weight by a power of two multiplies its steps by the same, clipping and epsilon included."""
    fix("mixed_precision", CLIP_NORM=clip_norm)
    fix("optimizers", EPSILON=1e-3)
    moved, losses = [], []
    for arm, factor in (("plain", 1.0), ("scaled", 2.0**-6)):
        model = tiny_model(dropout=0.0)
        for block in model.encoder.block:
            # Values are multiplied and outputs divided: the same function.
            block.layer[0].SelfAttention.v.weight.data.mul_(factor)
            block.layer[0].SelfAttention.o.weight.data.div_(factor)
        before = model.encoder.block[0].layer[0].SelfAttention.v.weight.detach().clone()
        schedule = {"steps": 3, "learning_rate": 0.01}
        trainer = make(arm, model=model, precision="fp32", optimizer={"relative": True}, schedule=schedule)
        trainer.train()
        moved.append((trainer.weights()["encoder.block.0.layer.0.SelfAttention.v.weight"] - before) / factor)
        losses.append(losses_of(tmp_path / arm))
    assert torch.allclose(moved[0], moved[1], rtol=1e-2, atol=1e-6) and losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_gradient_of_a_divergence_is_none_where_both_agree_and_an_error_is_relative() -> None:
    teacher = torch.randn(4, 9, dtype=torch.float64).float()
    student = teacher.clone().requires_grad_()
    kl_divergence(student, teacher).sum().backward()
    assert student.grad is not None and float(student.grad.abs().max()) < 1e-5
    assert float(hidden_error(2 * teacher, teacher).sum()) == pytest.approx(4.0)
