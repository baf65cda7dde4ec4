"""What Gemmas have alone: gains stored less 1, caps that a config may leave out, T5Gemma's config for each stack."""

import json
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support import tiny
from support.contract import bound_at, certified, layout_of
from support.folders import rewritten

from bf16_to_fp16 import UserError, convert, undo
from bf16_to_fp16.bounds.arithmetic import MAX_LENGTH, Arithmetic
from bf16_to_fp16.bounds.attention import MASK_ROUNDING
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.conversion.comparison import different_config
from bf16_to_fp16.families.configs import changes, looked_up, with_value, without_value
from bf16_to_fp16.families.resolve import ModelTensors, check_norms, resolve
from bf16_to_fp16.families.wiring import Attention, FeedForward
from bf16_to_fp16.measuring.agreement import agreed_layout
from bf16_to_fp16.measuring.stock import load
from bf16_to_fp16.report.uses import gains_round
from bf16_to_fp16.rescaling.apply import edited_config


def test_what_is_written_of_a_gain_is_rounded_once_and_its_dead_channels_are_seen(tmp_path: Path) -> None:
    source = tiny.save(tiny.build("embeddinggemma"), tmp_path / "source")
    result = convert(source, tmp_path / "out", run_model=False)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    factor, moved = 2.0**result.plan.residual_exponent, 0
    for name, weight in before.items():
        if name.endswith("norm.weight"):
            behind = ".post_" in name
            wanted = ((1 + weight.double()) * (factor if behind else 1) - 1).float().half()
            assert torch.equal(after[name], wanted), name
            moved += behind
    assert moved == 2 * 2
    drift = result.plan.drift
    assert result.plan.residual_exponent < 0 and drift is not None and 0 < drift.relative_error < 1e-3
    assert gains_round(result.plan) and not gains_round(result.plan.model_copy(update={"family": "gemma4"}))
    model = tiny.build("gemma3")
    model.model.layers[0].input_layernorm.weight.data.fill_(-1)
    checkpoint = open_checkpoint(tiny.save(model, tmp_path / "dead"))
    with pytest.raises(UserError, match=r"input_layernorm\.weight is -1 throughout"):
        check_norms(checkpoint, resolve(checkpoint))


@pytest.mark.parametrize(
    "own",
    [
        {"layer_types": ["sliding_attention"] * 2, "num_hidden_layers": 2},
        {"layer_types": ..., "num_hidden_layers": 7, "global_head_dim": ...},
        {"attention_k_eq_v": False, "num_global_key_value_heads": 1},
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        {"attention_k_eq_v": True, "num_global_key_value_heads": None},
        {"global_head_dim": tiny.GEMMA3_SHAPE["head_dim"]},
    ],
)
def test_a_gemma_4_config_without_layers_is_stock_codes(own: dict[str, Any], tmp_path: Path) -> None:
    config = tiny.gemma4().config.to_dict() | {"architectures": ["Gemma4ForCausalLM"], "global_head_dim": 8}
    written = {key: value for key, value in (config | own).items() if value is not ... and key != "per_layer_config"}
    model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**deepcopy(written)))
    folder = tiny.save(model, tmp_path / "source")
    (folder / "config.json").write_text(json.dumps(written))
    assert agreed_layout(open_checkpoint(folder)).family.name == "gemma4"


def test_a_tied_head_whose_norm_cannot_be_larger_is_separated(tmp_path: Path) -> None:
    model = tiny.build("gemma3")
    model.model.norm.weight.data.fill_(2047)
    model.model.embed_tokens.weight.data.mul_(2.0**-8)
    source = tiny.save(model, tmp_path / "source")
    result = convert(source, tmp_path / "out", run_model=False)
    assert result.plan.untied_head and result.plan.residual_exponent < 0
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert torch.equal(after["lm_head.weight"], before["model.embed_tokens.weight"].half())
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"].half())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def test_what_stock_code_makes_in_fp32_stays_so_where_all_weights_are_halved(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("gemma3", factor=1.0, num_hidden_layers=2), tmp_path / "gemma3")
    half, wide = load(folder, torch.float16, half=True), load(folder, torch.float32)
    assert {p.dtype for p in half.parameters()} == {torch.float16}
    found, wanted = (dict(model.model.rotary_emb.named_buffers()) for model in (half, wide))
    assert wanted and all(torch.equal(found[name], frequencies) for name, frequencies in wanted.items())


def test_a_cap_on_scores_bounds_what_follows_it_and_not_the_scores() -> None:
    """What a mask must add is under twice the cap, however far the scores themselves lie apart."""
    found = {}
    for cap in (5.0, None):
        _, certificate = certified(tiny.build("gemma2", 1, factor=8.0, attn_logit_softcapping=cap))
        at = "model.layers.0.self_attn"
        found[cap] = {name: bound_at(certificate, f"{at}:{name}") for name in ("scores", "add#3", "masked")}
    assert found[5.0]["scores"] == found[None]["scores"] > 50
    assert 4.9 < found[5.0]["add#3"] < 5.1 < found[None]["add#3"]
    besides = MASK_ROUNDING + (26 + math.log2(MAX_LENGTH)) * math.log(2)
    assert 2 * 4.9 < found[5.0]["masked"] - besides < 2 * 5.1 < found[None]["masked"] - besides


@pytest.mark.parametrize("caps", [(5.0, None), (None, 30.0), (None, None)])
def test_a_cap_of_null_is_none_in_stock_code_too(caps: tuple[float | None, float | None], tmp_path: Path) -> None:
    own: dict[str, Any] = dict(zip(("attn_logit_softcapping", "final_logit_softcapping"), caps, strict=True))
    model = tiny.build("gemma2", num_hidden_layers=1, **own)
    source = tiny.save(model, tmp_path / "source")
    layout = agreed_layout(open_checkpoint(source))
    assert layout.head is not None
    [attention] = [w for w in layout.topology if isinstance(w, Attention)]
    assert (layout.cap(attention), layout.cap(layout.head)) == caps


def test_gemmas_gelu_is_the_approximation_that_stock_code_takes_for_it(tmp_path: Path) -> None:
    model = tiny.build("gemma", num_hidden_layers=1)
    source = ModelTensors(model)
    source.config["hidden_act"] = "gelu"
    found = [w.activation for w in resolve(source).topology if isinstance(w, FeedForward)]
    assert found == ["gelu_pytorch_tanh"]
    folder = tiny.save(model, tmp_path / "source")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"gelu_pytorch_tanh"', '"gelu"'))
    assert '"hidden_act": "gelu"' in config.read_text()
    agreed_layout(open_checkpoint(folder))


def test_of_gemmas_gains_only_a_tied_heads_round(tmp_path: Path) -> None:
    source = tiny.save(tiny.build("gemma", tie_word_embeddings=False), tmp_path / "source")
    result = convert(source, tmp_path / "out", run_model=False)
    assert result.plan.residual_exponent < 0 and result.plan.drift is None
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    norms = [name for name in before if name.endswith("norm.weight")]
    assert len(norms) == 5 and all(torch.equal(after[name].bfloat16(), before[name]) for name in norms)
    moved = [t.name for t in layout_of(tiny.build("gemma")).tensors.values() if t.offset and any(t.axes)]
    assert moved == ["model.norm.weight"]


def test_keys_with_dots_are_of_configs_inside_a_config() -> None:
    config = {"a": 1, "encoder": {"b": 2, "deep": {"c": None}}}
    assert looked_up(config, "a") == 1 and looked_up(config, "encoder.b") == 2
    assert looked_up(config, "encoder.deep.c", 3) is None and looked_up(config, "encoder.d", 3) == 3
    assert looked_up(config, "a.b", 3) == 3
    changed = with_value(config, "encoder.deep.c", 5)
    assert changed == {"a": 1, "encoder": {"b": 2, "deep": {"c": 5}}}
    assert config["encoder"] == {"b": 2, "deep": {"c": None}}
    assert with_value({}, "x.y", 1) == {"x": {"y": 1}}
    assert without_value(changed, "encoder.deep.c") == {"a": 1, "encoder": {"b": 2, "deep": {}}}
    assert without_value(changed, "a") == {"encoder": changed["encoder"]} and without_value(changed, "a.b") == changed
    assert without_value(config, "encoder.d.c") == config
    after = with_value(changed, "encoder.new", [7]) | {"a": {"b": 1}}
    assert changes(config, after) == {
        "a": {"before": 1, "after": {"b": 1}},
        "encoder.deep.c": {"before": None, "after": 5},
        "encoder.new": {"after": [7]},
    }


def test_both_stacks_norms_get_the_scaled_eps_and_undo_takes_it_back(tmp_path: Path) -> None:
    source = tiny.save(tiny.build("t5gemma"), tmp_path / "source")
    result = convert(source, tmp_path / "out", run_model=False)
    r = result.plan.residual_exponent
    before, after = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("source", "out"))
    assert r < 0 and result.plan.eps == 1e-6 * 4.0**r
    for stack in ("encoder", "decoder"):
        assert after[stack]["rms_norm_eps"] == before[stack]["rms_norm_eps"] * 4.0**r
        base = before[stack]["rope_parameters"]["rope_theta"]
        told = {"rms_norm_eps": after[stack]["rms_norm_eps"], "rope_theta": base}
        assert after[stack] == before[stack] | told
    told = result.report["source"]["config_changes"]
    assert {f"{stack}.rms_norm_eps" for stack in ("encoder", "decoder")} <= set(told) and "encoder" not in told
    wanted = edited_config(resolve(open_checkpoint(source)), result.plan)
    assert not [*different_config(wanted, after)]
    after["decoder"]["head_dim"] += 1
    written = (tmp_path / "out" / "config.json").read_bytes()
    (tmp_path / "out" / "config.json").write_text(json.dumps(after))
    [(name, _)] = different_config(wanted, after)
    assert name == "config.json, decoder.head_dim"
    (tmp_path / "out" / "config.json").write_bytes(written)
    undo(tmp_path / "out", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == before


def test_the_decoders_config_caps_the_logits() -> None:
    model = tiny.build("t5gemma")
    model.config.encoder.final_logit_softcapping, model.config.decoder.final_logit_softcapping = 20.0, 10.0
    layout = layout_of(model)
    assert layout.head is not None and layout.cap(layout.head) == 10.0
    model.lm_head.out_proj.weight.data *= 100
    ids = torch.arange(8)[None]
    assert 9.9 < float(model(input_ids=ids, decoder_input_ids=ids).logits.detach().amax()) <= 10.0


def test_what_a_feed_forward_adds_is_dropped_in_the_layers_own_dropout() -> None:
    model = tiny.build("t5gemma", dropout_rate=0.5)
    for name, parameter in model.named_parameters():
        if name.endswith(("post_self_attn_layernorm.weight", "post_cross_attn_layernorm.weight")):
            parameter.data.fill_(-1.0)
    _, certificate = certified(model, Arithmetic(train=True))
    for stack in ("encoder", "decoder"):
        at = f"model.{stack}.layers.0"
        added, dropped = (
            bound_at(certificate, f"{at}.{s}") for s in ("post_feedforward_layernorm:to#2", "dropout:mul")
        )
        assert dropped >= 2 * added > 0


@pytest.mark.parametrize(
    ("stack", "key", "value"),
    [
        *(("encoder", "query_pre_attn_scalar", 64), ("encoder", "head_dim", "10"), ("encoder", "attention_bias", True)),
        *(("decoder", "num_hidden_layers", 1), ("decoder", "rms_norm_eps", 1e-5), ("encoder", "vocab_size", 98)),
        ("decoder", "attn_logit_softcapping", -1.0),
    ],
)
def test_a_changed_key_inside_is_refused_or_read(stack: str, key: str, value: Any, tmp_path: Path) -> None:
    source = tiny.save(tiny.build("t5gemma"), tmp_path / "source")
    with rewritten(source / "config.json") as config:
        config[stack][key] = value
    if key == "query_pre_attn_scalar":
        layout = agreed_layout(open_checkpoint(source))
        scales = {w.at: layout.score_scale(w) for w in layout.topology if isinstance(w, Attention)}
        assert scales["model.encoder.layers.0.self_attn"] == 64**-0.5
        assert scales["model.decoder.layers.0.cross_attn"] == 7**-0.5
        return
    with pytest.raises(UserError):
        layout = agreed_layout(open_checkpoint(source))
        for w in layout.topology:
            assert not isinstance(w, Attention) or layout.cap(w) is None or layout.cap(w) == 5.0
