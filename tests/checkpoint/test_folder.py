"""What lies beside the weights is carried over, and nothing that lies elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from bf16_to_fp16 import UserError
from bf16_to_fp16.checkpoint.folder import carry_over


@pytest.mark.parametrize("name", ["notes.txt", "README.md"])
def test_what_lies_outside_is_not_carried_over_by_a_link(tmp_path: Path, name: str) -> None:
    for folder in ("source", "out"):
        (tmp_path / folder).mkdir()
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "source" / name).symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"outside the folder") as raised:
        carry_over(tmp_path / "source", tmp_path / "out")
    assert name in str(raised.value) and list((tmp_path / "out").iterdir()) == []
    (tmp_path / "source" / name).unlink()
    (tmp_path / "source" / "blob").write_text("theirs")
    (tmp_path / "source" / name).symlink_to("blob")
    carry_over(tmp_path / "source", tmp_path / "out")
    copied = tmp_path / "out" / name.replace("README", "SOURCE_README")
    assert copied.read_text() == "theirs" and not copied.is_symlink()
