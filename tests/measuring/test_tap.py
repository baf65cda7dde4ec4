"""The tap names sites as the audit does, and hands over tensors that carry a gradient, whatever wraps the model."""

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support import exhaustive
from support.observed import padded
from support.penalised import built
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from bf16_to_fp16.errors import UserError
from bf16_to_fp16.measuring.batch import run_batch
from bf16_to_fp16.measuring.observer import SiteObserver
from bf16_to_fp16.measuring.tap import Tap

NOT_HANDED_OVER = (
    *(":index#", "constant", ":to", ":repeat", ":constant_pad_nd", ":clone", ":cat", "layer_norm.1", "layer_norm.2"),
    *(":bernoulli", ":div", ":_log", "nll", ":copy"),
    "embed_positions",  # fixed: it runs without gradients
    ":weight",  # a copy of one, made by autocast
)
BLOCK = "encoder.block.1.layer.0.SelfAttention"


def tapped(model: nn.Module, batch: Any, forward: Any = None) -> dict[str, float]:
    seen: dict[str, float] = {}

    def on_site(name: str, x: Tensor) -> None:
        seen[name] = max(seen.get(name, 0.0), float(x.detach().abs().max()))

    with Tap(model, on_site):
        run_batch(forward or model, batch)
    return seen


TAPPED = [
    (kind, autocast, train)
    for kind in ("t5", "gated", "umt5", "pegasus", "t5-encoder", "longt5", "longt5-local", "switch")
    for autocast in (None, torch.bfloat16, torch.float16)
    for train in (False, True)
]
FEW = [case for case in TAPPED if case[0] == "gated" or case[1:] == (torch.float16, True)]


@pytest.mark.parametrize(("kind", "autocast", "train"), exhaustive.beyond(FEW, TAPPED))
def test_names_and_largest_values_are_the_audit_s(kind: str, autocast: torch.dtype | None, train: bool) -> None:
    model = built(kind, train)
    batch = padded(model)
    regime = nullcontext() if autocast is None else torch.autocast("cpu", autocast)
    torch.manual_seed(0)
    with regime:
        seen = tapped(model, batch)
    torch.manual_seed(0)
    with SiteObserver(model, fast_products=False) as observer, regime:
        run_batch(model, batch)
    audited: dict[str, float] = {}
    for site in observer.sites():
        if not any(part in f"{site.name}#" for part in NOT_HANDED_OVER):
            audited[site.name] = max(audited.get(site.name, 0.0), site.amax)
    # In fp16 only, the audit holds the cube's input to a limit of its own. The tap does not ask a device whether a mask
    # masks anything, and says 0 where it does not.
    extra = {name: amax for name, amax in seen.items() if name not in audited}
    assert all(name.endswith(":cubed") or (name.endswith(":masked") and amax == 0) for name, amax in extra.items())
    seen = {name: amax for name, amax in seen.items() if name in audited}
    assert seen == audited
    assert len(seen) > 70


def gradients(kind: str, *, checkpointing: bool, backward_inside: bool, reentrant: bool = False) -> Any:
    model = built(kind, train=True)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    batch = padded(model)
    calls: list[str] = []
    terms: list[Tensor] = []

    def on_site(name: str, x: Tensor) -> None:
        calls.append(name)
        terms.append(x.float().abs().amax().log1p() * x.float().square().mean())

    torch.manual_seed(0)
    labels = batch.decoder_input_ids is not None
    with Tap(model, on_site) as tap:
        out = run_batch(model, batch, labels=labels)
        loss = (out.loss if labels else out[0].square().mean()) + sum(terms)
        if backward_inside:
            loss.backward()
            assert not tap._stack
    if not backward_inside:
        loss.backward()
    return calls, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize("backward_inside", [True, False])
@pytest.mark.parametrize("kind", exhaustive.beyond(["t5", "switch"], ["t5", "gated", "pegasus", "longt5", "switch"]))
def test_checkpointing_leaves_calls_and_gradients_bit_equal(kind: str, backward_inside: bool) -> None:
    plain_calls, plain = gradients(kind, checkpointing=False, backward_inside=True)
    calls, kept = gradients(kind, checkpointing=True, backward_inside=backward_inside)
    assert calls == plain_calls  # nothing of the recomputation
    assert kept.keys() == plain.keys()
    assert all(torch.equal(kept[name], plain[name]) for name in plain)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
def test_reentrant_checkpointing_is_refused() -> None:
    with pytest.raises(UserError, match="use_reentrant"):
        gradients("t5", checkpointing=True, backward_inside=True, reentrant=True)
    model = built("t5", train=True)
    x = torch.ones(2, 3, model.config.d_model, requires_grad=True)
    feed_forward = model.encoder.block[0].layer[1]
    with pytest.raises(UserError, match="use_reentrant"), Tap(model, lambda name, x: None):
        checkpoint(feed_forward, x, use_reentrant=True)


class Unwatched(torch.nn.Module):
    """A block that measures its input without gradients before it scales it, as routers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            (5.0 - x) * 1000.0
        return x * 3.0


def test_what_a_model_runs_without_gradients_is_no_site_and_numbers_no_other() -> None:
    values: dict[str, torch.Tensor] = {}
    with Tap(model := Unwatched(), values.__setitem__):
        model(torch.ones(2, requires_grad=True))
    assert {site: float(x.max()) for site, x in values.items()} == {"model:mul": 3.0}


def test_a_compiled_model_is_refused_before_and_after_the_tap_was_entered() -> None:
    model = built("t5")
    compiled: Any = torch.compile(model, backend="eager")
    with pytest.raises(UserError, match="compile"):
        Tap(compiled, lambda name, x: None).__enter__()
    batch = padded(model)
    with Tap(model, lambda name, x: None), pytest.raises(UserError, match="compile"):
        compiled(input_ids=batch.input_ids, labels=batch.input_ids)
    with Tap(model, lambda name, x: None), pytest.raises(UserError, match="compile"):
        model.encoder.block[0].compile(backend="eager")
        run_batch(model, batch)
    with pytest.raises(UserError, match="compile"):
        Tap(model, lambda name, x: None).__enter__()
    assert not any(module._forward_hooks for module in model.modules())
    model = built("t5")
    with Tap(model, lambda name, x: None), pytest.raises(UserError, match="compile"):
        model.encoder.block[0] = torch.compile(model.encoder.block[0], backend="eager")
        run_batch(model, batch)


def test_checkpoint_wrappers_add_nothing_to_the_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = built("t5")
    batch = padded(model)
    plain = tapped(model, batch)
    for stack in (model.encoder, model.decoder):
        for i, block in enumerate(stack.block):
            stack.block[i] = checkpoint_wrapper(block)
    assert tapped(model, batch).keys() == plain.keys()


def test_a_glance_decides_what_is_handed_over_and_only_is_asked_once_a_name() -> None:
    model = built("t5")
    batch = padded(model)
    asked: list[str] = []
    glanced: list[str] = []
    handed: list[str] = []

    def only(name: str) -> bool:
        asked.append(name)
        return name.endswith(":scores")

    def glance(name: str, x: Tensor) -> bool:
        assert not x.requires_grad
        glanced.append(name)
        return name.startswith("decoder")

    with Tap(model, lambda name, x: handed.append(name), only=only, glance=glance):
        run_batch(model, batch)
        run_batch(model, batch)
    assert len(asked) == len(set(asked))
    assert len(glanced) == 2 * 4  # 2 encoder layers, twice 1 in the decoder
    assert handed == [name for name in glanced if name.startswith("decoder")]


def test_nothing_is_kept_alive_and_nothing_stays_behind() -> None:
    model = built("gated", train=True)
    batch = padded(model)
    refs = []

    def once() -> None:
        terms = []

        def on_site(name: str, x: Tensor) -> None:
            refs.append(weakref.ref(x))
            terms.append(x.float().exp().amax() + x.softmax(-1).square().sum())

        with Tap(model, on_site):
            loss = run_batch(model, batch, labels=True).loss
            assert not _get_current_function_mode_stack()
        (loss + sum(terms) * 0).backward()

    gc.collect()
    gc.disable()
    try:
        once()
        assert len(refs) > 100
        assert not any(ref() is not None for ref in refs)
    finally:
        gc.enable()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_exception_in_the_forward_leaves_no_mode_and_the_names_right() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.broken = True

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            if self.broken:
                raise RuntimeError("in the middle")
            return y + 1

    model = Fails()
    names: list[str] = []
    with Tap(model, lambda name, x: names.append(name)):
        with pytest.raises(RuntimeError, match="in the middle"):
            model(torch.ones(1, 2))
        assert not _get_current_function_mode_stack()
        model.broken = False
        model(torch.ones(1, 2))
        with torch.device("cpu"):  # another mode, entered and left inside
            model.inner(torch.ones(1, 2))
    assert names == ["inner", "inner", "model:add", "inner"]


def test_what_on_site_calls_is_not_tapped() -> None:
    model = built("t5")
    batch = padded(model)
    names: list[str] = []

    def on_site(name: str, x: Tensor) -> None:
        names.append(name)
        if name == "lm_head":
            model.lm_head(torch.ones_like(x)[..., : model.config.d_model])

    with Tap(model, on_site):
        run_batch(model, batch)
    assert names.count("lm_head") == 1
    assert "model:ones_like" not in names


def test_a_linear_that_is_no_torch_function_is_a_site_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Product(torch.autograd.Function):
        """What ZeRO-3 puts in the place of ``linear``."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            return x @ weight.T

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = Product.apply(x, weight)
        return y if bias is None else y + bias

    model = built("t5")
    batch = padded(model)
    plain = tapped(model, batch)
    monkeypatch.setattr(nn.functional, "linear", product)
    seen = tapped(model, batch)
    assert seen.keys() == plain.keys()
    assert seen == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("kind", ["t5", "pegasus"])
def test_a_mask_stays_a_mask_through_a_function_of_a_wrapper(kind: str) -> None:
    class Passed(torch.autograd.Function):
        """What ZeRO-3 makes of every tensor that enters a module."""

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.detach()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads

    def wrap(module: nn.Module, args: Any) -> Any:
        return tuple(Passed.apply(x) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)

    model = built(kind)
    batch = padded(model)
    plain = tapped(model, batch)
    for module in model.modules():
        module.register_forward_pre_hook(wrap)
    assert tapped(model, batch) == plain
    assert any(name.endswith(":masked") for name in plain)
