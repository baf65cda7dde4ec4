"""``make_fp16_safe``: a model in memory made safe for fp16 AMP before a training, and undone after it, exactly."""

import copy
import json
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from support import exhaustive, tiny
from support.contract import certified, outputs
from support.inside import bound
from support.steps import same, weights

from bf16_to_fp16 import UserError, certify, convert, make_fp16_safe, rescale
from bf16_to_fp16.conversion.make_safe import layout_under
from bf16_to_fp16.measuring.stock import load

DEMO = Path(__file__).parents[2] / "bf16_to_fp16" / "demo_data" / "t5-gated-bytes"
SOME = [(kind, torch.float32) for kind in ("gated", "pegasus", "gemma2", "glm4")]
SOME += [("t5", torch.float64)]
OTHERS = ("t5", "llama", "umt5", "t5-encoder", "t5-classifier", "t5-spans", "longt5", "gemma3", "t5gemma")


@pytest.mark.parametrize(
    ("kind", "dtype"), exhaustive.beyond(SOME, [*SOME, *((kind, torch.float32) for kind in OTHERS)])
)
def test_outputs_keep_every_bit_and_undo_gives_every_weight_back(kind: str, dtype: torch.dtype) -> None:
    model = tiny.small(kind).train().to(dtype)
    before, after = weights(model), copy.deepcopy(model)
    config = model.config.to_dict()
    safe = make_fp16_safe(after)
    assert after.training and safe.changed and safe.plan.residual_exponent < 0 and not same(before, weights(after))
    assert safe.certified is (kind != "pegasus")  # by plans that hold bounds, not only what was observed
    assert all(torch.equal(a, b) for a, b in zip(outputs(model.eval()), outputs(after.eval()), strict=True))
    if kind in ("t5", "gated"):  # a tied head stays tied, and one of its own apart
        assert (after.lm_head.weight is after.shared.weight is after.encoder.embed_tokens.weight) == (kind == "t5")
    assert safe.undo(after) is after
    assert same(before, weights(after)) and after.config.to_dict() == config
    assert all(torch.equal(a, b) for a, b in zip(outputs(model), outputs(after), strict=True))


def test_pegasus_keeps_every_bit_where_its_plan_would_correct_gains() -> None:
    """In memory the eps of LayerNorm is scaled as well, so nothing drifts that a correction should take out."""
    for take in (make_fp16_safe, rescale):
        model = tiny.small("pegasus", factor=60000.0, encoder_layers=1)
        before = outputs(model)
        take(model)
        assert all(torch.equal(a, b) for a, b in zip(before, outputs(model), strict=True))


def test_in_memory_the_norm_of_an_embedding_keeps_its_eps() -> None:
    """What it reads is not scaled, so its bound is the file's; its stream's norms have the eps of the scaled stream."""
    model = tiny.small("mbart")
    before = outputs(model)
    safe = make_fp16_safe(model)
    assert safe.plan.residual_exponent < 0
    assert all(torch.equal(a, b) for a, b in zip(before, outputs(model), strict=True))
    layout, certificate = certified(model)
    after = bound(layout_under(layout, safe.plan), model.state_dict().__getitem__)
    exponents = [safe.plan.stream_exponent(stream) for stream in layout.streams]
    assert len(exponents) == 2
    for at, exponent in zip((stack.ends.at for stack in layout.stacks()), exponents, strict=True):
        statistic = f"{at}.layernorm_embedding:layer_norm.2"
        assert after.at(statistic) == certificate.at(statistic) == pytest.approx(1e-5**-0.5, rel=1e-3)
        norm = f"{at}.layer_norm"
        assert model.get_submodule(norm).eps == 1e-5 * 4.0**exponent
        assert after.at(f"{norm}:layer_norm.2") == pytest.approx(model.get_submodule(norm).eps ** -0.5, rel=1e-3)


def test_the_certificate_is_that_of_the_weights_as_saved(tmp_path: Path) -> None:
    """What is claimed in memory, ``certify`` finds out from the folder that stock code saves."""
    model = tiny.small("gated")
    safe = make_fp16_safe(model)
    model.save_pretrained(tmp_path / "saved")
    found = certify(tmp_path / "saved", target="train")["certificate"]
    assert safe.certified is found["holds"] is True
    tightest = min(found["sites"], key=lambda site: site["headroom_bits"])
    assert (tightest["name"], tightest["headroom_bits"]) == (safe.tightest, pytest.approx(safe.headroom_bits, abs=0.02))
    assert "Certified in training" in str(safe) and "training moves them" in str(safe)


def test_where_no_certificate_can_be_had_it_says_so() -> None:
    model = tiny.small("gated")
    for block in model.encoder.block:
        block.layer[1].DenseReluDense.wi_0.weight.data.mul_(100)  # what enters a GELU moves under no plan
    safe = make_fp16_safe(model)
    assert not safe.certified and "wi_0" in safe.tightest and "Not certified in training" in str(safe)
    assert safe.passed == "" and "safe on what was observed only" in str(safe)


def test_where_what_was_observed_overflows_all_the_same_it_says_so() -> None:
    model = tiny.small("pegasus")
    for layer in model.model.encoder.layers:
        layer.self_attn.k_proj.weight.data.mul_(3000)
        layer.self_attn.q_proj.weight.data.mul_(3000)
    safe = make_fp16_safe(model, target="half")
    assert safe.passed == "model.encoder.layers.0.self_attn" and "safe on" not in str(safe)
    assert "exceed 65504, and rescaling alone cannot prevent that: use convert, which" in str(safe)


def test_a_model_is_made_safe_once_and_undone_once_and_not_in_fp16() -> None:
    model = tiny.small("t5-encoder", num_layers=1)
    first, now = make_fp16_safe(model), weights(model)
    assert make_fp16_safe(model) is first and same(now, weights(model))
    first.undo(model)
    with pytest.raises(UserError, match="T5EncoderModel was not rescaled"):
        first.undo(model)
    cast = make_fp16_safe(model)
    with pytest.raises(UserError, match="undo before half"):
        cast.undo(model.half())


def apart(model: Any) -> None:
    """Put a copy in the head, which would be taken for the embedding and left unscaled."""
    model.lm_head.weight = torch.nn.Parameter(model.shared.weight.detach().clone())


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (apart, r"lm_head\.weight has the values .* not tied"),
        (lambda model: model.half(), r"dtype=torch\.float32"),
        (lambda model: model.to("meta"), "or its weights are not loaded"),
    ],
)
def test_a_model_that_cannot_be_made_safe_is_refused_and_stays_as_it_is(change: Any, refusal: str) -> None:
    model = tiny.small("t5")
    change(model)
    before = weights(model)
    with pytest.raises(UserError, match=refusal):
        make_fp16_safe(model)
    now = model.state_dict()
    assert all(now[n] is t or t.is_meta or torch.equal(t.nan_to_num(), now[n].nan_to_num()) for n, t in before.items())


def test_other_models_are_one_line_that_says_what_to_use_in_their_place() -> None:
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=11))
    stack = tiny.small("t5").encoder
    for model in (gpt, stack, torch.nn.Linear(2, 2)):
        with pytest.raises(UserError, match="ActivationPenalty, which takes any model") as caught:
            make_fp16_safe(model)
        assert "\n" not in str(caught.value) and "T5ForConditionalGeneration" in str(caught.value)
    with pytest.raises(UserError, match=r"^str is no model; load it with from_pretrained first"):
        make_fp16_safe("folder")


@pytest.mark.parametrize("prepare", [make_fp16_safe, rescale])
def test_a_target_or_a_margin_that_cannot_be_had_is_refused_as_on_the_command_line(prepare: Any) -> None:
    model = tiny.small("t5-encoder", num_layers=1)
    for margin in (-1, 99, math.nan, "x"):
        with pytest.raises(UserError, match=f"a margin of {margin} bits cannot be kept; give 0 to 12"):
            prepare(model, margin_bits=margin)
    with pytest.raises(UserError, match="target 'fp8' is unknown"):
        prepare(model, target="fp8")
    prepare(model, margin_bits=12)
    with pytest.raises(UserError, match=r"dtype=torch\.float32"):
        prepare(tiny.small("t5").bfloat16())


def test_a_model_with_an_adapter_is_refused_with_the_order_to_go_in() -> None:
    model = tiny.small("gated")
    safe = make_fp16_safe(model)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q"]))
    for inside in (wrapped, model):
        with pytest.raises(UserError, match="before get_peft_model"):
            make_fp16_safe(inside)
        with pytest.raises(UserError, match=r"adapter\(model, OUT\) saves a LoRA; call undo on what unload"):
            safe.undo(inside)
    merged = wrapped.merge_and_unload()
    moved = outputs(merged)
    assert all(torch.equal(a, b) for a, b in zip(moved, outputs(safe.undo(merged)), strict=True))


def train(wrapped: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                weight.add_(torch.randn(weight.shape, generator=generator) / 4)


@pytest.mark.parametrize(("kind", "converted"), [("t5", False), ("llama", True)])
def test_an_adapter_trained_on_it_is_written_for_the_original(kind: str, converted: bool, tmp_path: Path) -> None:
    source, names = tiny.save(tiny.small(kind), tmp_path / "source"), {"t5": ["q", "o", "wo"], "llama": ["v_proj"]}
    if converted:
        convert(source, tmp_path / "out", stream=-3, run_model=False)
    model = load(tmp_path / "out" if converted else source, torch.float32)
    safe = make_fp16_safe(model)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=names[kind]))
    train(wrapped)
    wanted = outputs(wrapped)
    assert safe.plan.moves and safe.adapter(wrapped, tmp_path / "adapter") == tmp_path / "adapter"
    with pytest.raises(UserError, match="exists"):
        safe.adapter(wrapped, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"].endswith("source")
    base = safe.undo(wrapped.unload())  # at the original's scale, as fp16 holds it where that was converted
    assert not all(torch.equal(a, b) for a, b in zip(wanted[:1], outputs(base)[:1], strict=True))
    found = outputs(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    assert torch.equal(wanted[0], found[0])


def test_a_plain_save_warns_of_its_scale_and_save_writes_the_originals(tmp_path: Path) -> None:
    source = tiny.save(tiny.build("gemma3", num_hidden_layers=1), tmp_path / "source", torch.float32)
    model = load(source, torch.float32)
    before, wanted, safe = weights(model), outputs(model), make_fp16_safe(model)
    moved = weights(model)
    with pytest.warns(UserWarning, match=r"saved at that scale; safe\.save"):
        model.save_pretrained(tmp_path / "moved")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        safe.save(model, tmp_path / "out", max_shard_size="20KB")
    assert same(moved, weights(model)) and not same(moved, before)
    again, config = load(tmp_path / "out", torch.float32), json.loads((tmp_path / "out" / "config.json").read_text())
    assert same(before, weights(again)) and "bf16_to_fp16" not in config
    assert all(torch.equal(a, b) for a, b in zip(wanted, outputs(again), strict=True))
    copied = pickle.loads(pickle.dumps(model))
    with pytest.warns(UserWarning, match="saved at that scale"):
        copied.save_pretrained(tmp_path / "copied")
    assert same(moved, weights(load(tmp_path / "copied", torch.float32)))
    safe.undo(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.save_pretrained(tmp_path / "undone")


def test_a_pegasus_saved_before_it_is_undone_drifts_and_after_it_does_not(tmp_path: Path) -> None:
    model = tiny.small("pegasus", factor=40000.0)
    model.save_pretrained(tmp_path / "source")
    safe = make_fp16_safe(model)
    model.save_pretrained(tmp_path / "safe")
    safe.undo(model).save_pretrained(tmp_path / "undone")
    loaded = {name: load(tmp_path / name, torch.float32) for name in ("source", "safe", "undone")}
    reference = outputs(loaded["source"])[0]
    assert torch.equal(outputs(loaded["undone"])[0], reference)
    drift = float((outputs(loaded["safe"])[0] - reference).abs().max() / reference.abs().max())
    assert 0 < drift < 0.1
    with pytest.raises(UserError, match="was not rescaled by this result's plan"):  # nothing in its config tells
        safe.undo(loaded["safe"])


def test_certified_weights_are_left_alone_though_another_plan_would_hold_more_bits() -> None:
    model = tiny.small("gated", factor=1.0)
    for block in model.encoder.block:
        block.layer[0].SelfAttention.v.weight.data.mul_(2.0**-20)
    other, before = copy.deepcopy(model), weights(model)
    safe = make_fp16_safe(model)
    assert safe.certified and not safe.changed and same(before, weights(model))
    assert rescale(other, target="train").exponents and not same(before, weights(other))


def test_the_plan_is_the_same_in_train_mode_and_draws_no_random_number() -> None:
    plans = []
    for training in (False, True):
        model = tiny.small("t5", num_layers=1, dropout_rate=0.6).train(training)
        state = torch.get_rng_state()
        plans.append(rescale(model))
        assert torch.equal(state, torch.get_rng_state()) and model.training is training
    assert plans[0] == plans[1]


@pytest.mark.parametrize("kind", ["pegasus", "llama"])
def test_embeddings_that_are_given_need_the_factor_that_it_says(kind: str) -> None:
    """A larger model that looks up or makes embeddings itself would be wrong in silence."""
    model = tiny.small(kind, factor=900.0)
    ids = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(0))
    given = model.get_input_embeddings()(ids).detach() * getattr(model.get_encoder(), "embed_scale", 1.0)
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        expected = model(inputs_embeds=given, **more).logits
        safe = make_fp16_safe(model)
        factor = safe.inputs["inputs_embeds"]
        assert isinstance(factor, int) and factor and f"by 2^{factor}" in str(safe)
        with pytest.warns(UserWarning, match=f"Multiply inputs_embeds by 2.{factor}, unless"):
            assert torch.equal(model(inputs_embeds=given * 2.0**factor, **more).logits, expected)
        if more:
            with pytest.warns(UserWarning, match="inputs_embeds"):
                model.get_encoder()(inputs_embeds=given)
        pickle.loads(pickle.dumps(model))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(input_ids=ids, **more)
            safe.undo(model)
            assert torch.equal(model(inputs_embeds=given, **more).logits, expected)


@pytest.mark.parametrize(("kind", "mend"), [("blip", "train it in bf16"), ("gemma3-images", "give the Gemma3For")])
def test_a_part_of_a_larger_model_is_refused_and_left(kind: str, mend: str) -> None:
    if kind == "blip":
        text = transformers.T5Config(**tiny.T5_SHAPE)
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        vision, reader = (sizes | {"image_size": 8, "patch_size": 4}), sizes | {"encoder_hidden_size": 16}
        config = transformers.Blip2Config(vision_config=vision, qformer_config=reader, text_config=text.to_dict())
        whole = transformers.Blip2ForConditionalGeneration(config)
        part = whole.language_model
    else:
        whole = tiny.build(kind)
        part = whole.model
    before = {name: weight.clone() for name, weight in part.state_dict().items()}
    with pytest.raises(UserError, match=mend):
        make_fp16_safe(part)
    assert all(torch.equal(weight, before[name]) for name, weight in part.state_dict().items())


def test_an_encoder_whose_last_states_another_model_reads_is_taken() -> None:
    class Reader(transformers.PreTrainedModel):
        config_class = transformers.BertConfig

        def __init__(self, encoder: Any) -> None:
            super().__init__(transformers.BertConfig())
            self.encoder = encoder

    reader = Reader(tiny.build("t5-encoder"))
    assert make_fp16_safe(reader.encoder).plan.residual_exponent < 0
