"""Whole pipelines in diffusers: the converted one takes the same step in fp32, and in fp16 a nearer one than bf16's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.utils import logging
from support import diffusion, exhaustive, pipelines
from support.diffusion import CASES, Case

from bf16_to_fp16 import convert_pipeline
from bf16_to_fp16.conversion.pipelines import READ_AT_THE_END, READ_INSIDE
from bf16_to_fp16.families.known import named

logging.set_verbosity_error()

ROUNDING = 1e-6  # of fp32, over all layers


def load(folder: Path) -> Any:
    return diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.float32, vae=None)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def in_16_bits(case: Case, pipe: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the step of a pipeline whose converted encoders compute in ``dtype``, and all else in fp32."""
    for name in case.encoders:
        getattr(pipe, name).to(dtype)
    return case.run(pipe, case.encode(pipe))


INSIDE = {
    *("Lumina2Pipeline", "ZImagePipeline", "HunyuanVideoPipeline", "HunyuanImagePipeline"),
    *("HiDreamImagePipeline", "Flux2KleinPipeline", "Flux2Pipeline"),
}
"""The cases that read inner states of an encoder of one stack."""
FEW = ("FluxPipeline", "SanaPipeline", "HiDreamImagePipeline", "Flux2KleinPipeline")
"""Some read their encoders at the end, some inside; the rest reads as these do."""


@pytest.mark.parametrize(
    "case", exhaustive.beyond([case for case in CASES if case.kind in FEW], CASES), ids=lambda case: case.kind
)
def test_a_converted_pipeline_takes_the_same_step(case: Case, tmp_path: Path) -> None:
    case.build().save_pretrained(tmp_path / "source")
    done = convert_pipeline(tmp_path / "source", tmp_path / "out", run_model=False)
    assert done.safe and {*done.encoders} == {*case.encoders}
    plans = [one.report["plan"] for one in done.encoders.values()]
    assert all(plan["residual_exponent"] or plan["exponents"] for plan in plans)  # else nothing was put to the test
    source, converted = load(tmp_path / "source"), load(tmp_path / "out")
    wanted = case.run(source, case.encode(source))
    assert error(case.run(converted, case.encode(converted)), wanted) < ROUNDING
    in_fp16 = error(in_16_bits(case, converted, torch.float16), wanted)
    assert in_fp16 < error(in_16_bits(case, source, torch.bfloat16), wanted)
    overflowing = error(in_16_bits(case, load(tmp_path / "source"), torch.float16), wanted)
    assert not overflowing < 100 * in_fp16


def test_an_encoder_is_converted_for_the_class_that_loads_it(tmp_path: Path) -> None:
    (case,) = (case for case in CASES if case.kind == "SanaPipeline")
    case.build().save_pretrained(tmp_path / "source")
    whole = diffusion.encoder("gemma2")  # with the head, which is the embedding and which the pipeline does not load
    pipelines.tiny.save(whole, tmp_path / "source" / "text_encoder")
    done = convert_pipeline(tmp_path / "source", tmp_path / "out", run_model=False)
    assert "--as Gemma2Model" in done.encoders["text_encoder"].report["command"]
    source, converted = load(tmp_path / "source"), load(tmp_path / "out")
    wanted = case.encode(source)[0]
    assert error(case.encode(converted)[0], wanted) < 1e-4


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
def test_inner_states_that_a_pipeline_may_read_are_the_sources(case: Case, tmp_path: Path) -> None:
    case.build().save_pretrained(tmp_path / "source")
    done = convert_pipeline(tmp_path / "source", tmp_path / "out", run_model=False)
    for one in done.encoders.values():
        outputs, family = one.report["outputs"], named(one.report["family"])
        assert family is not None and outputs["last_hidden_state"]["factor_log2"] == 0
        assert family.decoder is not None or case.kind not in INSIDE or outputs["hidden_states"]["factor_log2"] == 0


def test_the_classes_that_read_last_states_alone_are_there() -> None:
    assert all(hasattr(diffusers, kind) for kind in READ_AT_THE_END | READ_INSIDE)
