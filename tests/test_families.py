"""What every family promises: each tensor classified, each coupling exact in fp32, each plan undone to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch

from bf16_to_fp16 import UserError
from bf16_to_fp16.conversion import ModelTensors
from bf16_to_fp16.families import FAMILIES, Kind, Layout, family_of, resolve, stock_class
from bf16_to_fp16.families.types import RESIDUAL
from bf16_to_fp16.rescaling import Plan, apply, inverse, writes

MOVABLE = (Kind.RESIDUAL, Kind.NORM, Kind.VALUE, Kind.QUERY_KEY, Kind.NEURON)


def outputs(model: Any) -> tuple[torch.Tensor, ...]:
    """Return the logits, or the last hidden state, of a padded batch, with the encoder's output where there are
    both."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 97, (3, 17), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    with torch.no_grad():
        if not hasattr(model, "lm_head"):
            return (model(input_ids=ids, attention_mask=mask).last_hidden_state,)
        out = model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :11])
        return out.logits, out.encoder_last_hidden_state


def random_plan(layout: Layout, kinds: tuple[Kind, ...], seed: int = 0) -> Plan:
    """Return a plan that moves every channel of the given kinds by −3 to 3, and the residual stream by −4."""
    generator = torch.Generator().manual_seed(seed)
    exponents: dict[str, int | list[int]] = {
        name: torch.randint(-3, 4, (signal.size,), generator=generator).tolist()
        for name, signal in layout.signals.items()
        if signal.kind in kinds and signal.kind is not Kind.RESIDUAL
    }
    r = -4 if Kind.RESIDUAL in kinds else 0
    return Plan(family=layout.family.name, residual_exponent=r, exponents=exponents)


class FamilyContract:
    """What a family's declaration must keep; a subclass names the model that stands for it."""

    kind: str

    @pytest.fixture
    def model(self) -> Any:
        return tiny.build(self.kind)

    @pytest.fixture
    def layout(self, model: Any) -> Layout:
        return resolve(ModelTensors(model))

    def test_every_parameter_is_classified(self, model: Any, layout: Layout) -> None:
        names = set(model.state_dict()) - set(layout.dropped)
        assert names == set(layout.tensors)

    @pytest.mark.parametrize("kind", MOVABLE, ids=str)
    def test_each_coupling_leaves_fp32_outputs_bit_identical(self, model: Any, layout: Layout, kind: Kind) -> None:
        before = outputs(model)
        plan = random_plan(layout, (kind,))
        moved = {name: t.clone() for name, t in model.state_dict().items()}
        apply(model, layout, plan)
        movable = any(signal.kind is kind for signal in layout.signals.values())
        assert movable == any(not torch.equal(moved[name], t) for name, t in model.state_dict().items())
        assert all(torch.equal(a, b) for a, b in zip(before, outputs(model), strict=True))

    def test_all_couplings_at_once_leave_fp32_outputs_bit_identical(self, model: Any, layout: Layout) -> None:
        before = outputs(model)
        apply(model, layout, random_plan(layout, MOVABLE, seed=1))
        assert all(torch.equal(a, b) for a, b in zip(before, outputs(model), strict=True))

    def test_the_norms_eps_goes_with_the_square_of_a_quiet_stream(self) -> None:
        """With a variance not far above eps, the outputs keep their bits with eps·4^r and lose them with eps."""
        model = tiny.build(self.kind, factor=1e-3)
        layout = resolve(ModelTensors(model))
        before = outputs(model)
        apply(model, layout, random_plan(layout, (Kind.RESIDUAL,)))
        assert all(torch.equal(a, b) for a, b in zip(before, outputs(model), strict=True))
        norms: list[Any] = [model.get_submodule(path) for path in layout.norms]
        attribute = "eps" if self.kind == "pegasus" else "variance_epsilon"
        assert {getattr(norm, attribute) for norm in norms} == {layout.eps * 4.0**-4}
        for norm in norms:
            setattr(norm, attribute, layout.eps)
        assert not torch.equal(before[0], outputs(model)[0])

    def test_every_axis_matters(self, model: Any, layout: Layout) -> None:
        """Leaving out any one declared axis changes the outputs, so a wrong declaration cannot pass the tests above."""
        before = outputs(model)
        plan = random_plan(layout, MOVABLE, seed=2)
        for name, tensor in layout.tensors.items():
            for position, axis in enumerate(tensor.axes):
                if axis is None:
                    continue
                axes = tuple(None if p == position else a for p, a in enumerate(tensor.axes))
                broken = replace(layout, tensors={**layout.tensors, name: replace(tensor, axes=axes)})
                copy = tiny.build(self.kind)
                apply(copy, broken, plan)
                after = outputs(copy)
                assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), (name, position)

    def test_the_inverse_plan_restores_every_bit(self, model: Any, layout: Layout) -> None:
        before = {name: t.clone() for name, t in model.state_dict().items()}
        plan = random_plan(layout, MOVABLE, seed=3)
        apply(apply(model, layout, plan), layout, inverse(plan))
        assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())

    def test_a_missing_tensor_is_named(self, model: Any) -> None:
        source = ModelTensors(model)
        for name in [n for n in source.tensors if n not in ("lm_head.weight", "final_logits_bias")]:
            if "embed_tokens" in name or "embed_positions" in name:
                continue
            tensors = {k: v for k, v in source.tensors.items() if k != name}
            if name.endswith("shared.weight"):
                tensors = {k: v for k, v in tensors.items() if "embed_tokens" not in k and k != "lm_head.weight"}
            source_without = ModelTensors(model)
            source_without.tensors = tensors
            with pytest.raises(UserError, match=name.replace(".", r"\.")):
                resolve(source_without)

    def test_an_unknown_tensor_is_named(self, model: Any) -> None:
        source = ModelTensors(model)
        source.tensors["encoder.block.7.surprise.weight"] = next(iter(source.tensors.values()))
        with pytest.raises(UserError, match=r"encoder\.block\.7\.surprise"):
            resolve(source)

    def test_a_wrong_shape_is_named(self, model: Any) -> None:
        source = ModelTensors(model)
        name = next(n for n in source.tensors if n.endswith(("q.weight", "q_proj.weight")))
        source.tensors[name] = replace(source.tensors[name], shape=(7, 7))
        with pytest.raises(UserError, match=name.replace(".", r"\.")):
            resolve(source)


class TestT5(FamilyContract):
    kind = "t5"


class TestT5Gated(FamilyContract):
    kind = "gated"


class TestT5GatedSiLU(FamilyContract):
    kind = "silu"


class TestT5UngatedGELU(FamilyContract):
    kind = "gelu"


class TestMT5(FamilyContract):
    kind = "mt5"


class TestUMT5(FamilyContract):
    kind = "umt5"


class TestPegasus(FamilyContract):
    kind = "pegasus"


class TestT5Encoder(FamilyContract):
    kind = "t5-encoder"


class TestMT5Encoder(FamilyContract):
    kind = "mt5-encoder"


class TestUMT5Encoder(FamilyContract):
    kind = "umt5-encoder"


def test_factors_that_are_not_powers_of_two_are_not_exact() -> None:
    """The control of every bit-identity above: scaled by 0.3 the same coupling changes bits."""
    model = tiny.build("gated")
    before = outputs(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("wi_1.weight"):
                weight.mul_(0.3)
            if name.endswith("wo.weight"):
                weight.div_(0.3)
    after = outputs(model)
    assert torch.allclose(before[0], after[0], rtol=1e-3, atol=1e-3)
    assert not torch.equal(before[0], after[0])


def test_an_unknown_model_type_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="bert") as error:
        family_of({"model_type": "bert", "architectures": ["BertModel"]})
    assert all(f.model_type in str(error.value) for f in FAMILIES)


def test_an_unsupported_class_of_a_known_type_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"T5ForTokenClassification.*T5EncoderModel"):
        family_of({"model_type": "t5", "architectures": ["T5ForTokenClassification"]})


def test_a_stored_copy_of_the_embedding_is_a_tied_head_and_a_different_one_is_not() -> None:
    model = tiny.build("t5")
    assert resolve(ModelTensors(model)).tied is True
    other = tiny.untied(tiny.build("t5"))
    assert resolve(ModelTensors(other)).tied is False


def test_a_head_that_the_config_calls_apart_is_apart_though_its_values_are_the_embeddings() -> None:
    source = ModelTensors(tiny.build("t5"))
    source.config["tie_word_embeddings"] = False
    assert resolve(source).tied is False


def test_an_explicit_output_scale_overrides_the_tie_flag() -> None:
    """transformers 5 writes tie_word_embeddings true and scale_decoder_outputs false beside a head of its own."""
    source = ModelTensors(tiny.build("gated"))
    source.config |= {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    assert resolve(source).head_scale == 1.0
    del source.config["scale_decoder_outputs"]
    assert resolve(source).head_scale == 24**-0.5


def test_an_encoder_class_leaves_a_files_decoder_behind_and_says_so() -> None:
    source = ModelTensors(tiny.build("gated"))
    source.config["architectures"] = ["T5EncoderModel"]
    layout = resolve(source)
    assert layout.encoder_only and not any(name.startswith("decoder.") for name in layout.tensors)
    assert layout.dropped["lm_head.weight"] == "T5EncoderModel ignores it"
    assert "decoder.block.0.layer.0.SelfAttention.q.weight" in layout.dropped


def test_a_plan_of_another_checkpoint_is_refused() -> None:
    layout = resolve(ModelTensors(tiny.build("gated")))
    signal = "encoder.block.0.layer.0.SelfAttention.value"
    for plan in (
        Plan(family="pegasus"),
        Plan(family="t5", exponents={"encoder.block.9.layer.0.SelfAttention.value": 1}),
        Plan(family="t5", exponents={signal: [1] * 14}),
        Plan(family="t5", exponents={"encoder.block.0.layer.1.DenseReluDense.gate": 1}),
    ):
        with pytest.raises(UserError, match=r"plan"):
            apply(tiny.build("gated"), layout, plan)


def test_a_gain_correction_is_applied_to_its_norm_alone() -> None:
    model = tiny.build("pegasus")
    name = "model.encoder.layers.0.self_attn_layer_norm.weight"
    before = {n: t.clone() for n, t in model.state_dict().items()}
    apply(model, resolve(ModelTensors(model)), Plan(family="pegasus", gain_correction={name: 1.25}))
    after = model.state_dict()
    assert torch.equal(after[name], before[name] * 1.25)
    assert all(torch.equal(after[n], before[n]) for n in before if n != name)


def test_a_gain_correction_is_written_and_taken_back_by_the_inverse() -> None:
    model = tiny.build("pegasus")
    layout = resolve(ModelTensors(model))
    names = [f"{path}.weight" for path in layout.norms[:2]]
    before = {n: t.clone() for n, t in model.state_dict().items()}
    plan = Plan(family="pegasus", gain_correction={names[0]: 1.25, names[1]: 0.75})
    assert {w.name: w.gain for w in writes(layout, plan) if w.gain != 1} == plan.gain_correction
    assert inverse(plan).gain_correction == {names[0]: 0.8, names[1]: 1 / 0.75}
    apply(apply(model, layout, plan), layout, inverse(plan))
    assert all(torch.equal(t.bfloat16(), before[n].bfloat16()) for n, t in model.state_dict().items())


def test_a_separated_t5_head_is_written_times_its_scale() -> None:
    layout = resolve(ModelTensors(tiny.build("t5", d_model=16)), untie=True)
    assert {w.name: w.gain for w in writes(layout, Plan(family="t5")) if w.gain != 1} == {"lm_head.weight": 0.25}


def test_the_tie_flag_does_not_decide() -> None:
    """transformers 5 writes true beside a head of its own."""
    source = ModelTensors(tiny.build("gated"))
    for flag in (True, False):
        source.config["tie_word_embeddings"] = flag
        assert resolve(source).tied is False


def test_an_embedding_that_differs_between_encoder_and_decoder_is_refused() -> None:
    model = tiny.build("t5")
    source = ModelTensors(model)
    source._state["decoder.embed_tokens.weight"] = torch.zeros(97, 24)
    with pytest.raises(UserError, match=r"decoder\.embed_tokens\.weight differs"):
        resolve(source)


def test_t5s_stray_cross_attention_bias_is_dropped_with_a_reason() -> None:
    source = ModelTensors(tiny.build("t5"))
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    source.tensors[name] = next(iter(source.tensors.values()))
    assert resolve(source).dropped[name] == "stock classes ignore it"


def test_the_gates_other_branch_is_never_moved() -> None:
    """GELU is not homogeneous: wi_0's rows carry nothing, and its pre-activations are fixed."""
    layout = resolve(ModelTensors(tiny.build("gated")))
    for name, tensor in layout.tensors.items():
        if name.endswith("wi_0.weight"):
            assert tensor.axes[0] is None
    assert layout.signals["encoder.block.0.layer.1.DenseReluDense.gate"].kind is Kind.FIXED


def test_neurons_behind_an_activation_that_is_not_homogeneous_are_fixed() -> None:
    layout = resolve(ModelTensors(tiny.build("pegasus", activation_function="gelu_new")))
    assert layout.signals["model.encoder.layers.0.neuron"].kind is Kind.FIXED
    assert layout.tensors["model.encoder.layers.0.fc1.weight"].axes[0] is None


def test_the_encoders_output_is_never_moved() -> None:
    for kind in tiny.KINDS:
        layout = resolve(ModelTensors(tiny.build(kind)))
        final = "model.encoder.layer_norm" if kind == "pegasus" else "encoder.final_layer_norm"
        assert layout.tensors[f"{final}.weight"].axes == (None,)


def test_every_module_that_a_family_observes_exists() -> None:
    for kind in tiny.KINDS:
        model = tiny.build(kind)
        modules = dict(model.named_modules())
        for signal in resolve(ModelTensors(model)).signals.values():
            for sighting in signal.seen:
                assert sighting.module in modules, (kind, sighting)


def test_the_residual_is_one_signal_for_the_whole_model() -> None:
    layout = resolve(ModelTensors(tiny.build("umt5")))
    assert [s.name for s in layout.signals.values() if s.kind is Kind.RESIDUAL] == [RESIDUAL]


def test_a_config_that_names_no_class_says_what_to_add() -> None:
    source = ModelTensors(tiny.build("t5"))
    del source.config["architectures"]
    with pytest.raises(UserError, match="T5EncoderModel"):
        resolve(source)


def test_the_class_name_of_2020_is_known() -> None:
    assert stock_class({"model_type": "t5", "architectures": ["T5WithLMHeadModel"]}) == "T5ForConditionalGeneration"
