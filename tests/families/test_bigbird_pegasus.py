"""What BigBird-Pegasus has and no other family: attention over blocks, which is refused."""

import json
from pathlib import Path

import pytest
from support import tiny
from support.program import refused


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
