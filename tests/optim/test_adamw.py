"""What ``AdamW`` promises: torch's mathematics, no stalled update, and the same bits however a step is computed."""

import copy
import io
import math
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bf16_to_fp16.errors import UserError
from bf16_to_fp16.optim import adamw as module
from bf16_to_fp16.optim import rounding
from bf16_to_fp16.optim.adamw import AdamW

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NARROW = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
ROUNDINGS = pytest.mark.parametrize("how", ["stochastic", "nearest"])
SHAPES = [(40, 30), (7,), (), (3, 5, 2), (129, 130), (0, 4), (11,)]
LARGE = (1 << 14) + 1
COMPILER = shutil.which("g++") or shutil.which("clang++")


def parameters(dtype: torch.dtype, shapes: list[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).mul_(0.1).to(dtype)) for shape in shapes]


def give_gradients(params: list[nn.Parameter], step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in params:
        grad = torch.randn(parameter.shape, generator=generator).mul_(1e-2).to(parameter.dtype)
        parameter.grad = grad * scale


def run(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range, scale: float = 1.0) -> None:
    for step in steps:
        give_gradients(params, step, scale)
        optimizer.step()


def everything(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters and all that the optimizer keeps, as bit patterns."""
    state = [optimizer.state[p][name] for p in params for name in sorted(optimizer.state[p])]
    return [t.detach().clone().contiguous().view(-1).view(torch.uint8) for t in [*params, *state]]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def test_fp32_parameters_move_as_under_torchs() -> None:
    ours, theirs = parameters(FP32), parameters(FP32)

    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": params[:2], "lr": 3e-3, "weight_decay": 0.3}, {"params": params[2:], "betas": (0.8, 0.99)}]

    mine = AdamW(groups(ours), lr=1e-3, eps=1e-6, compile=False)
    reference = torch.optim.AdamW(groups(theirs), lr=1e-3, eps=1e-6)
    run(ours, mine, range(20))
    run(theirs, reference, range(20))
    for p, q in zip(ours, theirs, strict=True):
        assert torch.allclose(p, q, rtol=2e-6, atol=2e-8)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            kept, wanted = mine.state[p][name], reference.state[q][name]
            largest = float(wanted.abs().max()) if wanted.numel() else 0.0
            assert torch.allclose(kept, wanted, rtol=2e-6, atol=5e-7 * largest)


@NARROW
@ROUNDINGS
def test_one_step_lands_beside_the_exact_value(dtype: torch.dtype, how: str) -> None:
    params = parameters(dtype, [(5000,)])
    exact = params[0].detach().double().requires_grad_()
    give_gradients(params, 0)
    assert params[0].grad is not None
    exact.grad = params[0].grad.double()
    before = params[0].detach().clone()
    torch.optim.AdamW([exact], lr=1e-3).step()
    optimizer = AdamW(params, lr=1e-3, rounding=how)
    optimizer.step()
    rounded = exact.detach().float()
    moved = params[0].detach()
    if how == "stochastic":  # the same as rounding the exact step with this parameter's bits, save where fp32 differs
        bits = rounding.random_bits(rounding.counters(len(rounded)), rounding.make_key(0, 1, 0))
        expected = rounding.stochastic(rounded, dtype, bits).to(dtype)
    else:
        expected = rounded.to(dtype)
    assert (moved == expected).double().mean() > 0.998
    assert (moved != before).any()


@NARROW
def test_updates_far_below_half_a_gap_add_up_unless_rounded_to_nearest(dtype: torch.dtype) -> None:
    gap = torch.finfo(dtype).eps
    steps, lr = 400, gap / 50  # 8 gaps in all, each update a 25th of half a gap
    ends = {}
    for how in module.ROUNDINGS:
        parameter = nn.Parameter(torch.full((4096,), 1.5, dtype=dtype))
        parameter.grad = torch.full((4096,), -1.0, dtype=dtype)
        optimizer = AdamW([parameter], lr=lr, weight_decay=0, rounding=how)
        for _ in range(steps):
            optimizer.step()
        ends[how] = (parameter.detach().double() - 1.5) / (steps * lr)
    assert (ends["nearest"] == 0).all()
    # Each element takes steps·p(1 − p) gaps² of noise, p = 1/50, and the mean of 4096 a 64th of its deviation.
    deviation = math.sqrt(steps * 0.02 * 0.98) / 8
    assert abs(float(ends["stochastic"].mean()) - 1) < 5 * deviation / 64
    assert 0.9 * deviation < float(ends["stochastic"].std()) < 1.1 * deviation


def test_bf16_moments_decay() -> None:
    parameter = nn.Parameter(torch.zeros(20_000, dtype=BF16))
    optimizer = AdamW([parameter], betas=(0.999, 0.999), moments="bfloat16")
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter]
    start = {name: state[name].clone() for name in ("exp_avg", "exp_avg_sq")}
    parameter.grad = torch.zeros_like(parameter)
    for _ in range(400):
        optimizer.step()
    for name, moment in start.items():
        assert state[name].dtype == BF16
        assert torch.equal((moment.float() * 0.999).to(BF16), moment)  # rounded to nearest it would stay for ever
        assert float(state[name].double().mean()) == pytest.approx(float(moment.double().mean()) * 0.999**400, rel=0.01)


@NARROW
def test_parameters_saturate_and_are_never_inf(dtype: torch.dtype) -> None:
    last = torch.finfo(dtype).max
    for how in module.ROUNDINGS:
        parameter = nn.Parameter(torch.full((100,), last, dtype=dtype))
        parameter.grad = torch.full_like(parameter, -1)
        AdamW([parameter], lr=last / 1000, weight_decay=0, rounding=how).step()
        assert (parameter == last).all()


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@ROUNDINGS
def test_a_gradient_whose_square_is_inf_moves_nothing_as_under_torchs(dtype: torch.dtype, how: str) -> None:
    ours, theirs = (nn.Parameter(torch.ones(40, dtype=dtype)) for _ in range(2))
    mine = AdamW([ours], lr=1e-3, weight_decay=0, rounding=how)
    reference = torch.optim.AdamW([theirs], lr=1e-3, weight_decay=0)
    for gradient in (1e25, 1.0, -1e25):
        for parameter, optimizer in ((ours, mine), (theirs, reference)):
            parameter.grad = torch.full_like(parameter, gradient)
            optimizer.step()
        assert mine.state[ours]["exp_avg_sq"].isinf().all()
        assert torch.equal(ours, theirs) and bool((ours == 1).all())


WAYS = [(BF16, "stochastic", "bfloat16"), (FP16, "nearest", "float32"), (FP32, "stochastic", "bfloat16")]
each_way = pytest.mark.parametrize(("dtype", "how", "moments"), WAYS)


@each_way
def test_chunks_do_not_change_a_bit(
    dtype: torch.dtype, how: str, moments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for chunk in (1 << 16, 1000, 40):
        monkeypatch.setattr(module, "CHUNK", chunk)  # no option cuts a step elsewhere
        params = parameters(dtype)
        optimizer = AdamW(params, rounding=how, moments=moments, compile=False, seed=5)
        run(params, optimizer, range(3))
        results.append(everything(params, optimizer))
    assert all(same(results[0], other) for other in results[1:])


def special(dtype: torch.dtype) -> Tensor:
    """Every value of a 16-bit dtype but NaN, and in fp32 what lies between and beyond them."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(FP16 if dtype == torch.float32 else dtype)
    values = every[~every.isnan()]
    if dtype == torch.float32:
        values = torch.cat([values.float() * (1 + 2.0**-13), torch.randn(1 << 12) * 1e-30])
    return values


def assert_same_numbers(left: list[Tensor], right: list[Tensor]) -> None:
    """Of a NaN the payload may differ."""
    for a, b in zip(left, right, strict=True):
        number = ~a.isnan()
        assert torch.equal(number, ~b.isnan())
        assert torch.equal(a[number], b[number]) and torch.equal(a.signbit()[number], b.signbit()[number])


def steps_of(dtype: torch.dtype, how: str, moments: str, compile: bool, **options: Any) -> list[Tensor]:
    """Return all after three steps of special values and of ordinary ones, with gradients from 0 to very large."""
    torch.manual_seed(0)
    params = [nn.Parameter(special(dtype))]
    params += [nn.Parameter((torch.randn(size) * 1e-4).to(dtype)) for size in (LARGE + 3, 90, 7)]
    options |= {"rounding": how, "moments": moments, "compile": compile, "seed": 3}
    optimizer = AdamW(params, lr=1e-4, weight_decay=0.1, **options)
    for _ in range(3):
        for p in params:
            p.grad = (torch.randn(len(p)) * 1e-3).to(dtype)
            p.grad[: len(p) // 7] = 0
            p.grad[-1] = 6e4 if dtype == FP16 else 1e25  # whose square is inf
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.5), torch.tensor(0.0)  # type: ignore[attr-defined]
        optimizer.step()
    return [*params, *(optimizer.state[p][name] for p in params for name in sorted(optimizer.state[p]))]


COMPILED = [(BF16, "stochastic", "bfloat16"), (FP16, "stochastic", "float32"), (FP16, "nearest", "float32")]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dtype", "how", "moments"), COMPILED)
@pytest.mark.filterwarnings("ignore:.*script_method.*", "ignore:.*mixed in the scheduler.*")
@pytest.mark.skipif(not COMPILER, reason="torch.compile needs a C++ compiler")
def test_the_compiled_step_gives_the_eager_bits(dtype: torch.dtype, how: str, moments: str) -> None:
    from torch._inductor import config

    # Else torch first compiles a program for each set of instructions, to see whether it runs here.
    with config.patch("cpp.vec_isa_ok", True):
        compiled = steps_of(dtype, how, moments, compile=True)
    assert_same_numbers(compiled, steps_of(dtype, how, moments, compile=False))


@pytest.mark.gpu
@ROUNDINGS
@NARROW
def test_a_compiled_step_on_a_gpu_is_the_eager_one_to_a_rounding(dtype: torch.dtype, how: str) -> None:
    results = []
    for compile in (True, False):
        params = [nn.Parameter(p.detach().cuda()) for p in parameters(dtype, [(LARGE,), (1 << 21,), (7,)])]
        optimizer = AdamW(params, rounding=how, compile=compile)
        for p in params:
            p.grad = torch.full_like(p, 1e-2)
        optimizer.step()
        results.append(params)
    for left, right in zip(*results, strict=True):
        assert (left == right).double().mean() > 0.999


def test_by_default_a_step_is_compiled_where_that_is_earned(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[Any] = []

    def counted(*kind: Any) -> Any:
        kinds.append(kind)
        return module._update

    monkeypatch.setattr(module, "_compiled", counted)
    cases = ((None, 1 << 24, False), (None, LARGE, True), (False, LARGE, False), (True, 1 << 24, True))
    for compile, threshold, expected in cases:
        monkeypatch.setattr(module, "COMPILED_FROM", threshold)
        kinds.clear()
        params = parameters(FP16, [(LARGE,)])
        before = params[0].detach().clone()
        run(params, AdamW(params, compile=compile), range(1))
        assert bool(kinds) is expected and not torch.equal(params[0], before)


@ROUNDINGS
def test_a_parameter_that_is_not_contiguous_moves_as_one_that_is(how: str) -> None:
    results = []
    for strided in (True, False):
        torch.manual_seed(0)
        values = torch.randn(6, 8).to(BF16)
        parameter = nn.Parameter(values.t().contiguous().t() if strided else values.clone())
        assert parameter.is_contiguous() != strided
        optimizer = AdamW([parameter], lr=0.1, rounding=how, moments="bfloat16")
        run([parameter], optimizer, range(3))
        assert not torch.equal(parameter, values)
        results.append(everything([parameter], optimizer))
    assert same(*results)


@each_way
def test_a_resumed_run_equals_an_uninterrupted_one(dtype: torch.dtype, how: str, moments: str) -> None:
    params = parameters(dtype)
    optimizer = AdamW(params, rounding=how, moments=moments, seed=3)
    run(params, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"params": params, "optimizer": optimizer.state_dict()}, file)
    run(params, optimizer, range(3, 6))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = [nn.Parameter(p.detach().clone()) for p in saved["params"]]
    resumed = AdamW(again, moments=moments)  # rounding and seed are in the state
    resumed.load_state_dict(saved["optimizer"])
    run(again, resumed, range(3, 6))
    assert same(everything(params, optimizer), everything(again, resumed))


def test_a_loaded_state_is_a_copy_that_does_not_say_how_to_compute_and_other_seeds_differ() -> None:
    params = parameters(BF16)
    optimizer = AdamW(params)
    run(params, optimizer, range(2))
    state = optimizer.state_dict()
    twin = copy.deepcopy(params)
    other = AdamW(twin)
    other.load_state_dict(state)
    kept = everything(params, optimizer)
    run(twin, other, range(2, 4))
    assert same(kept, everything(params, optimizer))
    third = copy.deepcopy(params)
    unlike = AdamW(third)
    unlike.load_state_dict(state)
    unlike.param_groups[0]["seed"] = 1
    run(third, unlike, range(2, 4))
    assert not same(everything(twin, other), everything(third, unlike))
    unlike.load_state_dict(AdamW(third, compile=True, rounding="nearest").state_dict())
    assert (unlike.param_groups[0]["compile"], unlike.param_groups[0]["rounding"]) == (None, "nearest")


def test_the_state_of_torchs_adamw_loads_in_full_precision() -> None:
    params = parameters(BF16)
    reference = torch.optim.AdamW([p.detach().float().requires_grad_() for p in params], lr=0.5)
    for p in reference.param_groups[0]["params"]:
        p.grad = torch.full_like(p, 1 / 3)
    reference.step()
    optimizer = AdamW(params, rounding="nearest", seed=4)
    optimizer.load_state_dict(reference.state_dict())
    group = optimizer.param_groups[0]
    assert (group["lr"], group["rounding"], group["seed"], group["moments"]) == (0.5, "nearest", 4, "float32")
    for p, q in zip(params, reference.param_groups[0]["params"], strict=True):
        assert optimizer.state[p]["exp_avg"].dtype == FP32
        assert torch.equal(optimizer.state[p]["exp_avg"], reference.state[q]["exp_avg"])
    run(params, optimizer, range(1))


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_gradscaler_divides_its_scale_out_and_skips_a_step_with_inf() -> None:
    params, plain = parameters(FP16, [(20, 30), (7,)]), parameters(FP16, [(20, 30), (7,)])
    optimizer, reference = AdamW(params), AdamW(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def scaled_step(factor: float) -> None:
        give_gradients(params, 0)
        grads = [p.grad for p in params if p.grad is not None]
        loss = sum(((p * g).float().sum() for p, g in zip(params, grads, strict=True)), torch.zeros(()))
        optimizer.zero_grad()
        scaler.scale(loss * factor).backward()
        scaler.step(optimizer)
        scaler.update()

    scaled_step(1.0)
    run(plain, reference, range(1))
    assert same(everything(params, optimizer), everything(plain, reference))

    before = everything(params, optimizer)
    scaled_step(1e9)
    assert scaler.get_scale() == 128.0
    assert same(before, everything(params, optimizer))

    scaled_step(1.0)
    run(plain, reference, range(1))
    assert same(everything(params, optimizer), everything(plain, reference))


def test_a_closure_is_called_with_gradients_and_its_loss_returned() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=BF16))
    optimizer = AdamW([parameter], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = parameter.float().square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert (parameter < 1).all()


def test_groups_have_options_of_their_own_and_can_be_added() -> None:
    first, second, frozen = parameters(BF16, [(300,), (300,), (300,)])
    optimizer = AdamW([{"params": [first], "lr": torch.tensor(0.1)}], lr=1e-3, rounding="nearest")
    optimizer.add_param_group({"params": [second, frozen], "rounding": "stochastic", "moments": "bfloat16"})
    kept = frozen.detach().clone()
    give_gradients([first, second], 0)
    before = first.detach().clone()
    optimizer.step()
    assert float((first.detach() - before).abs().max()) == pytest.approx(0.1, rel=0.02)
    assert optimizer.state[second]["exp_avg"].dtype == BF16
    assert torch.equal(kept, frozen) and frozen not in optimizer.state


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0; give a finite number, at least 0"),
        ({"eps": math.inf}, "eps is inf"),
        ({"betas": (0.9, 1.0)}, "a beta is 1.0; give a finite number, at least 0 and below 1"),
        ({"betas": 0.9}, "give two numbers"),
        ({"weight_decay": "much"}, "weight_decay is 'much'"),
        ({"rounding": "up"}, "rounding is 'up'; choose from 'stochastic', 'nearest'"),
        ({"moments": "2bit"}, "moments is '2bit'; choose from 'float32', 'bfloat16'"),
        ({"seed": -1}, "seed is -1; give an integer"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        AdamW(parameters(BF16, [(3,)]), **options)
    assert "\n" not in str(caught.value)


def test_bad_parameters_gradients_states_and_scales_are_refused() -> None:
    with pytest.raises(UserError, match=r"float64.*give bf16, fp16 or fp32"):
        AdamW([nn.Parameter(torch.ones(2, dtype=torch.float64))])
    with pytest.raises(UserError, match="empty parameter list"):
        AdamW([])
    optimizer = AdamW(parameters(BF16, [(3,)]))
    with pytest.raises(UserError, match="seed"):
        optimizer.add_param_group({"params": parameters(BF16, [(3,)]), "seed": 0.5})
    assert len(optimizer.param_groups) == 1
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UserError, match="sparse=False"):
        AdamW(embedding.parameters()).step()
    run(optimizer.param_groups[0]["params"], optimizer, range(1))
    with pytest.raises(UserError, match=r"shape \(3,\), here it has \(4,\)"):
        AdamW(parameters(BF16, [(4,)])).load_state_dict(optimizer.state_dict())
    optimizer.grad_scale = torch.tensor(0.0)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="loss scale is 0"):
        optimizer.step()


def test_a_compiler_that_fails_is_an_error_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        def update(*_: Any) -> None:
            raise RuntimeError("no compiler\nmore of it")

        return update

    monkeypatch.setattr(torch, "compile", fails)
    monkeypatch.setattr(module, "_compiled", module._compiled.__wrapped__)
    monkeypatch.setattr(module, "COMPILED_FROM", 1)
    params = parameters(BF16, [(3,)])
    with pytest.raises(UserError, match=r"fails here \(no compiler\); leave compile at None"):
        run(params, AdamW(params, compile=True), range(1))
    before = params[0].detach().clone()
    run(params, AdamW(params), range(1))
    assert not torch.equal(params[0], before)
