"""The range of gradients under fp16 AMP, against a backward pass that nothing looks into."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny

from bf16_to_fp16.cli import main
from bf16_to_fp16.measuring import gradients
from bf16_to_fp16.measuring.batch import Batch
from bf16_to_fp16.measuring.gradients import FIRST_EXPONENT, measure_gradients, output_and_loss
from bf16_to_fp16.measuring.probe import batches

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


def test_a_forward_or_a_backward_past_fp16_has_no_loss_scale_and_the_two_are_told_apart() -> None:
    lost = measure_gradients(*model_of(head=2.0**40))
    assert lost.loss_scale is None and lost.largest is None
    found = measure_gradients(*shrunk())
    assert found.loss_scale is None and found.largest is not None and math.isinf(found.largest.amax)
    assert found.largest.name == LAST_ADD  # nearest to the loss, where a sublayer's output has the stream's gradient


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
    assert main(["audit", str(folder), "--regime", "amp"]) == 1
    assert "backward" not in capsys.readouterr().out
