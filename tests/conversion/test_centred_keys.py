"""Centred keys: the same function, smaller keys, and a way back, in memory, from folder to folder and with adapters."""

import base64
import hashlib
import json
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import tiny
from support.contract import certified, layout_of, outputs, random_plan
from support.forging import copied, plan_file

from bf16_to_fp16 import UserError, convert, make_fp16_safe, undo, verify
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.conversion import make_safe
from bf16_to_fp16.conversion.make_safe import observed_plan
from bf16_to_fp16.families.resolve import ModelTensors, resolve, source_weights
from bf16_to_fp16.families.signals import Kind
from bf16_to_fp16.families.wiring import Attention
from bf16_to_fp16.finetuning import start
from bf16_to_fp16.finetuning.recipe import parse_recipe
from bf16_to_fp16.measuring.stock import load
from bf16_to_fp16.progress import Progress
from bf16_to_fp16.report.schema import PAGE, REPORT, Report, read
from bf16_to_fp16.report.steps import Decided
from bf16_to_fp16.report.terminal import print_conversion
from bf16_to_fp16.rescaling.adapters import PREFIX, scaled_adapter
from bf16_to_fp16.rescaling.apply import apply, writes
from bf16_to_fp16.rescaling.centred import centrable, centred, centred_bias, centred_tensors, tables_of
from bf16_to_fp16.rescaling.plan import Plan, describe_plan, inverse

KINDS = ("pegasus", "mbart", "bigbird_pegasus")


def centring(model: torch.nn.Module) -> Plan:
    layout = layout_of(model)
    return Plan(family=layout.family.name, centred_keys=[w.at for w in centrable(layout)])


@pytest.mark.parametrize("kind", KINDS)
def test_every_attention_of_a_family_with_a_free_key_bias_is_centrable(kind: str) -> None:
    layout = layout_of(tiny.small(kind))
    assert centrable(layout) == tuple(w for w in layout.topology if isinstance(w, Attention))


@pytest.mark.parametrize("kind", ["gemma3", "llama-biased", "glm4"])
def test_none_is_centrable_without_biases_of_keys_and_of_the_norm_that_they_read(kind: str) -> None:
    assert centrable(layout_of(tiny.small(kind))) == ()
    assert centrable(layout_of(tiny.small("bigbird_pegasus", use_bias=False))) == ()


@pytest.mark.parametrize(
    "between", [*({name: "x"} for name in ("rotary", "query_norm", "key_norm", "cap", "radius")), {"fused": (1, 1, 1)}]
)
def test_none_is_centrable_with_something_between_keys_and_scores(between: dict[str, Any]) -> None:
    layout = layout_of(tiny.small("pegasus"))
    others = (replace(w, **between) if isinstance(w, Attention) else w for w in layout.topology)
    assert centrable(replace(layout, topology=tuple(others))) == ()


@pytest.mark.parametrize("kind", tiny.FIRST)
def test_whatever_keys_can_be_centred_outputs_are_equal_to_rounding_errors(kind: str) -> None:
    """Of every family, so that a new one in which something else stands between keys and scores is found."""
    model = tiny.small(kind)
    plan = centring(model)
    in_double = 1e-6 if kind == "longt5" else 1e-12  # its softmax is in fp32 whatever the dtype is
    for dtype, most in ((torch.float64, in_double), (torch.float32, 1e-6)) if plan.centred_keys else ():
        same = deepcopy(model).to(dtype)
        before = outputs(same)
        after = outputs(apply(same, layout_of(model), plan))
        assert all(x.dtype == dtype for x in after)
        assert all((x - y).abs().max() <= most * x.abs().max() for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize(("kind", "number"), [("t5", 2), ("umt5", 4), ("longt5", 3), ("longt5-local", 2)])
def test_the_tables_of_one_softmax_lose_what_a_head_has_in_common(kind: str, number: int) -> None:
    """Both of LongT5's encoder the same, so that local and global keys keep their places."""
    model = tiny.build(kind, num_layers=2, num_decoder_layers=2)
    layout, plan = layout_of(model), centring(model)
    before = model.state_dict()
    for place, name in enumerate(centred_tensors(layout, plan.centred_keys)):
        before[name].add_(torch.tensor([70000.0, -4096.0, 5000.0]))[place] += 15000.0 * (place + 1)
    before = deepcopy(before)
    after = apply(model, layout, plan).state_dict()
    for w in centrable(layout):
        joined, moved = (torch.cat([state[name] for name in tables_of(w)]).double() for state in (before, after))
        lost = joined - moved
        assert torch.allclose(lost, lost[:1].expand_as(lost), atol=0.01) and lost.abs().amin() > 1000
        assert torch.allclose(lost, lost.bfloat16().double(), atol=0.01)
        assert (moved.amax(0) + moved.amin(0)).abs().amax() <= 70000 * 2.0**-7
    assert len(centred_tensors(layout, plan.centred_keys)) == number
    assert len({tables_of(w) for w in centrable(layout)}) == len(centrable(layout))


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_of_keys_and_scores_fall_and_no_other_rises(kind: str) -> None:
    model = tiny.small(kind)
    layout, before = certified(model)
    _, after = certified(apply(model, layout, centring(model)))
    bounds = {site.name: site.bound for site in after.sites}
    for site in before.sites:
        falls = site.kind in ("key", "scores", "masked scores")
        assert bounds[site.name] < site.bound if falls else bounds[site.name] == site.bound, site.name


@pytest.mark.parametrize("kind", KINDS)
def test_exponents_go_on_a_centred_bias_as_on_any_other(kind: str) -> None:
    """Centred and rescaled is to the bit what is centred first and rescaled then, in files as in memory."""
    model = tiny.small(kind)
    layout = layout_of(model)
    moves = random_plan(layout, (Kind.RESIDUAL, Kind.NORM, Kind.QUERY_KEY))
    both = moves.model_copy(update={"centred_keys": centring(model).centred_keys})
    one, two = deepcopy(model), apply(apply(deepcopy(model), layout, centring(model)), layout, moves)
    found = apply(one, layout, both).state_dict()
    assert all(torch.equal(weight, found[name]) for name, weight in two.state_dict().items())
    for write in writes(ModelTensors(model), layout, both):
        if write.name in centred_tensors(layout, both.centred_keys):
            assert write.source is None and write.data is not None and write.row_exponents is not None
            scaled = torch.ldexp(write.data, write.row_exponents.double() + write.exponent)
            assert torch.equal(scaled.float(), found[write.name])


def test_a_reader_centres_the_keys_of_the_given_attentions_alone() -> None:
    model = tiny.small("pegasus")
    source, layout = ModelTensors(model), layout_of(model)
    weights, (first, *_) = source_weights(source, layout), centrable(layout)
    read = centred(weights, layout, [first.at])
    for name in layout.tensors:
        wanted = centred_bias(weights, layout, first) if name == f"{first.key}.bias" else weights(name)
        assert torch.equal(read(name), wanted)


def test_a_centred_bias_is_the_negative_product_of_weight_and_the_norms_bias() -> None:
    """To the last bit, for weights of so few bits that fp64 holds every sum exactly, and of any number of columns."""
    for columns in (1, 2, 7, 24):
        weight = torch.randint(-99, 99, (5, columns)) / 8
        beta = torch.randint(-99, 99, (columns,)) / 8
        layout = layout_of(tiny.small("pegasus"))
        first = centrable(layout)[0]
        given = {f"{first.key}.weight": weight.bfloat16(), f"{first.norm}.bias": beta.bfloat16()}
        found = centred_bias(given.__getitem__, layout, first)
        product = given[f"{first.key}.weight"].double() @ given[f"{first.norm}.bias"].double()
        assert found.dtype == torch.float64 and torch.equal(found, -product)


def test_a_plan_that_centres_other_keys_does_not_fit() -> None:
    model = tiny.small("pegasus")
    for path in ("model.encoder.layers.0.self_attn.k_proj", "nowhere"):
        with pytest.raises(UserError, match="centres biases of"):
            apply(model, layout_of(model), Plan(family="pegasus", centred_keys=[path]))
    rotated = tiny.small("llama-biased")
    with pytest.raises(UserError, match="none there can be centred"):
        apply(rotated, layout_of(rotated), Plan(family="llama", centred_keys=["model.layers.0.self_attn"]))


def test_only_a_plan_that_centres_keys_says_so() -> None:
    plan = Plan(family="pegasus", centred_keys=["a"])
    assert describe_plan(plan)["centred_keys"] == ["a"]
    assert "centred_keys" not in describe_plan(Plan(family="pegasus"))
    assert inverse(plan).centred_keys == []


def test_what_stands_on_shared_values_and_on_gains_less_1_moves_as_the_weights_do() -> None:
    """The two factors of an update to an output projection, and a norm's gain saved whole."""
    model = tiny.small("gemma3")
    layout = resolve(ModelTensors(model))
    at, value = "model.layers.0", "model.layers.0.self_attn.value"
    plan = Plan(family="gemma3", residual_exponent=-4, exponents={value: [i % 5 - 2 for i in range(20)]})
    weight = model.get_submodule(f"{at}.self_attn.o_proj").weight
    gain = model.get_submodule(f"{at}.post_attention_layernorm").weight
    names = [f"{PREFIX}{at}.{n}" for n in ("self_attn.o_proj.lora_A.weight", "self_attn.o_proj.lora_B.weight")]
    names.append(f"{PREFIX}{at}.post_attention_layernorm.weight")
    a, b = torch.randn(2, 40), torch.randn(24, 2)
    given = dict(zip(names, (a, b, gain.detach().clone()), strict=True))
    found = scaled_adapter(given, layout, plan)
    with torch.no_grad():
        weight.copy_(b @ a)
        apply(model, layout, plan)
    moved = [found[name] for name in names]
    assert torch.allclose(moved[1] @ moved[0], weight, rtol=1e-6) and not torch.equal(moved[0], a)
    assert torch.equal(moved[2], gain) and not torch.equal(moved[2], given[names[2]])


DTYPES = {"pegasus": torch.bfloat16, "mbart": torch.float32}


@pytest.fixture(scope="module", params=sorted(DTYPES))
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Plan]:
    """Convert by a plan that moves queries, keys and norms and centres all keys but those of one attention."""
    root, kind = tmp_path_factory.mktemp(request.param), request.param
    source = tiny.save(tiny.small(kind, factor=1.0, dtype=DTYPES[kind]), root / "source", DTYPES[kind])
    layout = resolve(open_checkpoint(source))
    centred = {"centred_keys": [w.at for w in centrable(layout)[1:]]}
    plan = random_plan(layout, (Kind.NORM, Kind.QUERY_KEY)).model_copy(update=centred)
    assert convert(source, root / "out", plan=plan_file(root / "plan.json", plan), run_model=False).safe
    return source, root / "out", plan


Converted = tuple[Path, Path, Plan]


def test_centred_biases_are_written_and_give_what_the_sources_do(converted: Converted) -> None:
    source, out, plan = converted
    layout, written = resolve(checkpoint := open_checkpoint(source)), load_file(out / "model.safetensors")
    biases = centred_tensors(layout, plan.centred_keys)
    assert len(biases) == len(centrable(layout)) - 1
    for name, attention in biases.items():
        exponents = torch.tensor(plan.exponents[f"{attention.at}.query_key"])
        wanted = torch.ldexp(centred_bias(source_weights(checkpoint, layout), layout, attention), -exponents.double())
        assert torch.equal(written[name], wanted.half())
    report = json.loads((out / REPORT).read_bytes())
    assert report["plan"]["centred_keys"] == plan.centred_keys and set(report["source"]["replaced"]) == set(biases)
    assert report["source"]["made"] == []
    carried = sum(tensor.numel() for name, tensor in written.items() if name not in biases)
    assert report["weights"]["elements"] == carried
    page = (out / PAGE).read_text(encoding="utf-8")
    assert "key or position biases of 3 attentions" in page and "outputs keep every bit" not in page
    model = load(out, torch.float32)
    found = outputs(model)
    for name, attention in biases.items():
        exponents = torch.tensor(plan.exponents[f"{attention.at}.query_key"])
        model.get_parameter(name).data.copy_(torch.ldexp(checkpoint.read(name).float(), -exponents))
    assert all((x - y).abs().max() <= 1e-6 * x.abs().max() for x, y in zip(outputs(model), found, strict=True))


def test_a_changed_original_is_noticed_by_undo_and_verify(converted: Converted, tmp_path: Path) -> None:
    source, out, _ = converted
    assert verify(out, original=source, run_model=False)["problems"] == []
    replaced = json.loads((out / REPORT).read_bytes())["source"]["replaced"]
    name, other = sorted(replaced)[:2]
    short = {"values": base64.b64encode(b"ab").decode(), "sha256": hashlib.sha256(b"ab").hexdigest()}
    changes: tuple[Callable[[dict[str, Any]], object], ...] = (
        lambda report: report["source"]["replaced"][name].update(values=replaced[other]["values"]),
        lambda report: report["source"]["replaced"].pop(name),
        lambda report: report["plan"]["centred_keys"].pop(0),
        lambda report: report["source"]["replaced"].update({name: short}),
        lambda report: report["plan"]["centred_keys"].append("nowhere"),
    )
    for number, change in enumerate(changes):
        folder = copied(out, tmp_path / str(number), change)
        with pytest.raises(UserError, match=r"take the report that convert wrote|none there can be centred"):
            undo(folder, tmp_path / "back")
        found = verify(folder, run_model=False)
        assert found["checks"]["plan"] == "failed", number
    # With a hash that fits only the original tells.
    swapped = copied(out, tmp_path / "x", lambda report: report["source"]["replaced"].update({name: replaced[other]}))
    found = verify(swapped, original=source, run_model=False)
    assert {p["name"] for p in found["problems"] if p["check"] == "replay"} == {
        f"source.replaced.{name}.{key}" for key in ("values", "sha256")
    }


def test_a_finetune_begins_centred_again(converted: Converted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, out, plan = converted
    checkpoint = open_checkpoint(out)
    recipe = parse_recipe({"source": str(out), "out": "out", "data": {"path": "texts.jsonl"}})
    monkeypatch.setattr(start, "decide", lambda opened, *_: Decided(opened.layout, plan, "half"))
    start.write_start(checkpoint, recipe, tmp_path / "start", Progress(quiet=True))
    before, after = (outputs(load(folder, torch.float32)) for folder in (out, tmp_path / "start"))
    assert all((x - y).abs().max() <= 1e-6 * x.abs().max() for x, y in zip(before, after, strict=True))
    layout = resolve(checkpoint)
    written = load_file(tmp_path / "start" / "model.safetensors")
    for name, attention in centred_tensors(layout, plan.centred_keys).items():
        exponents = torch.tensor(plan.exponents[f"{attention.at}.query_key"]).double()
        wanted = torch.ldexp(centred_bias(source_weights(checkpoint, layout), layout, attention), -exponents)
        assert torch.equal(written[name], wanted.float()) and written[name].dtype == torch.float32


def test_a_model_in_memory_is_centred_and_undone_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.small("pegasus", factor=40000.0)
    layout = resolve(ModelTensors(model))
    before, unchanged = outputs(model), deepcopy(model)

    def planned(*given: Any, **options: Any) -> Plan:
        centred = [w.at for w in centrable(layout)]
        return observed_plan(*given, **options).model_copy(update={"centred_keys": centred})

    monkeypatch.setattr(make_safe, "observed_plan", planned)
    made = make_fp16_safe(model)
    assert made.plan.residual_exponent and set(made.originals) == set(centred_tensors(layout, made.plan.centred_keys))
    assert all((x - y).abs().max() <= 1e-6 * x.abs().max() for x, y in zip(before, outputs(model), strict=True))
    bounded = make_safe.rounded(ModelTensors(unchanged), layout, made.plan)
    state = model.state_dict()
    assert all(torch.equal(bounded(name), state[name].half()) for name in layout.tensors)
    with torch.no_grad():
        for name in made.originals:
            model.get_parameter(name).add_(1.0)  # as training may, which leaves the function as it is
    made.undo(model)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in unchanged.state_dict().items())
    assert replace(made, plan=Plan(family="pegasus", centred_keys=made.plan.centred_keys)).changed


def test_a_large_table_is_centred(first_batch: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its differences, of which alone a softmax knows, are kept to rounding, and the source's bits come back."""
    model = tiny.small("gated", factor=1.0)
    tables = [name for name in model.state_dict() if "relative_attention_bias" in name]
    with torch.no_grad():
        for name in tables:  # what bf16 holds at this magnitude are multiples of 512
            table = model.state_dict()[name]
            table.copy_(torch.randint(-3, 4, table.shape) * 512.0 + torch.tensor([90112.0, -131072.0, 8192.0]))
    source = tiny.save(model, tmp_path / "source")
    with pytest.raises(UserError, match="over 65504 under this plan"):
        convert(source, tmp_path / "out", exact=True)
    converted = convert(source, tmp_path / "out", stream=-2)
    assert converted.safe and converted.report["proof"] == "certified" and "inexact" not in converted.report
    assert len(converted.report["plan"]["centred_keys"]) == len(tables) == 2
    print_conversion(read(Report, converted.report), tmp_path / "out")
    assert "\ncentred: key or position biases of 2 attentions lose a shift of all scores" in capsys.readouterr().out
    before, after = (max(signal[when] for signal in converted.report["signals"]) for when in ("before", "after"))
    assert before > 65504 > after
    states, others = (outputs(load(folder, torch.float32)) for folder in (source, tmp_path / "out"))
    assert all((x - y).abs().max() <= 0.02 * x.abs().max() for x, y in zip(states, others, strict=True))
    assert converted.report["fidelity"]["kl_fp32"] < converted.report["fidelity"]["kl_bf16"] / 100
    assert verify(tmp_path / "out", original=source, run_model=False)["verified"]
    one, two = (load_file(f / "model.safetensors") for f in (source, undo(tmp_path / "out", tmp_path / "back")))
    assert all(torch.equal(one[name], two[name]) for name in tables)
    # In memory the same, unless training changes one of them, which then stays centred.
    for trained in (False, True):
        model = load(tmp_path / "out", torch.float32)
        safe = make_fp16_safe(model)
        with torch.no_grad():
            model.get_parameter(tables[0])[0] += 0.5 * trained
        wanted = outputs(model)
        state = safe.undo(model).state_dict()
        assert all(torch.equal(state[name], one[name].float()) != trained for name in tables)
        assert not trained or all(map(torch.equal, wanted, outputs(model)))


def test_an_adapter_follows_on_centred_keys_with_a_bias_of_its_own() -> None:
    """Its key bias is as free as the checkpoint's, so it needs no more than the exponents."""
    base = tiny.small("pegasus").double()
    layout = resolve(ModelTensors(base))
    plan = random_plan(layout, (Kind.NORM, Kind.QUERY_KEY))
    plan = plan.model_copy(update={"centred_keys": [w.at for w in centrable(layout)]})
    key = f"{plan.centred_keys[0]}.k_proj"
    names = [f"{PREFIX}{key}.{part}" for part in ("lora_A.weight", "lora_B.weight", "bias")]
    adapter = dict(zip(names, map(torch.randn, ((2, 24), (24, 2), (24,))), strict=True))

    def with_adapter(model: Any, tensors: Iterable[torch.Tensor]) -> Any:
        a, b, bias = (each.double() for each in tensors)
        model.get_submodule(key).weight.data += b @ a
        model.get_submodule(key).bias.data.copy_(bias)
        return model

    before = outputs(with_adapter(deepcopy(base), adapter.values()))
    moved = [scaled_adapter(adapter, layout, plan)[name] for name in names]
    after = outputs(with_adapter(apply(deepcopy(base), layout, plan), moved))
    assert all((x - y).abs().max() <= 1e-12 * x.abs().max() for x, y in zip(before, after, strict=True))
    assert (before[0] - outputs(base)[0]).abs().max() > 1e-4 * before[0].abs().max()
