"""Each regime is what it says, its verdict sees what the logits hide, and gradients are those of a plain backward."""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import exhaustive, masks, tiny

from bf16_to_fp16.cli import main
from bf16_to_fp16.conversion.audit import audit
from bf16_to_fp16.measuring import gradients, probe
from bf16_to_fp16.measuring.batch import PADDED, RANDOM, Batch, describe_batches
from bf16_to_fp16.measuring.gradients import FIRST_EXPONENT, measure_gradients, output_and_loss
from bf16_to_fp16.measuring.probe import batches
from bf16_to_fp16.measuring.regime_results import RegimeResult, verdict
from bf16_to_fp16.measuring.regimes import LOSS_SCALE, REGIMES, audit_folder, audit_model
from bf16_to_fp16.measuring.sites import MASK_REASON
from bf16_to_fp16.measuring.stock import load, load_config, set_attention
from bf16_to_fp16.numerics import FP16_MAX, GELU_CUBE_BACKWARD_LIMIT, OVERFLOWED, SATURATED_FROM
from bf16_to_fp16.report.remedies import unsafe_sites
from bf16_to_fp16.results import SiteEntry, dump

WO = "encoder.block.1.layer.1.DenseReluDense.wo"


def saved(kind: str, folder: Path, change: Any = None) -> Path:
    """Save a randomly initialised fp32 model, in which nothing is large unless ``change`` makes it so."""
    torch.manual_seed(0)
    model = tiny.KINDS[kind]()
    if change is not None:
        with torch.no_grad():
            change(model)
    model.save_pretrained(folder)
    return folder


def overflow(model: Any) -> None:
    model.get_submodule(WO).weight[:2] *= 1e5


Audits = Callable[..., dict[str, RegimeResult]]


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Audits:
    def audit_of(kind: str, change: Any = None) -> dict[str, RegimeResult]:
        folder = saved(kind, tmp_path_factory.mktemp(kind), change)
        return audit_folder(folder, inputs=batches(load_config(folder), None, None))

    return functools.cache(audit_of)


def few(folder: Path, *kinds: str) -> list[Batch]:
    every = batches(load_config(folder), None, None)
    return [next(batch for batch in every if batch.kind == kind) for kind in kinds or (RANDOM, PADDED)]


def half_of(folder: Path, **options: Any) -> RegimeResult:
    return audit_folder(folder, inputs=few(folder, RANDOM), regimes=("half",), **options)["half"]


def site(result: RegimeResult, name: str) -> Any:
    return next(s for s in result.sites if s.name == name)


@pytest.mark.parametrize(
    "kind",
    exhaustive.beyond(["t5", "gated", "pegasus"], ["t5", "gated", "silu", "umt5", "pegasus", "mbart", "t5-encoder"]),
)
def test_a_model_that_fits_is_safe_in_every_regime(kind: str, audited: Audits) -> None:
    results = audited(kind)
    assert list(results) == list(REGIMES)
    for result in results.values():
        assert not result.broken
        assert result.headroom_bits > 5
        assert result.nonfinite_logits == 0
        assert any(s.benign == MASK_REASON for s in result.sites)


def test_an_overflow_that_the_clamp_hides_is_named_in_half_alone(audited: Audits) -> None:
    results = audited("t5", overflow)
    half = results["half"]
    assert half.broken
    assert half.nonfinite_logits == 0  # what a check of the logits would go by
    assert half.sites[0].name == WO
    assert half.sites[0].nonfinite > 0
    assert half.saturated == sum(s.saturated for s in half.sites) > 0
    assert half.nonfinite == sum(s.nonfinite for s in half.sites)
    bits = [s.headroom_bits for s in half.sites if s.headroom_bits is not None]
    assert bits == sorted(bits) and bits[0] == half.headroom_bits == math.log2(FP16_MAX / OVERFLOWED)
    assert len({s.name for s in half.sites}) == len(half.sites)
    # Stock code keeps wo, and with it the residual, in fp32; AMP rounds wo's output to fp16.
    assert not results["stock"].broken
    assert results["amp"].broken
    assert results["amp"].sites[0].name == WO


@pytest.mark.parametrize(
    ("kind", "regime", "name", "dtype"),
    [
        ("t5", "stock", WO, "float32"),
        ("t5", "half", WO, "float16"),
        ("gated", "amp", WO, "float16"),
        ("gated", "amp", "encoder.block.0.layer.0:add", "float32"),
    ],
)
def test_a_regime_runs_in_the_formats_it_says(kind: str, regime: str, name: str, dtype: str, audited: Audits) -> None:
    shown = site(audited(kind)[regime], name)
    assert shown.dtype == dtype and (shown.limit is None) is (dtype == "float32")


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_masked_position_that_counts_is_unsafe_where_the_mask_is_finite_alone(share: float) -> None:
    model = masks.spanning("gated", 48000.0 * share)
    ids = torch.tensor([[5, 6, 7, 8, masks.LOUD, masks.LOUD], [1, 2, 3, 4, 5, 6]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    batch = Batch("padded", ids, mask, ids, mask)
    half = {"half": audit_model(model.half(), [batch], regime="half")}
    amp = audit_model(model.float(), [batch], regime="amp")
    wins = share == 1.0
    names = {f"{stack}.block.0.layer.0.SelfAttention:masked" for stack in ("encoder", "decoder")}
    rows = unsafe_sites(half)
    assert not amp.broken and {row.signal for row in rows} == (names if wins else set())
    assert all("positions keep an attention weight in half" in row.reason and row.excess_bits > 0.5 for row in rows)
    widest = next(s for s in half["half"].sites if s.name in names)
    assert widest.amax == pytest.approx(2 * 48000 * share, rel=0.02)
    assert half["half"].saturated == sum(row.saturated or 0 for row in rows)


FEED_FORWARD = "encoder.block.1.layer.1.DenseReluDense"


def test_train_mode_adds_dropout_and_the_backward(tmp_path: Path) -> None:
    folder = saved("gated", tmp_path)
    plain, training = (half_of(folder, train_mode=train, attention=("eager",)) for train in (False, True))
    assert not any(":grad" in s.name or "bernoulli" in s.name for s in plain.sites)
    gradients = {s.name for s in training.sites if ":grad" in s.name}
    assert {f"{WO}:grad", "lm_head:grad", "decoder.block.0.layer.1.EncDecAttention:scores:grad"} <= gradients
    assert any("dropout:" in s.name for s in training.sites)
    assert not training.broken
    cubed = [s for s in training.sites if s.name.endswith(":cubed")]
    assert all(s.limit == GELU_CUBE_BACKWARD_LIMIT for s in cubed)
    assert len(cubed) == 3


def test_an_overflow_of_the_gradients_alone_is_unsafe_in_training_alone(tmp_path: Path) -> None:
    def cubed(model: Any) -> None:  # 0·inf in the derivative of x³, though gelu itself is fine
        model.encoder.block[1].layer[1].DenseReluDense.wi_0.weight *= 80

    folder = saved("gated", tmp_path, cubed)
    plain, training = (half_of(folder, train_mode=train, attention=("eager",)) for train in (False, True))
    assert not plain.broken
    assert plain.nonfinite_logits == 0
    assert training.broken
    broken = [s.name for s in training.sites if s.nonfinite]
    assert all(":grad" in name for name in broken)
    assert training.sites[0].name == "encoder.block.1.layer.1.DenseReluDense.act:pow:grad"


def test_a_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = load(saved("t5", tmp_path), torch.float16, half=True, attention="sdpa")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    inputs = batches(model.config, None, None)[:2]
    audit_model(model, inputs, regime="half", loss_scale=LOSS_SCALE, attention=("eager",))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.config._attn_implementation == "sdpa"
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_value_where_stock_code_clamps_is_unsafe_though_all_is_finite() -> None:
    """65000 at the end of an encoder: nothing overflows, and nobody can tell it from a clamped infinity."""
    torch.manual_seed(0)
    model = tiny.t5_encoder().half().eval()
    inputs = batches(model.config, None, None)[:1]
    last = "encoder.final_layer_norm:mul#2"

    def measured() -> RegimeResult:
        return audit_model(model, inputs, regime="half", attention=("eager",))

    with torch.no_grad():
        model.encoder.final_layer_norm.weight *= 65000 / site(measured(), last).amax
    result = measured()
    assert SATURATED_FROM <= site(result, last).amax == result.amax <= FP16_MAX
    assert result.nonfinite == result.nonfinite_logits == 0 < result.saturated
    assert result.broken and verdict({"half": result}) == "unsafe"


@pytest.mark.parametrize("attention", [("eager", "sdpa"), ("sdpa", "eager")])
def test_what_breaks_under_one_attention_survives_the_other(attention: tuple[str, str]) -> None:
    """Scores past 65504 are inf under eager attention alone, and with them all that follows, which runs under both."""
    torch.manual_seed(0)
    model = tiny.t5_encoder().half().eval()
    last = model.encoder.block[-1].layer[0].SelfAttention
    with torch.no_grad():
        last.q.weight *= 400
        last.k.weight *= 400
    inputs = batches(model.config, None, None)[:1]
    ways = ("eager",), ("sdpa",), attention
    eager, sdpa, both = (audit_model(model, inputs, regime="half", attention=way) for way in ways)
    assert not sdpa.broken and eager.broken
    shared = {s.name for s in sdpa.sites} & {s.name for s in eager.sites if s.nonfinite}
    assert "encoder.block.1.layer.0.SelfAttention.o" in shared and "encoder.final_layer_norm:mul" in shared
    for name in shared:
        assert site(both, name).nonfinite == site(eager, name).nonfinite
        assert site(both, name).headroom_bits == site(eager, name).headroom_bits
    assert (both.nonfinite, both.saturated) == (eager.nonfinite, eager.saturated)
    assert both.broken


def test_the_seed_is_that_of_dropout(tmp_path: Path) -> None:
    folder = saved("t5-encoder", tmp_path)
    one, again, other = (half_of(folder, attention=("eager",), train_mode=True, seed=seed) for seed in (1, 1, 2))
    assert dump(one) == dump(again)
    assert site(one, f"{WO}:grad").amax != site(other, f"{WO}:grad").amax


def test_outputs_that_are_not_finite_are_counted_over_all_batches() -> None:
    model = tiny.t5_encoder().half().eval()
    model.encoder.final_layer_norm.weight.data[3] = torch.inf
    inputs = batches(model.config, None, None)[:2]
    result = audit_model(model, inputs, regime="half", attention=("eager", "sdpa"))
    assert result.nonfinite_logits == 2 * sum(batch.input_ids.numel() for batch in inputs)


def test_a_site_that_broke_has_the_counts_of_its_worst_regime() -> None:
    def result(**counts: tuple[int, int]) -> RegimeResult:
        bits = {name: math.log2(FP16_MAX / OVERFLOWED) if nonfinite else 0.0 for name, (nonfinite, _) in counts.items()}
        whole: dict[str, Any] = {"limit": FP16_MAX, "benign": None, "amax": FP16_MAX}
        sites = [
            SiteEntry(name=n, headroom_bits=bits[n], nonfinite=c[0], saturated=c[1], **whole) for n, c in counts.items()
        ]
        return RegimeResult(nonfinite=1, saturated=1, amax=FP16_MAX, headroom_bits=0.0, sites=sites)

    results = {"amp": result(wo=(7, 2), wi=(0, 0)), "half": result(wo=(5, 4), wi=(0, 3))}
    wo, wi = unsafe_sites(results)
    assert (wo.signal, wo.regimes, wo.nonfinite, wo.saturated) == ("wo", ["amp", "half"], 7, 4)
    assert (wi.signal, wi.regimes, wi.nonfinite, wi.saturated) == ("wi", ["half"], 0, 3)
    assert wo.reason == "7 inf/NaN, 4 saturated in amp, half"
    assert wi.reason == "3 saturated in half"
    # An inf was at least 65536.
    assert wo.excess_bits == pytest.approx(math.log2(65536 / FP16_MAX)) and wi.excess_bits == 0


def test_seed_and_train_mode_reach_inputs_attack_and_model(tmp_path: Path) -> None:
    """The report of the whole audit; of a single step of attack the probe beats many findings."""
    folder = saved("t5-encoder", tmp_path)
    options: dict[str, Any] = {"regimes": ("half",), "attention": ("eager",), "seed": 3}
    report = audit(folder, attack_steps=1, **options)
    again = describe_batches(probe.audit_batches(load_config(folder), folder, None, seed=3), seed=3)
    assert report["inputs"] == again and report["attack"]["seed"] == 3
    half = {s["name"]: s["amax"] for s in report["regimes"]["half"]["sites"] if not s["nonfinite"]}
    found = {s["name"]: s["worst"] for s in report["attack"]["sites"]}
    seen = {s["name"]: s["observed"] for s in report["certificate"]["sites"] if s["name"] in half}
    assert len(seen) > 20 and any(half[name] > found.get(name, 0.0) for name in seen)
    assert seen == {name: max(half[name], found.get(name, 0.0)) for name in seen}
    training = audit(folder, train_mode=True, **options)
    assert training["train_mode"] and not report["train_mode"]
    assert any(":grad" in s["name"] for s in training["regimes"]["half"]["sites"])
    assert not any(":grad" in name for name in half)


@pytest.mark.usefixtures("first_batch", "few_forwards")
def test_what_only_an_attack_breaks_is_unsafe(tmp_path: Path) -> None:
    """Scores that pass the limit in a few steps of search and not on the probe."""
    torch.manual_seed(0)
    model = tiny.t5_encoder(num_layers=1)
    options: dict[str, Any] = {"regimes": ("half",), "attention": ("eager",), "attack_steps": 8}
    report = audit(tiny.save(model, tmp_path / "small", torch.float32), **options)
    name = "encoder.block.0.layer.0.SelfAttention:scores"
    probed = next(s["amax"] for s in report["regimes"]["half"]["sites"] if s["name"] == name)
    worst = next(s["worst"] for s in report["attack"]["sites"] if s["name"] == name)
    assert worst > 1.06 * probed  # between them lies the limit, and what counts as saturated
    attention = model.encoder.block[0].layer[0].SelfAttention
    for linear in (attention.q, attention.k):
        linear.weight.data.mul_((FP16_MAX / (worst * probed) ** 0.5) ** 0.5)
    source, path = tiny.save(model, tmp_path / "large", torch.float32), tmp_path / "report.json"
    words = ["audit", str(source), "--regime", "half", "--attention", "eager", "--json", str(path), "--attack"]
    assert [main([*words, steps]) for steps in ("0", "8")] == [2, 1]
    report = json.loads(path.read_text())
    assert report["regimes"]["half"]["nonfinite"] == report["regimes"]["half"]["saturated"] == 0
    assert report["attack"]["worst_headroom_bits"] < 0 and report["verdict"] == "unsafe"
    reasons = {row["signal"]: row["reason"] for row in report["unsafe"]}
    assert "on an input that 8 gradient steps of search found" in reasons[name]
    assert all(row["excess_bits"] > 0 and "convert rescales" in row["remedy"] for row in report["unsafe"])


def test_progress_rises_to_its_total(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    half_of(saved("t5", tmp_path), advance=lambda done, total: steps.append((done, total)))
    total = steps[0][1]
    assert steps == sorted(steps) and steps[-1] == (total, total)
    assert total == 2 + 1 + 1 + 1 + 1 + 3  # blocks, final norms, head, embeddings


def test_what_half_shows_to_fit_runs_on_less_in_stock_and_amp_and_else_on_all(audited: Audits) -> None:
    fits, breaks = audited("t5"), audited("t5", overflow)
    ran = {name: [run.batches for run in result.runs] for name, result in fits.items()}
    assert ran["stock"] == ran["amp"] == [3, 1] and ran["half"][0] > 4 and ran["half"][1] == 2
    assert fits["amp"].runs[0].kinds == ["random ids", "padded", "generate"]
    assert {tuple(run.batches for run in result.runs) for result in breaks.values()} == {tuple(ran["half"])}


def test_an_attention_is_set_in_stacks_that_stock_code_leaves_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.17 changes the config of the whole model alone, of which each stack has a copy."""

    def own_config(self: Any, implementation: str) -> None:
        self.config._attn_implementation_internal = implementation

    monkeypatch.setattr(transformers.PreTrainedModel, "set_attn_implementation", own_config)
    model = tiny.build("t5")
    for implementation in ("sdpa", "eager"):
        set_attention(model, implementation)
        used = {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
        assert used == {implementation}


HEAD, VALUES = "lm_head", "decoder.block.0.layer.0.SelfAttention.v"
LAST_ADD = "decoder.block.0.layer.2:add:grad"


def model_of(**factors: float) -> tuple[Any, list[Any]]:
    """Return a small T5 that fits fp16, without dropout, with weights multiplied, and what to run it on."""
    torch.manual_seed(0)
    model = tiny.gated(dropout_rate=0.0, num_layers=2).float()
    for name, factor in factors.items():
        model.get_submodule({"head": HEAD, "values": VALUES}[name]).weight.data.mul_(factor)
    return model.train(), [batch for batch in batches(model.config, None, None) if not batch.generate][:2]


def gradients_of(model: Any, inputs: list[Any], scale: float, *, amp: bool) -> list[dict[str, torch.Tensor]]:
    found = []
    for batch in inputs:
        model.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=amp):
            _, loss = output_and_loss(model, batch)
        assert loss is not None
        (loss * scale).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad()
    return found


def is_finite(gradients: list[dict[str, torch.Tensor]]) -> bool:
    return all(bool(gradient.isfinite().all()) for each in gradients for gradient in each.values())


@pytest.mark.parametrize(("factor", "shrinking"), [(1.0, 0), (2.0**9, 0), (1.0, 18)])
def test_the_loss_scale_is_the_largest_that_no_gradient_overflows_at(factor: float, shrinking: int) -> None:
    model, inputs = shrunk(shrinking) if shrinking else model_of(head=factor)
    found = measure_gradients(model, inputs)
    assert found.loss_scale is not None and found.largest is not None
    assert is_finite(gradients_of(model, inputs, found.loss_scale, amp=True))
    if found.loss_scale < 2.0**FIRST_EXPONENT:
        assert not is_finite(gradients_of(model, inputs, 2 * found.loss_scale, amp=True))
        assert 65504 / 4 < found.largest.amax <= 65504
    assert (found.loss_scale < 2.0**FIRST_EXPONENT) == (factor > 1 or shrinking > 0)
    assert (found.loss_scale < 1) == (shrinking > 0)


def test_an_untrained_padding_token_is_not_trained_on() -> None:
    model = tiny.stock("SmolLM3ForCausalLM", tiny.LLAMA_SHAPE, pad_token_id=0, num_hidden_layers=6)().train()
    assert not bool(model.get_input_embeddings().weight[0].any())
    ids = torch.tensor([[0, 5, 7, 3], [4, 0, 9, 8]])
    seen = Batch("as a token", ids, torch.ones_like(ids), ids, torch.ones_like(ids))
    assert measure_gradients(model, [seen]).loss_scale is not None


def test_what_becomes_zero_is_what_fp32_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "SHOWN", 1000)
    model, inputs = model_of(head=2.0**9, values=2.0**-12)
    found = measure_gradients(model, inputs)
    assert found.loss_scale is not None
    half, whole = (
        torch.cat([each[f"{HEAD}.weight"].flatten() for each in gradients_of(model, inputs, scale, amp=amp)])
        for scale, amp in ((found.loss_scale, True), (1.0, False))
    )
    lost = float(((half == 0) & (whole != 0)).float().mean())
    # The weight's gradient is one of the two products of a linear's backward.
    shares = [site.flushed for site in found.sites if site.name.startswith(f"{HEAD}:grad")]
    assert lost > 0 and any(share == pytest.approx(lost, abs=1e-6) for share in shares)
    plain = measure_gradients(*model_of())
    assert plain.flushed < found.flushed < 1 and found.sites[0].flushed == max(s.flushed for s in found.sites)


def shrunk(bits: int = 40) -> tuple[Any, list[Any]]:
    """Return the model with a stream of 2^-bits times the size, which fp32 bears: its gradient grows by as much."""
    model, inputs = model_of()
    for name, parameter in model.named_parameters():
        if name.startswith("shared") or name.endswith((".o.weight", ".wo.weight")):
            parameter.data.mul_(2.0**-bits)
    model.config.layer_norm_epsilon *= 4.0**-bits
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = model.config.layer_norm_epsilon
    return model, inputs


@pytest.mark.usefixtures("first_batch")
def test_the_audit_in_training_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for (model, _), status, words in (
        (shrunk(18), 0, "gradients fit up to a loss scale of 0."),  # as under a dynamic scaler, which goes below 1
        (shrunk(), 1, f"gradients overflow at every loss scale, first at {LAST_ADD}"),
        (model_of(head=2.0**40), 1, "the forward pass overflows already"),
    ):
        folder = tiny.save(model, tmp_path / words[:25])
        asked = ["audit", str(folder), "--train-mode", "--regime", "amp", "--attention", "eager"]
        assert main([*asked, "--html", str(tmp_path / "page.html")]) == status
        assert words in " ".join(capsys.readouterr().out.split())
        assert words in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert main(["audit", str(folder), "--regime", "amp", "--attention", "eager"]) == 1
    assert "backward" not in capsys.readouterr().out
