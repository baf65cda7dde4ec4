"""What transformers 5 and 4.57 make of the same config: a head that is tied or not, and keys edited at will."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from compat.harness import compute_logits, read_config, relative_error, run_script
from support import config_edits, exhaustive
from support.tiny import T5_SHAPE

from bf16_to_fp16 import convert
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.measuring.agreement import agreed_layout

NAMED = ("scale_decoder_outputs", "tie_word_embeddings")
"""Keys of which docs/certificate.md says what 4.57 makes of them beside a head of its own."""


def under(
    python: str | Path, case: config_edits.Original, edits: list[dict[str, object]]
) -> tuple[list[str], list[object]]:
    """Return the keys that a version's config class knows, and the logits that it gives under each edit of a config."""
    given, out = case.folder / "configs.txt", case.folder / "out.txt"
    given.write_text(json.dumps([case.config | edit for edit in edits]))
    run_script(python, "edited.py", case.folder, given, out)
    found = json.loads(out.read_text())
    return found["keys"], found["logits"]


def is_taken(case: config_edits.Original, edit: dict[str, object]) -> bool:
    (case.folder / "config.json").write_text(json.dumps(case.config | edit))
    try:
        agreed_layout(open_checkpoint(case.folder))
    except UserError:
        return False
    return True


EDITED = [
    *(("t5", (True,), parts) for parts in (3, 1)),
    *((kind, (None, True, 2), 1) for kind in ("t5", "pegasus")),
    *((kind, (True,), 1) for kind in ("mt5", "mbart")),
]


@pytest.mark.parametrize(("kind", "values", "parts"), exhaustive.beyond(EDITED[:1], EDITED))
def test_what_is_taken_is_the_same_model_in_both_versions_or_none_in_4(
    kind: str, values: tuple[object, ...], parts: int, tmp_path: Path, warm_python: Path, compat_python: Path
) -> None:
    """Of every key that a config class of 4.57 knows, set to anything; of mT5 and mBART, whose code is T5's and nearly
    Pegasus's, to one value each, but for how they tie."""
    tried = dict.fromkeys(NAMED, (None, True, 2))
    case = config_edits.original(kind, tmp_path)
    keys, [own] = under(compat_python, case, [{}])
    edits: list[dict[str, object]] = [
        {key: value} for key in {*exhaustive.of_today(keys, parts), *NAMED} for value in tried.get(key, values)
    ]
    if kind == "mt5":  # which has a head of its own
        edits = [edit for edit in edits if not edit.keys() & set(NAMED)]
    taken = [edit for edit in edits if is_taken(case, edit)]
    assert len(edits) > 65 * len(values) / parts and len(taken) > len(edits) / 2
    _, found = under(compat_python, case, taken)
    # Most change nothing; of the others, the newer version says what they should give.
    odd = [(edit, logits) for edit, logits in zip(taken, found, strict=True) if logits not in (None, own)]
    _, (_, *wanted) = under(warm_python, case, [{}, *(edit for edit, _ in odd)])
    for (edit, logits), right in zip(odd, wanted, strict=True):
        assert relative_error(np.array(logits), np.array(right)) < 1e-5, edit


def test_a_tied_mt5_is_tied_in_4_once_converted(tmp_path: Path, warm_python: Path, compat_python: Path) -> None:
    """4.57 takes an MT5 to have a head of its own unless its config says otherwise; a tied one it scales."""
    torch.manual_seed(0)
    model = transformers.MT5ForConditionalGeneration(transformers.MT5Config(**T5_SHAPE))
    model.save_pretrained(tmp_path / "source")
    config = read_config(tmp_path / "source")
    config.pop("tie_word_embeddings", None)
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    convert(tmp_path / "source", tmp_path / "out", run_model=False)
    (source,) = compute_logits([tmp_path / "source"], compat_python)
    assert source.missing == ("lm_head.weight",)
    (five,), (four,) = (compute_logits([tmp_path / "out"], python) for python in (warm_python, compat_python))
    assert four.missing == ()
    assert relative_error(four.output * math.sqrt(T5_SHAPE["d_model"]), five.output) < 1e-5
