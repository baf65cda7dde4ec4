"""What BigBird-Pegasus has and no other family: attention over blocks, which is refused, and biases by the config."""

import json
from pathlib import Path

import pytest
from support import tiny
from support.program import refused

from bf16_to_fp16 import UserError
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.rescaling.weights import ModelTensors


@pytest.mark.parametrize("written", [{"attention_type": "block_sparse"}, {}])
def test_attention_over_blocks_is_refused_in_one_line_as_published_and_by_default(
    written: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny.save(tiny.build("bigbird_pegasus", encoder_layers=1, decoder_layers=1), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    del config["attention_type"]
    (source / "config.json").write_text(json.dumps(config | written))
    said = refused(capsys, "convert", source, tmp_path / "out", "--no-audit")
    assert "'attention_type' is 'block_sparse'" in said and 'write "original_full" there' in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("use_bias", [False, True])
def test_biases_are_there_where_the_config_has_them(use_bias: bool) -> None:
    model = tiny.bigbird_pegasus(use_bias=use_bias)
    model.config.architectures = [type(model).__name__]
    layout = resolve(ModelTensors(model))
    biased = {name for name in layout.tensors if name.endswith(("_proj.bias", ".query.bias", "self_attn.output.bias"))}
    assert bool(biased) is use_bias and {*layout.tensors} <= {*model.state_dict()}
    model.config.use_bias = not use_bias
    with pytest.raises(UserError, match=r"bias is (missing|not)|unknown"):
        resolve(ModelTensors(model))
