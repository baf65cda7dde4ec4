"""The certificate: sound against an adversary, tight, and with a bound for every place that an audit names."""

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support import exhaustive, tiny
from support.adversary import adverse_inputs, observe, scaled
from support.contract import FREE, bound_at, broken, certified
from support.inside import is_inside

from bf16_to_fp16 import certify, convert
from bf16_to_fp16.bounds.arithmetic import UNIT, Arithmetic
from bf16_to_fp16.cli import main
from bf16_to_fp16.families.known import FAMILIES, of_model_type
from bf16_to_fp16.families.types import DropoutKind
from bf16_to_fp16.families.wiring import Attention, Experts
from bf16_to_fp16.measuring.batch import GENERATE, PADDED, RANDOM, REPEATED
from bf16_to_fp16.measuring.probe import batches
from bf16_to_fp16.measuring.regimes import ATTENTIONS, LOSS_SCALE, audit_model
from bf16_to_fp16.measuring.stock import attentions_of

DEMO = Path(__file__).parents[2] / "bf16_to_fp16" / "demo_data"


@pytest.mark.parametrize("kind", exhaustive.beyond(tiny.FIRST, tiny.SEARCHED))
def test_no_adversarial_input_passes_a_bound_in_fp32_or_fp16(kind: str) -> None:
    for seed in range(3):
        model = tiny.build(kind, seed, factor=(0.02, 1.0, 8.0)[seed], **tiny.few_layers(kind))
        half = (scaled(model, seed, 12) if seed == 2 else model).half()
        layout, certificate = certified(half)
        wide = copy.deepcopy(half).float()
        inputs = adverse_inputs(wide, layout, 32, seed)
        for served_model in (wide, half):
            seen = observe(served_model, layout, inputs)
            assert not broken(certificate, seen, FREE)
            # That says something: nearly every bound has a value beside it, which for most comes close.
            bounds = {s.name: s.bound for s in certificate.sites if s.kind not in FREE}
            if served_model is wide:  # in which nothing is cast
                bounds = {name: limit for name, limit in bounds.items() if ":to" not in name}
            shares = sorted(seen[name] / limit for name, limit in bounds.items() if name in seen)
            # A LayerNorm is allowed what fp32 may lose of its mean. A stream that is read without a norm begins with
            # one of few rows, of which a bound knows the channels and the length.
            # Which experts take a token, and their weights, go with the direction that one of them would answer to.
            shared_out = any(isinstance(w, Experts) and w.chosen for w in layout.topology)
            near = 0.6 if layout.reads_stream_itself else 0.7 if layout.family.centred_norm or shared_out else 0.8
            assert len(shares) > 0.8 * len(bounds) and shares[len(shares) // 2] > near


@pytest.mark.parametrize("kind", exhaustive.beyond(exhaustive.of_today(tiny.FIRST, 3), tiny.SEARCHED))
def test_no_model_input_passes_a_bound_and_every_audited_site_has_one(kind: str) -> None:
    """The other kinds run the same modules; that each is certified is ``measuring.test_agreement``'s to show."""
    model = tiny.build(kind, 5, factor=1.0, **tiny.few_layers(kind))
    half = copy.deepcopy(model).half()
    layout, certificate = certified(half)
    model.config.architectures = [type(model).__name__]
    inputs = [b for b in batches(model.config, None, None) if b.kind in (RANDOM, PADDED, REPEATED, GENERATE)]
    # `float` works in place, so the other regimes need a model of their own.
    for regime, served_model in (("half", half), ("amp", copy.deepcopy(half).float()), ("stock", half)):
        attentions = attentions_of(type(model).__name__, ATTENTIONS)
        for site in audit_model(served_model, inputs, regime=regime, attention=attentions).sites:
            if layout.family.projector is not None and is_inside(site.name, layout.family.projector.tower):
                continue  # of which nothing is said
            if site.dtype == "float16" and site.limit is not None and "constant" not in site.name:
                assert site.amax <= bound_at(certificate, site.name), site.name


DROPPED = (
    *("gated", "t5", "switch", "t5gemma", "seed_oss", "qwen3-labels", "phi3"),
    *("pegasus", "mbart", "bigbird_pegasus"),
)
RATES: dict[DropoutKind, float] = {"stream": 0.3, "branch": 0.3, "attention": 0.2, "neurons": 0.4, "head": 0.1}
"""One module's dropouts have rates of their own, and the last one's is not the largest."""


def dropouts_of(kind: str) -> Mapping[DropoutKind, str]:
    family = of_model_type(tiny.config(kind).model_type)
    assert family is not None
    return family.dropout


def test_every_way_to_drop_is_tried() -> None:
    tried = [dropouts_of(kind) for kind in DROPPED]
    for family in filter(lambda family: family.dropout, FAMILIES):
        assert {kind: key.rpartition(".")[2] for kind, key in family.dropout.items()} in tried, family.name


@pytest.mark.parametrize("kind", DROPPED)
def test_dropout_multiplies_the_bounds_in_train_mode(kind: str) -> None:
    rates: dict[str, Any] = {key: RATES[what] for what, key in reversed([*dropouts_of(kind).items()])}
    model = tiny.build(kind, 2, factor=1.0, **rates).half()
    _, certificate = certified(model, Arithmetic(train=True))
    _, still = certified(model)
    inputs = [b for b in batches(model.config, None, None) if not b.generate][:2]
    sites = audit_model(model, inputs, regime="half", attention=("eager",), loss_scale=LOSS_SCALE).sites
    forward = [s for s in sites if ":grad" not in s.name and "constant" not in s.name and s.dtype == "float16"]
    # The loss is not covered; cubes are held to a limit of their own.
    for site in forward:
        if site.name.endswith("_log_softmax"):
            continue
        if site.benign is None and not site.name.endswith(("cubed", "pow")) and "loss" not in site.name:
            assert site.amax <= bound_at(certificate, site.name), site.name
    assert any(s.amax > (still.at(s.name) or math.inf) for s in forward) or kind in ("gated", "qwen3-labels", "phi3")
    raised = {s.name: s.bound for s in certificate.sites}
    assert all(raised[s.name] >= s.bound * (1 - 1e-9) for s in still.sites if s.name in raised)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "t5gemma"])
def test_dropout_of_attention_weights_is_in_what_they_gather(kind: str) -> None:
    model = tiny.build(kind, factor=1.0, attention_dropout=0.5)
    layout, certificate = certified(model, Arithmetic(train=True))
    _, still = certified(model)
    for w in layout.topology:
        if isinstance(w, Attention):
            more, less = (bound_at(each, f"{w.at}:context") for each in (certificate, still))
            assert 2 <= more / less < 2.01


@pytest.mark.parametrize("kind", exhaustive.beyond(["gated", "pegasus"], ["t5", "gated", "gelu", "pegasus"]))
def test_the_norm_safe_bound_covers_the_length_of_the_stream(kind: str) -> None:
    model = tiny.build(kind, 4, factor=0.5)
    layout, certificate = certified(model.half(), target="norm-safe")
    bounds = {s.name.split(" ")[0]: s.bound for s in certificate.sites if s.kind == "squares"}
    assert set(bounds) == set(layout.norms)
    seen: dict[str, float] = {}

    def look(path: str) -> Any:
        def hook(module: Any, args: Any) -> None:
            seen[path] = max(seen.get(path, 0.0), float(args[0].double().square().sum(-1).max()))

        return hook

    for path in layout.norms:
        model.get_submodule(path).register_forward_pre_hook(look(path))
    from bf16_to_fp16.measuring.batch import run_batch

    with torch.no_grad():
        for batch in batches(model.config, None, None):
            run_batch(model, batch)
    assert all(seen[path] <= bounds[path] for path in layout.norms)
    assert min(bounds[path] / seen[path] for path in layout.norms) < 100


@pytest.mark.parametrize("kind", exhaustive.beyond(["gated"], [*tiny.FIRST, "gated", "t5-classifier"]))
def test_certify_fails_before_and_holds_after(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other kinds' plans scale the same parts; the contract has each kind's couplings."""
    source = tiny.save(tiny.build(kind, 0, **tiny.few_layers(kind)), tmp_path / "source")
    report = tmp_path / "report.json"
    assert main(["certify", str(source), "--json", str(report)]) == 1
    before = json.loads(report.read_text())
    over = [s["name"] for s in before["certificate"]["sites"] if not s["holds"]]
    assert before["verdict"] == "unsafe" and over
    assert "not certified" in capsys.readouterr().out
    assert convert(source, tmp_path / "out", run_model=False).report["proof"] == "certified"
    assert main(["certify", str(tmp_path / "out"), "--json", str(report)]) == 0
    after = json.loads(report.read_text())
    assert after["verdict"] == "safe" and after["proof"] == "certified"
    assert after["certificate"]["holds"] and after["certificate"]["headroom_bits"] >= 0
    assert {"name", "bound", "limit", "observed", "holds"} <= set(after["certificate"]["sites"][0])


def test_a_weight_beyond_fp16_is_a_site_that_fails(tmp_path: Path) -> None:
    model = tiny.build("gated", 0, factor=1.0)
    model.encoder.block[0].layer[1].DenseReluDense.wo.weight.data[0, 0] = 1e5
    report = certify(tiny.save(model, tmp_path / "source"))
    failed = {s["name"] for s in report["certificate"]["sites"] if not s["holds"]}
    assert "encoder.block.0.layer.1.DenseReluDense.wo.weight" in failed


def test_the_length_enters_the_bound() -> None:
    model = tiny.build("gated", 0, factor=1.0)
    site = "encoder.block.0.layer.0.SelfAttention:context"
    short, long = (certified(model.half(), Arithmetic(max_length=n))[1] for n in (8, 2**20))
    assert bound_at(long, site) > 1.02 * bound_at(short, site)


def test_the_target_train_holds_gates_under_the_limit_of_the_cubes_derivative() -> None:
    model = tiny.build("gated", 0, factor=1.0)
    _, certificate = certified(model.half(), target="train")
    assert all(s.limit < 148 for s in certificate.sites if s.kind == "gate") and certificate.arithmetic.train
    _, relu = certified(tiny.build("t5", 0, factor=1.0).half(), target="train")
    assert all(s.limit == 65504 for s in relu.sites)


@pytest.mark.parametrize("kind", ["t5", "pegasus", "mbart", "t5-encoder"])
def test_progress_of_a_certificate_ends_at_its_total(kind: str) -> None:
    steps: list[tuple[int, int]] = []
    certified(tiny.build(kind), advance=lambda done, total: steps.append((done, total)))
    assert [done for done, _ in steps] == list(range(1, steps[-1][1] + 1))


def head_bounds(folder: Path, target: str, rate: float = 0.0) -> dict[str, float]:
    """Return the bounds of a small classifier's head, of which one output is nearly a bias of 1,000."""
    model = tiny.build("t5-classifier")
    model.config.classifier_dropout = rate
    model.classification_head.dense.bias.data[0] = 50.0
    model.classification_head.out_proj.bias.data[0] = 1000.0
    tiny.save(model, folder)
    sites = certify(folder, target=target)["certificate"]["sites"]
    return {site["name"]: site["bound"] for site in sites if site["name"].startswith("classification_head")}


def test_a_bias_and_a_dropout_count(tmp_path: Path) -> None:
    plain = head_bounds(tmp_path / "plain", "half")
    dropped = head_bounds(tmp_path / "dropped", "train", 0.5)
    assert plain["classification_head.out_proj"] >= 1000
    assert dropped["classification_head.dropout:mul#2"] >= 2
    # Without dropout of the stream, what the head reads is the same; here that is in it as well.
    read = plain["classification_head.dense"] - 50
    assert dropped["classification_head.dense"] - 50 >= 2 * read


def test_an_embedding_that_scales_itself_rounds_twice() -> None:
    """√12 in fp16 is larger than √12, and so may be the product with it."""
    model = tiny.build("gemma3", hidden_size=12, num_attention_heads=2).half()
    table = model.model.embed_tokens
    with torch.no_grad():
        table.weight.copy_(torch.linspace(1, 2, 97).half()[:, None].expand(-1, 12))
        made = table(torch.arange(97)).double()
        once = (table.weight.double() * math.sqrt(12)).half().double()
    assert bool((made > once).any())
    worst = int((made / table.weight.double()).amax(1).argmax())
    with torch.no_grad():
        table.weight.copy_(table.weight[worst].clone().expand_as(table.weight))
    assert float(made[worst].max()) <= bound_at(certified(model)[1], "model.embed_tokens:mul")
    assert float(made[worst].max()) > float(table.weight.double().max()) * math.sqrt(12) * (1 + UNIT) * (1 + 2.0**-18)
