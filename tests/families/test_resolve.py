"""Families: how they are chosen and tied, what is dropped or refused, and the walk along the stream."""

import math
from typing import Any

import pytest
import torch
from support import exhaustive, tiny
from support.contract import layout_of
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from bf16_to_fp16 import UserError
from bf16_to_fp16.families.configs import config_value, full_config, looked_up
from bf16_to_fp16.families.known import FAMILIES, family_of, stock_class
from bf16_to_fp16.families.layout import norms_inside, walk
from bf16_to_fp16.families.older_versions import differences, with_older_keys
from bf16_to_fp16.families.places import Place, layer_of, places, places_by_name
from bf16_to_fp16.families.resolve import ModelTensors, resolve
from bf16_to_fp16.families.types import Family
from bf16_to_fp16.measuring.stock import gives_probabilities, run_everywhere
from bf16_to_fp16.measuring.tap import Tap
from bf16_to_fp16.rescaling.apply import apply, writes
from bf16_to_fp16.rescaling.plan import Plan, inverse


def test_an_unknown_model_type_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="bert") as error:
        family_of({"model_type": "bert", "architectures": ["BertModel"]})
    assert all(f.model_type in str(error.value) for f in FAMILIES)


def test_no_class_or_an_unsupported_one_of_a_known_type_lists_the_known_ones_and_the_name_of_2020_is_one() -> None:
    with pytest.raises(UserError, match=r"T5ForImages.*T5EncoderModel"):
        family_of({"model_type": "t5", "architectures": ["T5ForImages"]})
    source = ModelTensors(tiny.build("t5"))
    del source.config["architectures"]
    with pytest.raises(UserError, match="T5EncoderModel"):
        resolve(source)
    assert stock_class({"model_type": "t5", "architectures": ["T5WithLMHeadModel"]}) == "T5ForConditionalGeneration"


def test_a_dtype_for_each_part_and_an_end_that_never_comes_are_taken_as_stock_code_takes_them() -> None:
    source = ModelTensors(tiny.build("gated"))
    source.config |= {"dtype": {"": "bfloat16"}, "eos_token_id": [1, -1]}
    assert CONFIG_MAPPING["t5"].from_dict(source.config).eos_token_id == [1, -1]
    assert resolve(source).family.name == "t5"


STATED: list[tuple[str, str, object]] = [
    *((kind, "attention_bias", True) for kind in ("gemma", "gemma2", "gemma3")),
    *(("gemma3", "attn_logit_softcapping", 50.0), ("olmoe", "clip_qkv", 8.0), ("glm4_moe", "n_group", 2)),
    *(("switch", "router_dtype", dtype) for dtype in ("float16", "bfloat16")),
]
"""Values for parts that no record states."""
OTHERS: list[tuple[str, str, object]] = [
    ("switch", "encoder_sparse_step", None),
    *(("gemma3", "head_dim", value) for value in (5, 0)),
    ("gemma3", "num_key_value_heads", 3),
    ("gemma3", "num_attention_heads", "4"),
    *(("qwen3_moe", "mlp_only_layers", value) for value in (3, "0")),
    *(("glm4", "intermediate_size", value) for value in ("37", 0, True, 36)),
]
"""Numbers that are none, or that weights and stock code do not bear."""
CAPS = (0.0, -30.0, True, "30", math.inf)
REFUSED = [
    *((*case, f"'{case[1]}' is {case[2]!r}") for case in STATED),
    *((*case, r"config\.json") for case in OTHERS),
    *(("gemma3", "final_logit_softcapping", cap, "'final_logit_softcapping'") for cap in CAPS),
    ("glm4_moe", "rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.25}, "rotates 3 of a head"),
]


@pytest.mark.parametrize(("kind", "key", "value", "said"), REFUSED)
def test_a_config_that_says_what_cannot_be_is_refused(kind: str, key: str, value: object, said: str) -> None:
    source = ModelTensors(tiny.build(kind))
    source.config = {**source.config, key: value}
    with pytest.raises(UserError, match=said):
        resolve(source)


def test_only_the_embeddings_own_values_that_the_config_does_not_call_apart_are_a_tied_head() -> None:
    """transformers 5 says that they are tied beside a head of its own."""
    source, other, own = (ModelTensors(m) for m in (tiny.t5(), tiny.untied(tiny.t5()), tiny.gated()))
    for each in (source, other, own):
        each.config["architectures"] = ["T5ForConditionalGeneration"]
    assert resolve(source).tied is True and resolve(other).tied is False
    source.config["tie_word_embeddings"] = False
    assert resolve(source).tied is False
    for flag in (True, False):
        own.config["tie_word_embeddings"] = flag
        assert resolve(own).tied is False
    source = ModelTensors(tiny.build("t5"))
    source._state["decoder.embed_tokens.weight"] = torch.zeros(97, 24)
    with pytest.raises(UserError, match=r"decoder\.embed_tokens\.weight differs"):
        resolve(source)


def test_an_explicit_output_scale_overrides_the_tie_flag() -> None:
    """transformers 5 writes tie_word_embeddings true and scale_decoder_outputs false beside a head of its own."""
    source = ModelTensors(tiny.build("gated"))
    source.config |= {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    assert resolve(source).head_scale == 1.0
    del source.config["scale_decoder_outputs"]
    assert resolve(source).head_scale == 24**-0.5


def test_what_a_stock_class_ignores_of_a_file_is_left_behind_with_the_reason() -> None:
    source = ModelTensors(tiny.build("gated"))
    source.config["architectures"] = ["T5EncoderModel"]
    layout = resolve(source)
    assert not layout.stock.decodes and not any(name.startswith("decoder.") for name in layout.tensors)
    assert layout.dropped["lm_head.weight"] == "T5EncoderModel ignores it"
    assert "decoder.block.0.layer.0.SelfAttention.q.weight" in layout.dropped
    source = ModelTensors(tiny.build("mbart-states"))
    shared = next(iter(source.tensors.values()))
    source.tensors |= dict.fromkeys(("lm_head.weight", "final_logits_bias"), shared)
    dropped = resolve(source).dropped
    assert dropped["lm_head.weight"] == dropped["final_logits_bias"] == "MBartModel ignores it"
    source = ModelTensors(tiny.build("t5"))
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    source.tensors[name] = next(iter(source.tensors.values()))
    assert resolve(source).dropped[name] == "transformers classes ignore it"


def test_a_plan_of_another_checkpoint_is_refused() -> None:
    layout = layout_of(tiny.build("gated"))
    signal = "encoder.block.0.layer.0.SelfAttention.value"
    exponents: tuple[dict[str, Any], ...] = ({signal.replace("0", "9", 1): 1}, {signal: [1] * 14}, {"logits": [1] * 9})
    exponents += ({"encoder.final_layer_norm.output": 1},)
    for plan in (Plan(family="pegasus"), *(Plan(family="t5", exponents=each) for each in exponents)):
        with pytest.raises(UserError, match=r"plan"):
            apply(tiny.build("gated"), layout, plan)


def test_a_gain_correction_is_written_and_taken_back_and_a_separated_t5_head_has_its_scale() -> None:
    model = tiny.build("pegasus")
    layout = resolve(source := ModelTensors(model))
    names = [f"{path}.weight" for path in layout.norms[:2]]
    before = {n: t.clone() for n, t in model.state_dict().items()}
    plan = Plan(family="pegasus", gain_correction={names[0]: 1.25, names[1]: 0.75})
    assert {w.name: w.gain for w in writes(source, layout, plan) if w.gain != 1} == plan.gain_correction
    assert inverse(plan).gain_correction == {names[0]: 0.8, names[1]: 1 / 0.75}
    apply(apply(model, layout, plan), layout, inverse(plan))
    assert all(torch.equal(t.bfloat16(), before[n].bfloat16()) for n, t in model.state_dict().items())
    layout = resolve(source := ModelTensors(tiny.build("t5", d_model=16)), untie=True)
    gains = {w.name: w.gain for w in writes(source, layout, Plan(family="t5")) if w.gain != 1}
    assert gains == {"lm_head.weight": 0.25}


@pytest.mark.parametrize(
    ("changes", "is_choice"),
    [
        ({"num_labels": 3}, True),
        ({"num_labels": 1}, False),
        *(({"num_labels": 3, "problem_type": kind}, False) for kind in ("regression", "multi_label_classification")),
    ],
)
def test_labels_are_a_choice_where_there_are_several_and_one_is_meant(changes: dict[str, Any], is_choice: bool) -> None:
    model = tiny.build("t5-classifier", **changes)
    assert layout_of(model).gives_probabilities is gives_probabilities(model.config) is is_choice


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_a_config_leaves_out_has_stock_codes_value(family: Family) -> None:
    values = full_config(family, {})
    keys = [key for key in (*family.config_keys, *family.eps_keys) if values[key.partition(".")[0]] is not None]
    assert [key for key in keys if looked_up(values, key, ...) is ...] == []


@pytest.mark.parametrize("base", [1e4, 500.0])
def test_kinds_of_layers_that_4_57_turns_by_one_base_are_said_where_theirs_differ(base: float) -> None:
    layout = layout_of(tiny.build("olmo3"))
    positions = {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": base}}
    written = with_older_keys(layout.family, {"rope_parameters": positions})
    assert written["rope_theta"] == base
    assert [("full_attention" in note) for note in differences(layout, written)] == [True] * (base != 1e4)


def test_every_family_with_one_kind_of_rotation_tells_transformers_4_its_base() -> None:
    for family in FAMILIES:
        rotation = CONFIG_MAPPING[family.model_type]().to_dict().get("rope_parameters") or {}
        if "rope_theta" in rotation and not any(isinstance(value, dict) for value in rotation.values()):
            written = with_older_keys(family, {"rope_parameters": {"rope_theta": 500.0}})
            assert written.get("rope_theta") == 500.0, family.name


@pytest.mark.parametrize(
    ("rotation", "told", "differs"),
    [
        ({"rope_type": "default", "rope_theta": 500.0}, {"rope_theta": 500.0}, False),
        ({"rope_theta": 500.0, "partial_rotary_factor": 0.5}, {"rope_theta": 500.0}, False),
        ({"rope_type": "linear", "factor": 4.0, "rope_theta": 5.0}, {"rope_theta", "rope_scaling"}, False),
        ({"rope_type": "longrope", "attention_factor": 1.0, "rope_theta": 5.0}, {"rope_theta"}, True),
        ({"rope_type": "proportional", "rope_theta": 5.0}, {"rope_theta"}, True),
        ({"full_attention": {"rope_type": "default", "rope_theta": 5.0}}, {}, True),
    ],
)
def test_what_only_one_version_reads_is_told(rotation: dict[str, Any], told: Any, differs: bool) -> None:
    layout = layout_of(tiny.build("llama"))
    config = {"rope_parameters": rotation}
    written = with_older_keys(layout.family, config)
    added = {key: value for key, value in written.items() if key not in config}
    assert added == told if isinstance(told, dict) else set(added) == told
    assert [("rotary" in note) for note in differences(layout, written)] == [True] * differs


@pytest.mark.parametrize("name", ["llama", "qwen2", "ernie4_5", "phi3"])
def test_null_for_heads_of_keys_is_one_for_each_head_of_queries_as_in_stock_code(name: str) -> None:
    written = {"model_type": name, "num_attention_heads": 4, "num_key_value_heads": None}
    stock = CONFIG_MAPPING[name](**written)
    assert config_value(family_of(written), written, "num_key_value_heads") == stock.num_key_value_heads == 4


@pytest.mark.parametrize("kind", exhaustive.beyond(tiny.CORE, tiny.KINDS))
def test_readers_run_in_the_order_of_the_walk_and_read_the_sites_that_it_names(kind: str) -> None:
    model = tiny.build(kind, 3, factor=1.0, dtype=torch.float32)
    model.set_attn_implementation("eager")
    layout = resolve(ModelTensors(model))
    readers = list(walk(layout))
    entrances = {reader.entrance: model.get_submodule(reader.entrance) for reader in readers}
    ran: list[tuple[str, Tensor]] = []
    made: dict[str, Tensor] = {}

    def record(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            ran.append((path, args[0].detach().clone()))

        return hook

    for path, module in entrances.items():
        module.register_forward_pre_hook(record(path))
    with Tap(model, lambda name, x: made.__setitem__(name, x.detach().clone())):
        ids = torch.arange(10).view(2, 5)
        decoder = {"decoder_input_ids": ids[:, :3]} if layout.stock.decodes else {}
        run_everywhere(model, layout, input_ids=ids, **decoder)
    assert [path for path, _ in ran] == [reader.entrance for reader in readers]
    for reader, (_, read) in zip(readers, ran, strict=True):
        # The embedding of both stacks may be one module, which the tap names once.
        if not reader.is_first or reader.site in made:
            assert torch.equal(made[reader.site], read), reader.site


@pytest.mark.parametrize("kind", exhaustive.beyond(tiny.FIRST, tiny.KINDS))
def test_each_stack_begins_once_and_ends_with_a_norm_that_no_sublayer_follows(kind: str) -> None:
    layout = resolve(ModelTensors(tiny.build(kind)))
    readers = list(walk(layout))
    assert [stack.is_encoder for stack in layout.stacks()] == ([True] if not layout.stock.decodes else [True, False])
    for stack in layout.stacks():
        inside = [reader for reader in readers if reader.stack == stack]
        assert [reader.is_first for reader in inside] == [True] + [False] * len(stack.sublayers)
        assert [reader.sublayer for reader in inside] == [*stack.sublayers, None]
        assert inside[-1].norm == stack.ends.norm
    inside_sublayers = {norm for reader in readers for norm in norms_inside(reader.sublayer)}
    assert {reader.norm for reader in readers if reader.norm} | inside_sublayers == set(layout.norms)
    assert {reader.entrance for reader in readers} <= set(layout.entrances)


def test_the_names_of_sites_say_layer_stack_block_and_operation_of_a_class_that_no_family_knows() -> None:
    found = places_by_name(
        ["encoder.h.3.attn:scores", "encoder.h.3.attn:mul#2", "h.1.mlp:mul", "h.1.mlp.up", "norm:pow"]
    )
    places = [(p.stack, p.block, p.role) for p in found.values()]
    scores = ("encoder", 3, "scores")
    assert places == [scores, scores, (None, 1, "product"), (None, 1, "linear"), (None, None, None)]
    assert layer_of("encoder.block.3.layer.1:add#2") == "encoder.block.3"
    assert layer_of("model.decoder.layers.0.fc1") == "model.decoder.layers.0"
    assert layer_of("lm_head") == "lm_head"


def test_a_layout_says_for_what_each_norm_and_output_is() -> None:
    place = places(layout_of(tiny.build("gemma3")))
    at = "model.layers.0"
    roles: dict[str, str | None] = {
        "input_layernorm": "attention",
        "self_attn.q_norm": "queries",
        "self_attn.k_norm": "keys",
    }
    roles |= {"self_attn.o_proj": "attention", "post_attention_layernorm": "behind attention"}
    roles |= {"pre_feedforward_layernorm": "feed-forward", "mlp.down_proj": "feed-forward", "mlp.gate_proj": None}
    assert {name: place(f"{at}.{name}") for name in roles} == {
        name: Place("decoder", 0, role) for name, role in roles.items()
    }
    assert place("lm_head") == Place("decoder") and place(f"{at}:add") == Place("decoder", 0)
    crossing = places(layout_of(tiny.build("t5")))
    assert crossing("decoder.block.0.layer.1.EncDecAttention:scores") == Place("decoder", 0, "cross-attention")
    assert crossing("encoder.block.0.layer.0.layer_norm") == Place("encoder", 0, "attention")
    assert crossing("lm_head") == Place()
