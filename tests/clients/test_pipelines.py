"""Whole pipelines in diffusers: the converted one takes the same step in fp32, and in fp16 a nearer one than bf16's."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.utils import logging
from support import diffusion, exhaustive, pipelines
from support.diffusion import CASES, Case

from bf16_to_fp16 import convert_pipeline, undo_pipeline
from bf16_to_fp16.checkpoint.pipeline_classes import PIPELINES, Linear, Norm
from bf16_to_fp16.families.known import FAMILIES, names_of

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


FEW = ("FluxPipeline", "SanaPipeline", "ZImagePipeline", "HiDreamImagePipeline", "Flux2KleinPipeline")
"""One for each way in which pipelines read their encoders; the rest reads as these do."""


@pytest.mark.parametrize(
    "case", exhaustive.beyond([case for case in CASES if case.kind in FEW], CASES), ids=lambda case: case.kind
)
def test_a_converted_pipeline_takes_the_same_step(case: Case, tmp_path: Path) -> None:
    case.build().save_pretrained(tmp_path / "source")
    done = convert_pipeline(tmp_path / "source", tmp_path / "out", run_model=False)
    assert done.safe and not done.report["assumed"] and {*done.encoders} == {*case.encoders}
    plans = [one.report["plan"] for one in done.encoders.values()]
    assert all(plan["residual_exponent"] < 0 for plan in plans)  # else nothing was put to the test
    drift = max((plan.get("drift") or {}).get("relative_error", 0) for plan in plans)
    source, converted = load(tmp_path / "source"), load(tmp_path / "out")
    wanted = case.run(source, case.encode(source))
    embeddings = case.encode(converted)
    assert error(case.run(converted, embeddings), wanted) < 2 * drift + ROUNDING
    if any(entry.get("linear") for entry in done.report["readings"]):
        # What the linears make up for is not small.
        converted.transformer, ours = source.transformer, converted.transformer
        assert error(case.run(converted, embeddings), wanted) > 0.001
        converted.transformer = ours
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


def test_undo_brings_a_transformer_in_shards_back(tmp_path: Path) -> None:
    (case,) = (case for case in CASES if case.kind == "HunyuanVideoPipeline")
    case.build().save_pretrained(tmp_path / "source", max_shard_size="20KB")
    wanted = case.run(load(tmp_path / "source"), case.encode(load(tmp_path / "source")))
    done = convert_pipeline(tmp_path / "source", tmp_path / "out", run_model=False)
    shards = {entry["name"] for entry in done.report["rescaled"]}
    undo_pipeline(tmp_path / "out", tmp_path / "back")
    before, after = (pipelines.contents(tmp_path / name) for name in ("source", "back"))
    assert shards and {name: after[name] for name in shards} == {name: before[name] for name in shards}
    again = load(tmp_path / "back")
    assert error(case.run(again, case.encode(again)), wanted) < ROUNDING


SEEING = {name for family in FAMILIES if family.projector is not None for name in names_of(family)}
SEEING |= {"Qwen2_5_VLTextModel"}
"""Encoders that see images too. Pipelines that are not in the table are refused with one, others leave it as it is."""


def test_the_table_names_every_class_of_diffusers_that_has_a_supported_encoder() -> None:
    supported = {name for family in FAMILIES for name in names_of(family)}
    kinds = {kind: getattr(diffusers, kind) for kind in dir(diffusers) if kind.endswith("Pipeline")}
    for kind, made in kinds.items():
        parameters = {**inspect.signature(made.__init__).parameters}
        del parameters["self"]
        if {*parameters} == {"args", "kwargs"}:  # of a class whose own requirements are not installed
            continue
        readings = PIPELINES.get(kind, ())
        assert {reading.encoder for reading in readings} <= {*parameters}, kind
        assert {what.component for reading in readings for what in reading.meets} <= {*parameters, ""}, kind
        for name, parameter in parameters.items():
            words = {*str(parameter.annotation).replace("|", " ").replace("'", " ").replace(".", " ").split()}
            known = any(reading.encoder == name for reading in readings)
            assert known or not (supported - SEEING) & words, f"{kind}: {name}"
    assert not [kind for kind in PIPELINES if not hasattr(diffusers, kind)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
def test_the_table_names_layers_that_there_are(case: Case, tmp_path: Path) -> None:
    parts: dict[str, Any] = {**case.make()}
    configs = {name: dict(part.config) for name, part in parts.items() if isinstance(part, diffusers.models.ModelMixin)}
    for reading in PIPELINES[case.kind]:
        for each in reading.each(configs):
            for what in each.meets:
                component = parts[what.component]
                if isinstance(what, Linear):
                    weight = component.state_dict()[what.weight]
                    assert weight.shape[1] == len(each.states or ()) * diffusion.WIDTH
                elif isinstance(what, Norm):
                    norm = component.get_submodule(what.module)
                    assert getattr(norm, "eps", None) == what.eps_by(configs[what.component])
