"""The observer sees every operation, tells design from overflow, and leaves no trace."""

from contextlib import nullcontext
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from bf16_to_fp16.numerics import GELU_CUBE_BACKWARD_LIMIT
from bf16_to_fp16.observe import CUBE_REASON, MASK_REASON, FastProducts, Site, SiteObserver, observe_ranges
from bf16_to_fp16.probe import Batch, batches, run


def model_of(kind: str, attention: str = "eager") -> Any:
    torch.manual_seed(0)
    model = tiny.KINDS[kind]().eval()
    model.set_attn_implementation(attention)
    return model


def padded(model: Any) -> Batch:
    return batches(model.config, None, None)[3]


def watch(model: Any, batch: Batch) -> dict[str, Site]:
    with torch.no_grad(), SiteObserver(model) as observer:
        run(model, batch)
    return {site.name: site for site in observer.sites()}


def watch_module(module: nn.Module, x: Tensor) -> dict[str, Site]:
    with SiteObserver(module) as observer:
        module(x)
    return {site.name: site for site in observer.sites()}


def total(sites: dict[str, Site], what: str) -> int:
    return sum(getattr(site, what) for site in sites.values())


def plant_overflow(model: Any) -> None:
    """Let encoder block 1's ``wo`` pass 65504 for some tokens."""
    with torch.no_grad():
        model.encoder.block[1].layer[1].DenseReluDense.wo.weight[:2] *= 1e5


class Counter(TorchDispatchMode):
    """Floating outputs that share no memory with an input, counted without any of the observer's knowledge."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

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
            run(model, padded(model))
        with SiteObserver(model, fast_products=False) as observer:
            run(model, padded(model))
    assert observer.outputs == counter.count > 100


@pytest.mark.parametrize("kind", ["gated", "pegasus"])
def test_observing_changes_no_fp32_logit(kind: str) -> None:
    model = model_of(kind)
    with torch.no_grad():
        plain = run(model, padded(model)).logits
        with SiteObserver(model):
            assert torch.equal(run(model, padded(model)).logits, plain)


def test_an_overflow_that_the_clamp_hides_is_named() -> None:
    model = model_of("t5").half()
    plant_overflow(model)
    with torch.no_grad(), SiteObserver(model) as observer:
        logits = run(model, padded(model)).logits
    assert bool(logits.isfinite().all())
    broken = [site for site in observer.sites() if site.nonfinite]
    first = min(broken, key=lambda site: site.order)
    assert first.name == "encoder.block.1.layer.1.DenseReluDense.wo"
    sites = {site.name: site for site in observer.sites()}
    assert sites["encoder.block.1.layer.1:add"].nonfinite
    clamped = sites["encoder.block.1:clamp#2"]
    assert clamped.nonfinite == 0
    assert clamped.saturated >= sites["encoder.block.1.layer.1:add"].nonfinite


@pytest.mark.parametrize("kind", ["t5", "umt5", "pegasus"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_masks_are_benign_and_do_not_enter_amax(kind: str, attention: str, dtype: torch.dtype) -> None:
    model = model_of(kind, attention).to(dtype)
    sites = watch(model, padded(model))
    assert total(sites, "nonfinite") == total(sites, "saturated") == 0
    masked = [site for site in sites.values() if site.reason == MASK_REASON]
    assert (kind == "pegasus" and attention == "sdpa") or masked
    assert all(site.benign and site.amax < 1000 for site in masked)


def test_a_masked_score_that_overflows_is_benign_and_an_unmasked_one_is_not() -> None:
    model = model_of("t5").half()
    bias = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias
    with torch.no_grad():
        bias.weight.fill_(-30000.0)  # plus the mask's -65504: -inf
    site = watch(model, padded(model))["encoder.block.0.layer.0.SelfAttention:add#2"]
    assert site.nonfinite == site.saturated == 0
    assert site.benign > 0
    assert 29000 < site.amax < 31000
    with torch.no_grad():
        bias.weight.fill_(65504.0)
        model.encoder.block[0].layer[0].SelfAttention.q.weight.mul_(1000)
    site = watch(model, padded(model))["encoder.block.0.layer.0.SelfAttention:add"]
    assert site.nonfinite + site.saturated > 0


class Attend(nn.Module):
    """Scores, a mask that hides every key of the first row, softmax."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(4, 4, dtype=x.dtype).masked_fill(torch.arange(4)[:, None] == 0, -torch.inf)
        return (x @ x.T + mask).softmax(-1)


def test_nan_from_an_entirely_masked_row_counts() -> None:
    sites = watch_module(Attend(), torch.ones(4, 4, dtype=torch.float16))
    assert sites["model:add"].nonfinite == 0
    assert sites["model:add"].benign == 4
    assert sites["model:softmax"].nonfinite == 4


class Rearranged(nn.Module):
    """A mask chosen by ``where``, seen through views and copied."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.where(torch.eye(4) > 0, torch.tensor(-torch.inf, dtype=x.dtype), x)
        return chosen[None].expand(2, 4, 4).transpose(1, 2)[:, 1:].clone()


def test_a_mask_stays_one_through_views() -> None:
    site = watch_module(Rearranged(), torch.full((4, 4), 7.0, dtype=torch.float16))["model:clone"]
    assert site.nonfinite == 0
    assert site.benign == 6
    assert site.amax == 7.0


class AddMask(nn.Module):
    """An additive mask over the first column."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.zeros(4, 4, dtype=x.dtype).masked_fill(torch.arange(4) == 0, -65504.0)


def test_an_infinity_that_a_mask_cannot_hide_counts() -> None:
    x = torch.zeros(4, 4, dtype=torch.float16)
    x[2, 0] = torch.inf
    site = watch_module(AddMask(), x)["model:add"]
    assert site.nonfinite == 1
    assert site.benign == 3


class Overwrite(nn.Module):
    """An activation written into a view of a constant."""

    def forward(self, x: Tensor) -> Tensor:
        buffer = torch.zeros(4, 4, dtype=x.dtype)
        buffer[:, 1:3] = x[:, :2] * 40000
        return buffer * 2


def test_a_constant_that_an_activation_was_written_into_is_one_no_longer() -> None:
    sites = watch_module(Overwrite(), torch.ones(4, 4, dtype=torch.float16))
    assert sites["model:mul#2"].nonfinite == 8


class Cube(nn.Module):
    """A cube that no tanh follows."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.pow(x, 3.0) * 0.5


def test_a_cube_is_benign_only_on_its_way_to_a_tanh() -> None:
    x = torch.full((8,), 60.0, dtype=torch.float16)
    alone = watch_module(Cube(), x)
    assert alone["model:pow"].nonfinite == alone["model:mul"].nonfinite == 8
    from transformers.activations import NewGELUActivation

    gelu = watch_module(NewGELUActivation(), x)
    assert total(gelu, "nonfinite") == 0
    assert gelu["model:pow"].benign == gelu["model:mul#2"].benign == gelu["model:add"].benign == 8
    assert gelu["model:pow"].reason == CUBE_REASON
    assert gelu["model:tanh"].reason is None
    assert gelu["model:mul#4"].amax == 60.0


def test_nan_inside_gelu_counts() -> None:
    from transformers.activations import NewGELUActivation

    sites = watch_module(NewGELUActivation(), torch.full((8,), torch.nan, dtype=torch.float16))
    assert sites["model:pow"].nonfinite == 8


@pytest.mark.parametrize(("x", "breaks"), [(100.0, False), (160.0, True)])
def test_the_cube_breaks_the_backward_past_its_own_limit(x: float, breaks: bool) -> None:
    from transformers.activations import NewGELUActivation

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
    bounds = [site for site in watch(model, padded(model)).values() if site.name.startswith("encoder.block.0:constant")]
    assert bounds
    assert all(site.limit is None and site.nonfinite == site.saturated == 0 for site in bounds)


@pytest.mark.parametrize("kind", ["gated", "pegasus"])
def test_eager_and_sdpa_share_the_names_of_what_both_run(kind: str) -> None:
    names = {}
    for attention in ("eager", "sdpa"):
        model = model_of(kind, attention)
        names[attention] = set(watch(model, padded(model)))
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    contexts = {name for name in names["eager"] if name.endswith(":context")}
    assert linear | contexts <= names["eager"] & names["sdpa"]
    assert len(contexts) == 7  # 3 encoder layers, twice 2 in the decoder
    only = {name.rpartition(":")[2].partition("#")[0] for name in names["eager"] - names["sdpa"]}
    assert "scores" in only
    assert only <= {
        "scores",
        "add",
        "mul",
        "softmax",
        "clone",
        "constant zeros",
        "constant where",
        "constant scalar_tensor",
    }


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
    """Fails in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        raise RuntimeError("in the middle")


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


def test_a_caught_exception_leaves_the_names_right() -> None:
    class Recovers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.failing = Raises()

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.failing(x)
            except RuntimeError:
                return x + 1

    assert "model:add" in watch_module(Recovers(), torch.ones(1, 2))


def test_generation_with_cache_and_beams_is_seen_and_its_own_bookkeeping_is_not() -> None:
    model = model_of("t5").half()
    generation = batches(model.config, None, None)[-1]
    assert generation.generate
    sites = watch(model, generation)
    assert sites["lm_head"].calls == 8
    assert sites["encoder.block.0.layer.0.SelfAttention.q"].calls == 1
    assert total(sites, "nonfinite") == 0


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """Distance of fp16 values in representable numbers."""
    bits = [x.view(torch.int16).int() for x in (a, b)]
    ordered = [torch.where(x < 0, -(x & 0x7FFF), x) for x in bits]
    return (ordered[0] - ordered[1]).abs()


class Products(nn.Module):
    """The three matrix products a T5 or Pegasus forward consists of, in its layouts."""

    def forward(self, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = x.view(4, -1, x.shape[-1])
        return (
            nn.functional.linear(x, w),
            nn.functional.linear(x, w, b),
            torch.matmul(heads, heads.transpose(1, 2)),
        )


def native_and_fast(x: Tensor, w: Tensor, b: Tensor) -> list[tuple[Tensor, Tensor]]:
    module = Products()
    native = module(x, w, b)
    with SiteObserver(module):
        fast = module(x, w, b)
    return list(zip(native, fast, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fast_products_equal_the_native_ones_where_the_sum_is_exact(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w, b = (torch.randint(-8, 9, shape).to(dtype) for shape in ((64, 256), (48, 256), (48,)))
    for native, fast in native_and_fast(x, w, b):
        assert torch.equal(native, fast)


def test_fast_products_equal_the_native_ones_where_they_overflow() -> None:
    x, w = torch.full((8, 64), 300.0).half(), torch.full((4, 64), 300.0).half()
    w[2:] *= -1
    for native, fast in native_and_fast(x, w, torch.ones(4).half()):
        assert bool(native.isinf().all())
        assert torch.equal(native, fast)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fast_products_are_fp32_products_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(64, 512).to(dtype), torch.randn(300, 512).to(dtype), torch.randn(300).to(dtype)
    in_fp32 = Products()(x.float(), w.float(), b.float())
    for (_, fast), expected in zip(native_and_fast(x, w, b), in_fp32, strict=True):
        assert torch.equal(fast, expected.to(dtype))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_fast_products_differ_from_native_ones_only_by_the_order_of_the_sum(scale: float) -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(64, 512) * scale, torch.randn(300, 512), torch.randn(300)
    for native, fast in native_and_fast(x.half(), w.half(), b.half()):
        differing = native != fast
        assert float(differing.float().mean()) < 0.01
        # Where terms cancel, the fp32 sums differ by up to 512 · 2⁻²⁴ of the terms, whatever fp16's grid there.
        near = (native.float() - fast.float()).abs() <= 2**-15 * native.float().abs().max()
        assert bool((near | (ulps(native, fast) <= 1)).all())


def test_native_products_run_where_fast_ones_are_switched_off() -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(512, 512).half(), torch.randn(64, 512).half()
    with torch.no_grad(), SiteObserver(module, fast_products=False):
        observed = module(x)
    assert torch.equal(observed, module(x))


class Kernels(TorchDispatchMode):
    """Dtypes of the operands of the matrix products that really run: entered before another mode, it is below it."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket._qualified_op_name.split("::")[1] in ("mm", "bmm", "addmm", "baddbmm"):
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def forward_and_gradients(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    operands = [t.detach().clone().requires_grad_() for t in (x, w, b)]
    out = Products()(*operands)
    sum((y * y.detach().sign()).sum() for y in out).backward()
    return [*out, *(t.grad for t in operands if t.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fast_products_run_in_fp32_forward_and_backward_and_equal_native_ones(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # Sums of small integers: exact in fp32, so that any order gives the same.
    x, w, b = (torch.randint(-2, 3, shape).to(dtype) for shape in ((64, 32), (48, 32), (48,)))
    with Kernels() as kernels:
        native = forward_and_gradients(x, w, b)
    assert set(kernels.dtypes) == {dtype}
    with Kernels() as kernels, FastProducts():
        fast = forward_and_gradients(x, w, b)
    assert set(kernels.dtypes) == {torch.float32}
    assert len(kernels.dtypes) >= 3 * 3
    assert len(fast) == 6
    for a, c in zip(native, fast, strict=True):
        assert a.dtype == c.dtype == dtype
        assert torch.equal(a, c)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fast_products_in_autocast_training_stay_within_a_rounding_of_native_ones(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48))
    x = torch.randn(32, 64)
    results = []
    for fast in (False, True):
        with FastProducts() if fast else nullcontext(), torch.autocast("cpu", dtype):
            y = model(x)
            y.float().square().mean().backward()
        assert y.dtype == dtype
        results.append([y, *(p.grad for p in model.parameters())])
        model.zero_grad()
    for native, fast in zip(*results, strict=True):
        assert native is not None
        assert fast is not None
        assert float((native.float() - fast.float()).abs().max()) <= 2**-7 * float(native.float().abs().max())


def test_fast_products_leave_fp32_and_products_into_given_memory_alone() -> None:
    x = torch.randn(8, 8)
    out = torch.empty(8, 8, dtype=torch.float16)
    with FastProducts():
        assert torch.equal(x @ x, torch.mm(x, x))
        torch.mm(x.half(), x.half(), out=out)
        with SiteObserver(nn.Identity()):
            torch.mm(x.half(), x.half(), out=out)
    assert float((out.float() - x @ x).abs().max()) < 0.1
    with FastProducts():
        exact = x.half() @ x.half()
    assert torch.equal(exact, (x.half().float() @ x.half().float()).half())


def test_ranges_are_those_of_the_tensors_and_padding_counts() -> None:
    model = model_of("gated")
    batch = padded(model)
    kept: dict[str, tuple[Tensor, Tensor]] = {}
    paths = ("encoder.block.1.layer.1.DenseReluDense.wo", "encoder.block.1.layer.1.layer_norm")
    handles = [
        model.get_submodule(path).register_forward_hook(
            lambda module, args, output, path=path: kept.__setitem__(path, (args[0], output))
        )
        for path in paths
    ]
    with torch.no_grad():
        run(model, batch)
    for handle in handles:
        handle.remove()
    ranges = observe_ranges(model, [batch])
    for path in paths:
        for seen, tensor in zip((ranges[path].input, ranges[path].output), kept[path], strict=True):
            flat = tensor.flatten(0, 1)
            assert seen.rows == len(flat) == batch.input_ids.numel()
            assert torch.equal(seen.amax, flat.abs().amax(0))
            assert torch.allclose(seen.mean_square, flat.square().mean(0), rtol=1e-5)
    norm = ranges[paths[1]].norm
    assert norm is not None
    x = kept[paths[1]][0].flatten(0, 1).double()
    variance = x.square().mean(-1)
    assert norm.norm_max == pytest.approx(float(x.norm(dim=-1).max()))
    seen_variances, shares = norm.variances.unbind(1)
    assert float(shares.sum()) == pytest.approx(1)
    assert float(seen_variances.min()) == pytest.approx(float(variance.min()), rel=0.05)
    assert float((shares / seen_variances).sum()) == pytest.approx(float((1 / variance).mean()), rel=0.05)
    assert not any(module._forward_hooks for module in model.modules())


def test_ranges_of_two_batches_are_those_of_both_together() -> None:
    model = model_of("t5")
    first, second = batches(model.config, None, None)[:2]
    apart = [observe_ranges(model, [batch])["lm_head"].output for batch in (first, second)]
    both = observe_ranges(model, [first, second])["lm_head"].output
    assert both.rows == apart[0].rows + apart[1].rows
    assert torch.equal(both.amax, torch.maximum(apart[0].amax, apart[1].amax))
    mean = sum(part.mean_square * part.rows for part in apart) / both.rows
    assert torch.allclose(both.mean_square, torch.as_tensor(mean), rtol=1e-5)


def test_a_layer_norm_s_variance_is_centred() -> None:
    model = model_of("pegasus")
    with torch.no_grad():
        model.model.shared.weight += 5.0  # a common offset, which nn.LayerNorm takes out
    norm = observe_ranges(model, [padded(model)])["model.encoder.layers.0.self_attn_layer_norm"].norm
    assert norm is not None
    assert float(norm.variances[:, 0].min()) < 5.0 < norm.norm_max


def test_scores_are_those_of_an_undisturbed_forward() -> None:
    model = model_of("gated")
    batch = padded(model)
    path = "encoder.block.0.layer.0.SelfAttention"
    sites = watch(model, batch)
    scores = observe_ranges(model, [batch])[path].scores
    assert scores is not None
    assert scores.product == sites[f"{path}:scores"].amax
    assert scores.biased == max(sites[f"{path}:{name}"].amax for name in ("mul", "add"))


@pytest.mark.parametrize("kind", list(tiny.KINDS))
def test_every_linear_embedding_norm_and_attention_has_a_range(kind: str) -> None:
    model = model_of(kind)
    ranges = observe_ranges(model, batches(model.config, None, None)[:1])
    for path, module in model.named_modules():
        name = type(module).__name__
        if isinstance(module, nn.Linear) or name.endswith("LayerNorm"):
            assert ranges[path].input.rows == ranges[path].output.rows > 0
            assert (ranges[path].norm is not None) is name.endswith("LayerNorm")
        if hasattr(module, "k") or hasattr(module, "k_proj"):
            scores = ranges[path].scores
            assert scores is not None
            assert 0 < scores.product < 100
            assert 0 < scores.biased < 100
