"""Experts that a router chooses and what images bring into the stream: bounded whatever comes, and nearly reached."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import tiny
from support.adversary import ENCODER, free_norms
from support.contract import bound_at, certified, layout_of
from support.inside import bound
from torch import Tensor

from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.families.resolve import ModelTensors, resolve
from bf16_to_fp16.families.wiring import Experts, Projector
from bf16_to_fp16.measuring.batch import run_batch
from bf16_to_fp16.measuring.observer import SiteObserver
from bf16_to_fp16.measuring.probe import images
from bf16_to_fp16.measuring.stock import run_everywhere


def one_neuron_each(louder: int, noise: float = 0.0) -> tuple[Any, Layout, Experts, Tensor]:
    """Return a model of two experts of one neuron, of which the router is sure, its layout and experts, and the
    direction of its norm's output that the louder one answers to."""
    own: dict[str, Any] = {"num_layers": 2, "d_ff": 1, "expert_capacity": 64, "router_bias": False, "dropout_rate": 0.0}
    model = tiny.build("switch-encoder", factor=1.0, router_jitter_noise=noise, **own)
    layout = resolve(ModelTensors(model))
    experts = next(w for w in layout.topology if isinstance(w, Experts))
    with torch.no_grad():
        model.shared.weight.mul_(1e-3)
        for module in model.modules():
            for output in ("o", "wo"):
                if hasattr(module, output):
                    getattr(module, output).weight.mul_(1e-3)
        model.get_submodule(experts.norm).weight.fill_(1.0)
        directions = []
        for number, w in enumerate(experts.experts):
            wi, wo = (model.get_submodule(path).weight for path in (w.linear, w.output))
            wi.zero_()[0, 0] = 2.0 if number else -2.0
            wo.fill_(10.0 if number == louder else 1.0)
            directions.append(wi[0].clone())
        model.get_submodule(experts.classifier).weight.copy_(4 * torch.stack(directions))
    return model, layout, experts, directions[louder]


def seen_with(model: Any, layout: Layout, experts: Experts, direction: Tensor) -> tuple[dict[str, float], float]:
    """Return the largest value at each site of a model whose experts' norm reads a direction, and the length of what
    the final norm then reads."""
    lengths = []
    final = model.get_submodule(layout.stacks()[0].ends.norm)
    handle = final.register_forward_pre_hook(lambda _, args: lengths.append(float(args[0].float().norm(dim=-1).max())))
    x = (300 * direction).expand(2, ENCODER, -1)
    with torch.no_grad(), free_norms(model, {experts.norm: x}), SiteObserver(model) as observer:
        run_everywhere(model, layout, input_ids=torch.ones(2, ENCODER, dtype=torch.int64))
    handle.remove()
    return {site.name: site.amax for site in observer.sites()}, max(lengths)


@pytest.mark.parametrize("louder", [0, 1])
@pytest.mark.parametrize("half", [False, True])
def test_the_louder_expert_reaches_the_bound_of_all(louder: int, half: bool) -> None:
    model, layout, experts, direction = one_neuron_each(louder)
    certificate = bound(layout, lambda name: model.state_dict()[name])
    served = model.half() if half else model
    seen, length = seen_with(served, layout, experts, direction)
    for site in (experts.classifier, experts.experts[louder].output, f"{experts.at}:mul", f"{experts.at}:index_add"):
        top = bound_at(certificate, site)
        assert 0.97 * top < seen[site] <= top, site
    assert certificate.at(f"{experts.at}:index_add") == certificate.at(f"{experts.at}:mul")
    final = certificate.ranges[layout.stacks()[0].ends.norm].norm
    assert final is not None and 0.95 * final.norm_max < length <= final.norm_max


def test_what_the_router_multiplies_in_training_is_in_the_bounds_for_training() -> None:
    """Stock code multiplies in place, so that in fp32 the experts read what the router does."""
    model, layout, experts, direction = one_neuron_each(0, noise=0.5)
    served = bound(layout, lambda name: model.state_dict()[name])
    training = bound(layout, lambda name: model.state_dict()[name], Arithmetic(), target="train")
    torch.manual_seed(0)
    seen, _ = seen_with(model.train(), layout, experts, direction)
    for site in (experts.classifier, experts.experts[0].output, f"{experts.router}:mul"):
        top = bound_at(training, site)
        assert 0.9 * top < seen[site] <= top, site
    assert seen[experts.classifier] > bound_at(served, experts.classifier)


@pytest.mark.parametrize("noise", [-0.5, float("nan"), float("inf")])
def test_what_is_no_noise_has_no_bound_for_training(noise: float) -> None:
    """Stock code draws nothing with a number under 0, with which the bounds would come out too small."""
    model, layout, _, _ = one_neuron_each(0)
    edited = replace(layout, config={**layout.config, "router_jitter_noise": noise})
    assert bound(edited, lambda name: model.state_dict()[name]).holds
    with pytest.raises(UserError, match="'router_jitter_noise' is"):
        bound(edited, lambda name: model.state_dict()[name], target="train")


SIGMOIDS = {"first_k_dense_replace": 0, "routed_scaling_factor": 2.5, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("kind", "changes", "times"),
    [
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 3}, 1.0),
        ("qwen3_moe", {"num_experts": 2, "norm_topk_prob": False}, 1.0),
        ("glm4_moe", SIGMOIDS | {"norm_topk_prob": True}, 2.5),
        ("glm4_moe", SIGMOIDS | {"norm_topk_prob": False}, 5.0),
    ],
)
@pytest.mark.parametrize("half", [False, True])
def test_agreeing_experts_reach_the_summed_bound(kind: str, changes: dict[str, Any], times: float, half: bool) -> None:
    """Of one neuron each, all the same and all wanted alike, the shared one too: what comes of them is what one gives,
    times the largest sum of weights."""
    one_neuron = {"num_hidden_layers": 1, "intermediate_size": 1, "moe_intermediate_size": 1}
    model = tiny.build(kind, 0, factor=1.0, **one_neuron | changes)
    layout = resolve(ModelTensors(model))
    experts = next(w for w in layout.topology if isinstance(w, Experts))
    first = experts.experts[0]
    rows = model.get_submodule(first.linear).weight
    with torch.no_grad():
        model.get_submodule(experts.norm).weight.fill_(1.0)
        for quiet in (model.model.embed_tokens, model.model.layers[0].self_attn.o_proj):
            quiet.weight.mul_(1e-4)
        for w in experts.every:
            for path, like in ((w.gate, first.linear), (w.linear, first.linear), (w.output, first.output)):
                model.get_submodule(path).weight.copy_(model.get_submodule(like).weight)
        router = model.get_submodule(experts.classifier)
        router.weight.copy_(50 * rows.expand(len(experts.experts), -1))
        for correction in router.buffers():
            correction.zero_()
    served = model.half() if half else model
    certificate = bound(layout, lambda name: served.state_dict()[name])
    seen, length = seen_with(served, layout, experts, rows[0].detach().float())
    one, inside = max(seen.get(w.output, 0.0) for w in experts.experts), experts.at.rpartition(".")[0]
    given = {f"{experts.at}:index_add": times, f"{experts.at}:mul": 1.0 if times == 1 else 2.5}
    given |= {experts.sum: times + 1} if experts.shared is not None else {}
    for site, many in given.items():
        value, top = max(x for name, x in seen.items() if name.split("#")[0] == site), bound_at(certificate, site)
        assert value <= top and many * one <= top < 1.03 * many * one, site
        assert site.endswith("mul") or value > 0.99 * many * one  # two experts share what one may have
    final = certificate.ranges[layout.stacks()[0].ends.norm].norm
    assert final is not None and 0.95 * final.norm_max < length <= final.norm_max
    for site in (site for site in seen if site.startswith(inside) and "constant" not in site):
        assert seen[site] <= bound_at(certificate, site), site


def test_what_a_router_scales_with_must_be_a_number() -> None:
    model = tiny.small("glm4_moe")
    layout = resolve(ModelTensors(model))
    edited = replace(layout, config={**layout.config, "routed_scaling_factor": -1.0})
    with pytest.raises(UserError, match="'routed_scaling_factor' is -1"):
        bound(edited, lambda name: model.state_dict()[name])


def test_the_sum_of_many_sigmoids_is_bounded_beside_that_of_a_group() -> None:
    model = tiny.small("glm4_moe", num_experts_per_tok=4)
    name, router = next((n, m) for n, m in model.named_modules() if n.endswith("mlp.gate") and hasattr(m, "top_k"))
    entering: list[Tensor] = []
    handle = router.register_forward_pre_hook(lambda module, args: entering.append(args[0][0, 0].clone()))
    ids = torch.tensor([[5]])
    with torch.no_grad():
        model(input_ids=ids)
        handle.remove()
        router.weight.copy_((20 * entering[0] / entering[0].square().sum()).expand_as(router.weight))  # 4 sigmoids of 1
        router.e_score_correction_bias.zero_()
        certificate = bound(resolve(ModelTensors(model)), lambda name: model.state_dict()[name])
        observer = SiteObserver(model)
        with observer:
            model(input_ids=ids)
    sums = {site.name: site.amax for site in observer.sites() if site.name.startswith(f"{name}:sum")}
    assert len(sums) == 2 and max(sums.values()) == pytest.approx(4)
    for site, amax in sums.items():
        assert amax <= bound_at(certificate, site), site


KINDS = ["qwen2_5_vl", "qwen3_vl", "mistral3"]


def loud(kind: str) -> Any:
    """Return a model in fp16 whose ways into the stream have large weights, as training may leave them."""
    model = tiny.build(kind, 3, factor=1.0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in ("merger", "multi_modal_projector")):
                weight.normal_(0, 0.5) if weight.dim() == 2 else weight.uniform_(0.5, 2)
    return model.half()


def given(module: Any, w: Projector, outputs: Tensor) -> Tensor:
    """Return what a way into the stream makes of so many of the tower's outputs as it reads at once."""
    sizes = {"image_sizes": [(8, 8)]} if w.merging else {}
    made: Tensor = module(outputs, **sizes)
    return made


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_no_output_of_a_tower_passes_the_bounds_and_some_come_near(kind: str) -> None:
    model = loud(kind)
    layout, certificate = certified(model)
    for w in layout.projectors:
        assert w.feed_forward is not None
        limit = bound_at(certificate, w.feed_forward.output)
        assert limit < 65504
        for served in (torch.float32, torch.float16):
            module, found = deepcopy(model.get_submodule(w.at)).to(served), 0.0
            for number, outputs in enumerate(candidates(model, layout, w)):
                made = float(given(module, w, outputs.to(served)).abs().max())
                assert made <= limit, (w.at, served, number)
                found = max(found, made)
            # Between Mistral 3's first two linears only the lengths of rows are known.
            assert found > (0.1 if w.merging else 0.25) * limit


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "mistral3"])
@torch.no_grad()
def test_outputs_that_all_point_where_a_row_has_them_reach_the_first_linears_bound(kind: str) -> None:
    model = loud(kind).float()
    layout, certificate = certified(model)
    (w,) = layout.projectors
    assert w.feed_forward is not None and w.joined == 4
    path = w.merging or w.feed_forward.linear
    weight, gain = (model.get_submodule(each).weight for each in (path, w.norm))
    found = []
    model.get_submodule(path).register_forward_hook(lambda module, inputs, made: found.append(made.abs()))
    for row in weight:
        parts = row.view(-1, 4).t() if w.by_channel else row.view(4, -1)
        given(model.get_submodule(w.at), w, 1e3 * parts * gain)
    limits = certificate.ranges[path].output.amax
    assert bool((torch.cat(found) <= limits).all())
    assert float((torch.cat(found) / limits).max()) > 0.9


def candidates(model: Any, layout: Layout, w: Projector) -> list[Tensor]:
    """Return outputs of a tower, of every size: drawn, constant but for a little, and climbing a gradient."""
    gain = layout.tensors[f"{w.norm}.weight"].shape[0]
    reads = 4 if gain == 16 else 1
    generator = torch.Generator().manual_seed(0)
    outputs = [torch.randn(reads, gain, generator=generator) * size for size in (1e-4, 1.0, 1e3)]
    outputs.append(512 + torch.randn(reads, gain, generator=generator))
    module = deepcopy(model.get_submodule(w.at)).float()
    with torch.enable_grad():
        for channel in range(12):
            x = torch.randn(reads, gain, generator=generator).requires_grad_()
            for _ in range(60):
                (slope,) = torch.autograd.grad(given(module, w, x)[..., channel].sum(), x)
                x = (x + 0.3 * slope / slope.norm().clamp(min=1e-9)).detach().requires_grad_()
            outputs += [x.detach(), -x.detach()]
    return outputs


@torch.no_grad()
def test_what_joins_behind_a_layer_is_in_the_streams_bound() -> None:
    model, quiet = loud("qwen3_vl"), loud("qwen3_vl")
    for parameter in quiet.model.visual.deepstack_merger_list.parameters():
        parameter.zero_()
    layout, certificate = certified(model)
    _, without = certified(quiet)
    first, joined = layout.projectors
    assert not first.behind and joined.behind.endswith("layers.0:add#2") and joined.feed_forward is not None
    # Of the layer it comes behind nothing changes, of the next one all.
    assert certificate.at(joined.behind) == without.at(joined.behind)
    most = certificate.ranges[joined.feed_forward.output].output.amax.double()
    reads = layout.stacks()[0].sublayers[2].norm
    one, other = (each.ranges[reads].input.amax.double() for each in (certificate, without))
    assert bool((one >= (other + most) * (1 - 1e-3)).all()) and bool((one <= (other + most) * (1 + 1e-2)).all())


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_an_image_moves_what_a_text_model_gives(kind: str) -> None:
    """So that equality with images is no equality of texts."""
    model = tiny.build(kind, 1, factor=1.0)
    (batch,) = images(model.config)
    before = run_batch(model, batch)[0]
    for w in layout_of(model).projectors:
        changed = deepcopy(model)
        assert w.feed_forward is not None
        changed.get_submodule(w.feed_forward.output).weight.mul_(3)
        assert not torch.equal(run_batch(changed, batch)[0], before), w.at


@pytest.mark.parametrize("served", [torch.float32, torch.float16])
@torch.no_grad()
def test_no_output_of_a_tower_passes_the_bound_and_the_worst_reaches_it(served: torch.dtype) -> None:
    model = tiny.build("gemma3-images", 3, factor=2.0).half()
    layout, certificate = certified(model)
    w = layout.family.projector
    assert w is not None
    module = deepcopy(model.get_submodule(w.at)).to(served)
    limit = bound_at(certificate, f"{w.at}:scores")
    weight = model.get_submodule(w.at).mm_input_projection_weight.float()
    gain = 1 + model.get_submodule(w.norm).weight.float()
    rows = (weight * gain[:, None]).T
    # For each channel the worst direction, as large as the tower could give it; and what is drawn.
    worst = torch.cat([rows / rows.norm(dim=1, keepdim=True) * size for size in (1.0, 1e3, 6e4)])
    for direction in (*worst, *torch.randn(64, len(gain), generator=torch.Generator().manual_seed(0))):
        outputs = direction.to(served).expand(1, module.patches_per_image**2, -1)
        assert module(outputs).abs().max() <= limit
    reached = max(float(module(d.to(served).expand(1, module.patches_per_image**2, -1)).abs().max()) for d in worst)
    assert reached > 0.98 * limit


def test_the_stream_begins_with_the_larger_of_tokens_and_images() -> None:
    model = tiny.build("gemma3-images", 3, factor=2.0).half()
    projection = model.model.multi_modal_projector.mm_input_projection_weight
    found = []
    for factor in (1.0, 1e-3, 8.0):
        with torch.no_grad():
            projection.mul_(factor)
        layout, certificate = certified(model)
        assert layout.family.projector is not None
        first = next(site for site in certificate.sites if site.kind == "residual" and site.name.endswith("0:add"))
        found.append((bound_at(certificate, layout.family.projector.add), first.bound))
    (large, after_large), (tokens, after_tokens), (small, after_small) = found
    assert small == tokens < large
    assert after_small == after_tokens < after_large


def test_a_norm_reads_vectors_as_long_as_images_bring() -> None:
    model = tiny.build("gemma3-images", 3, factor=2.0).half()
    model.model.multi_modal_projector.mm_input_projection_weight.data.mul_(64)
    layout, certificate = certified(model, target="norm-safe")
    w, first = layout.family.projector, layout.stacks()[0].sublayers[0].norm
    assert w is not None
    outputs = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        brought = deepcopy(model.get_submodule(w.at)).float()(outputs)
    longest = float(brought.norm(dim=-1).max())
    norm = certificate.ranges[first].norm
    assert norm is not None and norm.norm_max >= longest
    assert bound_at(certificate, f"{first} (sum of squares)") >= longest**2
