"""What T5Gemma has and no other family: a config for each stack inside its config, and an embedding for each."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.contract import certified, layout_of
from support.folders import rewritten

from bf16_to_fp16 import UserError, convert, undo
from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.bounds.attention import ScoreBounds, score_bounds
from bf16_to_fp16.bounds.linear import bound_linear, rms_normalised
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.conversion.replay import different_config
from bf16_to_fp16.families.configs import changes, looked_up, with_value, without_value
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.families.wiring import Attention
from bf16_to_fp16.measuring.agreement import agreed_layout
from bf16_to_fp16.rescaling.apply import edited_config
from bf16_to_fp16.rescaling.weights import ModelTensors


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
    assert r < 0
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
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("post_self_attn_layernorm.weight", "post_cross_attn_layernorm.weight")):
                parameter.fill_(-1.0)
    _, certificate = certified(model, Arithmetic(train=True))
    for stack in ("encoder", "decoder"):
        at = f"model.{stack}.layers.0"
        added, dropped = (certificate.at(f"{at}.{s}") for s in ("post_feedforward_layernorm:to#2", "dropout:mul"))
        assert added is not None and dropped is not None and dropped >= 2 * added > 0


@pytest.mark.parametrize(
    ("stack", "key", "value"),
    [
        *(("encoder", "query_pre_attn_scalar", 64), ("encoder", "head_dim", "10"), ("encoder", "attention_bias", True)),
        *(("decoder", "num_hidden_layers", 1), ("decoder", "rms_norm_eps", 1e-5), ("encoder", "vocab_size", 98)),
        ("decoder", "attn_logit_softcapping", -1.0),
    ],
)
def test_a_key_inside_that_says_something_else_is_refused_or_read(
    stack: str, key: str, value: Any, tmp_path: Path
) -> None:
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


def test_each_stack_begins_with_an_embedding_of_its_own() -> None:
    layout = layout_of(tiny.build("t5gemma"))
    tables = [layout.table(stack.ends) for stack in layout.stacks()]
    assert tables == ["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"]
    assert [layout.tensors[name].shape for name in tables] == [(97, 24), (97, 12)] and not layout.shares_table
    source = ModelTensors(tiny.build("t5gemma"))
    del source.tensors["model.encoder.embed_tokens.weight"]
    with pytest.raises(UserError, match=r"encoder\.embed_tokens\.weight is missing"):
        resolve(source)


def test_several_heads_of_queries_share_the_scores_bound_of_their_head_of_keys() -> None:
    """As if each stood alone with its keys."""
    generator = torch.Generator().manual_seed(0)
    source = rms_normalised(torch.rand(6, generator=generator).double() + 0.5, Arithmetic())
    queries, keys = torch.randn(12, 6, generator=generator), torch.randn(6, 6, generator=generator)

    def bounds(q: torch.Tensor, k: torch.Tensor) -> ScoreBounds:
        query, key = (bound_linear(source, rows, None, Arithmetic()) for rows in (q, k))
        return score_bounds(query, key, len(q) // 3, Arithmetic(), 0.5)

    whole = bounds(queries, keys)
    for head in range(4):
        alone = bounds(queries[3 * head : 3 * head + 3], keys[3 * (head // 2) : 3 * (head // 2) + 3])
        for name in ("product", "partial", "span"):
            assert float(getattr(whole, name)[head]) == pytest.approx(float(getattr(alone, name)[0]), rel=1e-12)
