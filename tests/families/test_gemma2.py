"""What Gemma 2 and the first Gemma have and no other family: caps that a config may leave out, a gate under an old
name."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import tiny
from support.contract import certified, layout_of

from bf16_to_fp16 import convert
from bf16_to_fp16.bounds.arithmetic import MAX_LENGTH
from bf16_to_fp16.bounds.attention import MASK_ROUNDING
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.families.types import Attention, FeedForward
from bf16_to_fp16.rescaling.weights import ModelTensors
from bf16_to_fp16.run.agreement import agreed_layout


def test_a_cap_on_scores_bounds_what_follows_it_and_not_the_scores() -> None:
    """What a mask must add is under twice the cap, however far the scores themselves lie apart."""
    found = {}
    for cap in (5.0, None):
        _, certificate = certified(tiny.build("gemma2", 1, factor=8.0, attn_logit_softcapping=cap))
        at = "model.layers.0.self_attn"
        found[cap] = {name: certificate.at(f"{at}:{name}") or 0.0 for name in ("scores", "add#3", "masked")}
    assert found[5.0]["scores"] == found[None]["scores"] > 50
    assert 4.9 < found[5.0]["add#3"] < 5.1 < found[None]["add#3"]
    besides = MASK_ROUNDING + (26 + math.log2(MAX_LENGTH)) * math.log(2)
    assert 2 * 4.9 < found[5.0]["masked"] - besides < 2 * 5.1 < found[None]["masked"] - besides


@pytest.mark.parametrize("caps", [(5.0, None), (None, 30.0), (None, None)])
def test_a_cap_that_a_config_sets_to_null_is_left_out_by_stock_code_too(
    caps: tuple[float | None, float | None], tmp_path: Path
) -> None:
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
    assert len(norms) == 7 and all(torch.equal(after[name].bfloat16(), before[name]) for name in norms)
    moved = [t.name for t in layout_of(tiny.build("gemma")).tensors.values() if t.offset and any(t.axes)]
    assert moved == ["model.norm.weight"]
