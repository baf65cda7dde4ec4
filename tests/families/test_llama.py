"""What Llama and its relatives have alone: rotary pairs, biases of a config, sizes left out, Phi-3's joint matrices."""

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support import tiny
from support.adversary import adverse_inputs, observe
from support.contract import FREE, bound_at, broken, certified, outputs
from support.tiny import GROWING

from bf16_to_fp16 import UserError, certify, convert
from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.bounds.certificate import Certificate, bound
from bf16_to_fp16.bounds.differentiable import DifferentiableBounds
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.families.configs import full_config
from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.families.llama import LLAMA, rotary_factor
from bf16_to_fp16.families.mistral3 import MINISTRAL3, MISTRAL3
from bf16_to_fp16.families.resolve import ModelTensors, resolve, source_weights
from bf16_to_fp16.families.signals import Kind
from bf16_to_fp16.families.wiring import Attention
from bf16_to_fp16.measuring.agreement import agreed_layout
from bf16_to_fp16.measuring.stock import load
from bf16_to_fp16.rescaling.plan import Plan
from bf16_to_fp16.rescaling.planner import make_plan


def test_pairs_of_queries_too_large_for_fp16_are_balanced_with_their_keys(tmp_path: Path) -> None:
    """One rotary pair of one head of keys, whose queries overflow and whose keys are tiny."""
    model = tiny.build("llama", factor=1.0)
    heads, kv_heads, size = 4, 2, 10
    layer = model.model.layers[0].self_attn
    queries, keys = layer.q_proj.weight.view(heads, 2, 5, -1), layer.k_proj.weight.view(kv_heads, 2, 5, -1)
    with torch.no_grad():
        queries[2:, :, 3] *= 2.0**17
        keys[1, :, 3] *= 2.0**-17
    result = convert(tiny.save(model, tmp_path / "source"), tmp_path / "out", run_model=False)
    assert result.safe and result.report["proof"] == "certified"
    exponents = torch.tensor(result.plan.exponents["model.layers.0.self_attn.query_key"]).view(kv_heads, size // 2)
    assert int(exponents[1, 3]) <= -6 and int(exponents.abs().sum()) <= int(exponents[1, 3].abs()) + 9
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("source", "out"))
    norm = torch.tensor(result.plan.exponents.get("model.layers.0.input_layernorm", 0)).expand(24)
    for name, sign, spread in (("q_proj", 1, (kv_heads, 2, 2, 5)), ("k_proj", -1, (kv_heads, 1, 2, 5))):
        path = f"model.layers.0.self_attn.{name}.weight"
        rows = sign * exponents[:, None, None].expand(spread).reshape(-1, 1)
        assert torch.equal(after[path].double(), before[path].double() * 2.0 ** (rows - norm)), name


def test_ranges_of_queries_and_keys_are_what_their_turned_channels_reach() -> None:
    """A channel that is always 0 and the other of its pair, which comes into it."""
    model = tiny.build("llama", factor=1.0)
    model.model.layers[0].self_attn.q_proj.weight.data[5:10] = 0
    layout, certificate = certified(model)
    path = "model.layers.0.self_attn.q_proj"
    bound = certificate.ranges[path].output.amax
    assert torch.equal(bound[5:10], bound[:5]) and bool((bound[:5] > 0).all())
    signal = layout.signals["model.layers.0.self_attn.query_key"]
    assert signal.kind is Kind.QUERY_KEY and signal.size == 10


@pytest.mark.parametrize(("kind", "large"), [("qwen3", "k"), ("qwen3", "q"), ("gemma3", "k")])
def test_gains_of_keys_past_fp16s_range_meet_those_of_queries(tmp_path: Path, kind: str, large: str) -> None:
    """To the bit; of Gemma's, which are stored less 1, but for the rounding that the plan predicts."""
    model = tiny.small(kind, 3, factor=1.0)
    offset = float(kind == "gemma3")
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith(("q_norm", "k_norm")):
                small = -6 if offset else -17
                gain = (module.weight + offset) * 2.0 ** (17 if name.endswith(f"{large}_norm") else small)
                module.weight.copy_((gain - offset).bfloat16())
    source = tiny.save(model, tmp_path / "source")
    result = convert(source, tmp_path / "out", run_model=bool(offset))
    assert result.safe and result.report["proof"] == "certified"
    for i in range(2):
        moved = torch.tensor(result.plan.exponents[f"model.layers.{i}.self_attn.query_key"])
        assert bool((moved >= 3).all() if large == "k" else (moved <= -3).all()) and moved.dim() <= 1
    before, after = (outputs(load(folder, torch.float32)) for folder in (source, tmp_path / "out"))
    if not offset:
        assert all(map(torch.equal, before, after))
        assert "inexact" not in result.report and result.plan.drift is None
        return
    assert result.plan.drift is not None and 0 < result.plan.drift.relative_error < 2.0**-11
    assert result.plan.drift.predicted_kl == pytest.approx(result.plan.drift.measured_kl, rel=0.2)


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"])
def test_a_stock_config_without_a_head_size_agrees_with_its_class(kind: str, tmp_path: Path) -> None:
    """As published Qwen2's are, whose class knows no such attribute."""
    made = getattr(transformers, kind)
    shape = {key: value for key, value in tiny.LLAMA_SHAPE.items() if key != "head_dim"}
    folder = tiny.save(made(made.config_class(**shape)), tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    assert kind != "Qwen2ForCausalLM" or "head_dim" not in config
    assert certify(folder)["certificate"]["holds"]
    config.pop("head_dim", None)
    (folder / "config.json").write_text(json.dumps(config))
    assert certify(folder)["certificate"]["holds"]


FACTORS: dict[str, dict[str, object]] = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 8.0},
    "yarn, given": {"factor": 8.0, "attention_factor": 3.0},
    "yarn, two scales": {"factor": 8.0, "mscale": 2.0, "mscale_all_dim": 0.5},
    "yarn, one scale": {"factor": 8.0, "mscale": 2.0},
    "yarn, less": {"factor": 8.0, "mscale": 0.5, "mscale_all_dim": 2.0},
    "yarn, of a ratio": {"factor": None},
    "longrope": {"short_factor": [1.0] * 5, "long_factor": [2.0] * 5},
    "longrope, given": {"short_factor": [1.0] * 5, "long_factor": [2.0] * 5, "attention_factor": 1.5},
}


@pytest.mark.parametrize("name", FACTORS)
def test_the_factor_of_rotary_positions_is_stock_codes(name: str) -> None:
    own = {"rope_type": name.partition(",")[0], "rope_theta": 1e4, "original_max_position_embeddings": 64}
    config = transformers.LlamaConfig(
        **tiny.LLAMA_SHAPE, max_position_embeddings=512, rope_parameters=own | FACTORS[name]
    )
    stock = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).attention_scaling
    assert (stock == 1.0) == (name == "llama3")
    assert rotary_factor(config.to_dict()) == max(1.0, stock)
    older = tiny.LLAMA_SHAPE | {"rope_scaling": config.to_dict()["rope_parameters"], "max_position_embeddings": 512}
    assert rotary_factor(full_config(LLAMA, older)) == max(1.0, stock)
    # Stock code prefers a length outside, and moves it inside as late as the model is built.
    outside = older | {"rope_scaling": own | FACTORS[name], "original_max_position_embeddings": 16}
    config = transformers.LlamaConfig(**json.loads(json.dumps(outside)))
    stock = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).attention_scaling
    assert rotary_factor(full_config(LLAMA, outside)) == max(1.0, stock)


@pytest.mark.parametrize("kind", ["llama", "glm4", "qwen3", "gemma3", "gemma", "olmo2"])
def test_scores_are_bounded_with_the_square_of_a_rotary_factor(kind: str) -> None:
    """A factor of 4, which they pass the bound without."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "attention_factor": 4.0, "rope_theta": 1e4}
    yarn |= {"original_max_position_embeddings": 64}
    kinds = {"full_attention": yarn, "sliding_attention": yarn}
    # Of GLM-4 half of a head is turned, which has to be even.
    half = tiny.build(kind, 1, factor=1.0, head_dim=8, rope_parameters=kinds if kind == "gemma3" else yarn).half()
    layout, certificate = certified(half)
    plain = certified(tiny.build(kind, 1, factor=1.0, head_dim=8).half())[1]
    seen = observe(half, layout, adverse_inputs(copy.deepcopy(half).float(), layout, 64, 0))
    site = next(w.at for w in layout.topology if isinstance(w, Attention)) + ":scores"
    bound, without = (bound_at(each, site) for each in (certificate, plain))
    assert without * 1.5 < seen[site] <= bound < without * 16.1
    assert not broken(certificate, seen, FREE)


def test_a_rotary_factor_that_is_not_known_is_refused() -> None:
    source = ModelTensors(tiny.build("llama"))
    rotation: dict[str, object] = {"rope_type": "spiral", "factor": 4.0}
    source.config["rope_parameters"] = rotation
    with pytest.raises(UserError, match=r"^LlamaForCausalLM/config\.json: attention_factor .* rope_type 'spiral'"):
        resolve(source)
    rotation["attention_factor"] = 2.0
    rotary = next(w for w in resolve(source).topology if isinstance(w, Attention)).rotary
    assert rotary is not None and rotary.factor == 2.0


EXAONES: dict[str, tuple[object, object, list[str]]] = {
    "1.2B": (None, None, ["full_attention"] * 2),
    "32B": (4096, "LLLG", ["sliding_attention", "full_attention"]),
    "without a window": (..., 2, ["sliding_attention", "full_attention"]),
}
"""Window, pattern and kinds of layers as published configs say them, and as one that leaves the window out."""


@pytest.mark.parametrize("name", EXAONES)
def test_exaone_4_turns_the_layers_that_stock_code_turns(name: str, tmp_path: Path) -> None:
    window, pattern, kinds = EXAONES[name]
    folder = tiny.save(tiny.build("exaone4"), tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    config |= {"sliding_window": window, "sliding_window_pattern": pattern, "layer_types": kinds}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    layout = agreed_layout(open_checkpoint(folder))
    attentions = [layer.self_attn for layer in load(folder, torch.float32).model.layers]
    turned = [attention.sliding_window is None or attention.is_sliding for attention in attentions]
    assert [w.turns for w in layout.topology if isinstance(w, Attention)] == turned


@pytest.mark.parametrize(("kind", "missing"), [("llama-biased", "mlp.up_proj"), ("qwen2", "self_attn.k_proj")])
def test_a_bias_that_the_config_asks_for_may_not_be_missing(kind: str, missing: str) -> None:
    source = ModelTensors(tiny.build(kind))
    del source.tensors[f"model.layers.0.{missing}.bias"]
    with pytest.raises(UserError, match=rf"{missing}\.bias is missing"):
        resolve(source)


def test_queries_that_grow_with_their_position_are_bounded_for_the_length_that_is_asked() -> None:
    model = tiny.small("ministral3")
    growth, positions = GROWING["llama_4_scaling_beta"], GROWING["original_max_position_embeddings"]
    lengths, site = (4, 1 << 15), "model.layers.0.self_attn:mul#5"
    short, long = (bound_at(certified(model, Arithmetic(length))[1], site) for length in lengths)
    factors = [1 + growth * math.log1p(length / positions) for length in lengths]
    assert long / short == pytest.approx(factors[1] / factors[0], rel=1e-9) and long > 1.1 * short


@pytest.mark.parametrize("change", [{"llama_4_scaling_beta": -0.1}, {"original_max_position_embeddings": 0}, {}])
def test_a_growth_of_queries_that_is_none_is_one_line(change: dict[str, float]) -> None:
    config = tiny.config("ministral3").to_dict()
    rotation = {key: value for key, value in GROWING.items() if change or not key.startswith("llama_4")}
    with pytest.raises(UserError, match=r"'(llama_4_scaling_beta|original_max_position_embeddings)' is "):
        MINISTRAL3.encoder.block(config | {"rope_parameters": rotation | change}, 0)


def test_a_text_model_of_another_type_inside_mistral_3_is_named() -> None:
    config = tiny.config("mistral3").to_dict()
    config["text_config"]["model_type"] = "llama"
    with pytest.raises(UserError, match=r"'text_config.model_type' is 'llama', .* known are mistral, ministral3"):
        MISTRAL3.encoder.block(config, 0)


PARTS = {
    "self_attn.qkv_proj": [f"self_attn.{name}_proj" for name in "qkv"],
    "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
}


def joined(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights by name with those of ``PARTS`` under one another."""
    made = dict(weights)
    for name in [name for name in weights if name.endswith("self_attn.q_proj.weight")]:
        layer = name.removesuffix("self_attn.q_proj.weight")
        for whole, parts in PARTS.items():
            made[f"{layer}{whole}.weight"] = torch.cat([made.pop(f"{layer}{part}.weight") for part in parts])
    return made


Sources = tuple[tuple[ModelTensors, Layout], tuple[ModelTensors, Layout]]


@pytest.fixture(params=[2, 4])
def sources(request: pytest.FixtureRequest) -> Sources:
    """A Llama, and the Phi-3 that has its matrices together; keys for two heads of queries or for one."""
    own = {"num_key_value_heads": request.param, "rms_norm_eps": 1e-5}
    model, same = (tiny.build(kind, 1, **own) for kind in ("llama", "phi3"))
    with torch.no_grad():
        for layer in model.model.layers:  # what overflows unless its channel moves
            m, mlp = layer.self_attn, layer.mlp
            for up, down in (
                (m.q_proj, m.k_proj),
                (m.v_proj, m.o_proj.weight.mT),
                (mlp.up_proj, mlp.down_proj.weight.mT),
            ):
                getattr(up, "weight", up)[3:9:2] *= 2.0**17
                getattr(down, "weight", down)[3:9:2] *= 2.0**-17
    same.load_state_dict(joined(model.state_dict()))
    apart, together = ModelTensors(model), ModelTensors(same)
    return (apart, resolve(apart)), (together, resolve(together))


def bounds_and_plan(source: ModelTensors, layout: Layout) -> tuple[Certificate, Plan]:
    weights = source_weights(source, layout)
    planned = bound(layout, weights, Arithmetic(planned=dict.fromkeys(layout.streams, -24)))
    plan = make_plan(layout, weights, planned.ranges, margin_bits=1 / 32).plan
    return bound(layout, weights, Arithmetic()), plan


def test_bounds_and_plan_are_those_of_the_matrices_apart(sources: Sources) -> None:
    (one, plan), (other, same) = (bounds_and_plan(*source) for source in sources)
    kinds = {signal.rpartition(".")[2] for signal in plan.exponents}
    assert {"query_key", "value", "neuron"} <= kinds and plan.residual_exponent < 0
    assert (same.exponents, same.residual_exponent) == (plan.exponents, plan.residual_exponent)
    apart, together = (
        {site.name.replace("activation_fn", "act_fn"): (site.bound, site.partial) for site in of.sites}
        for of in (one, other)
    )
    for name in [name for name in apart if name.endswith("q_proj")]:
        layer = name.removesuffix("self_attn.q_proj")
        for whole, parts in PARTS.items():
            values = [apart.pop(f"{layer}{part}") for part in parts]
            assert together.pop(f"{layer}{whole}") == tuple(map(max, zip(*values, strict=True)))
    assert together == apart


def test_the_differentiable_bounds_are_those_of_the_matrices_apart(sources: Sources) -> None:
    apart, together = (DifferentiableBounds(layout, source.read, stream=True) for source, layout in sources)
    one, other = apart.measure(), together.measure()
    owners = apart.owners(), together.owners()
    for site, bounds in one.items():
        if site in other:
            torch.testing.assert_close(other[site], bounds, rtol=1e-6, atol=0)
            own, same = (
                torch.cat(
                    [view(source.read(name)).flatten() for name, view in by_site[site] if name.endswith("weight")]
                )
                for by_site, (source, _) in zip(owners, sources, strict=True)
            )
            assert torch.equal(own, same), site
    assert {name.rpartition(".")[2] for name in other.keys() - one.keys()} == {"gate_up_proj"}  # one site for both
