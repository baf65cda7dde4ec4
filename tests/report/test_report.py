"""The report's types: what is written is what they declare, what is read stays, and the schema is theirs."""

import ast
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pydantic import BaseModel, ValidationError
from support import tiny
from support.folders import rewritten

from bf16_to_fp16 import UserError, audit, certify, convert, convert_pipeline, results, undo, verify
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.conversion.publish import prepare
from bf16_to_fp16.families.resolve import ModelTensors, resolve
from bf16_to_fp16.families.wiring import Attention
from bf16_to_fp16.finetuning.recipe import parse_recipe
from bf16_to_fp16.finetuning.run import Run, lineage_of
from bf16_to_fp16.json_text import finite
from bf16_to_fp16.measuring.batch import describe_batches
from bf16_to_fp16.measuring.probe import batches
from bf16_to_fp16.measuring.regime_results import RegimeResult
from bf16_to_fp16.ranges import ChannelRange, ModuleRange
from bf16_to_fp16.report.build import descended, replaced_by
from bf16_to_fp16.report.other_reports import PipelineReport, Verification
from bf16_to_fp16.report.remedies import with_next
from bf16_to_fp16.report.schema import REPORT, FinetuneEntry, Inputs, Lineage, Report, Source, Text, json_schema, read
from bf16_to_fp16.report.steps import signals_of
from bf16_to_fp16.rescaling.plan import Plan
from bf16_to_fp16.results import Fidelity, ReportObject

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "bf16_to_fp16"


def as_text(data: object) -> str:
    return json.dumps(finite(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.build("t5-encoder", num_layers=2), tmp_path_factory.mktemp("source") / "theirs")


@pytest.fixture(scope="module")
def converted(source: Path) -> Path:
    assert convert(source, source.parent / "out").safe
    return source.parent / "out"


@pytest.fixture(scope="module")
def written(source: Path, converted: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ReportObject]:
    """A report of every command as it was made, with everything that it can hold; checked as what is written is."""
    attacked = audit(source, regimes=("half",), attention=("eager",), attack_steps=1)
    torch.manual_seed(0)
    shape = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    other = transformers.BertModel(transformers.BertConfig(**shape, num_attention_heads=4))
    recipe = parse_recipe({"source": str(source), "out": "out", "data": {"path": "texts.jsonl"}})
    folder = tmp_path_factory.mktemp("run")
    changed = Path(shutil.copytree(converted, folder / "changed"))
    (changed / "README.md").write_text("# Mine\n")
    (folder / "log.jsonl").write_text('{"step": 10, "task_loss": 2.5}\n')
    empty: dict[str, Any] = {"skipped": [], "evaluations": [], "kept": None, "data": {}}
    entry = FinetuneEntry(steps=10, tokens=100, processes=1, devices=["cpu"], **empty)
    lineage = lineage_of(open_checkpoint(source), recipe, recipe, Run(folder, entry, None))
    report = Report.model_validate(json.loads((converted / REPORT).read_text()))
    least: dict[str, Any] = {"nonfinite": 0, "saturated": 0, "amax": 1e-5, "headroom_bits": 32.6}
    sunk = results.SiteEntry(name="a", limit=65504.0, benign=None, dtype="float16", fp32=1e5, **least)
    lost = results.GradientSiteEntry(name="a:grad", amax=2.0, flushed=0.5)
    gradients = results.GradientsEntry(loss_scale=2.0, flushed=0.25, largest=lost, sites=[lost])
    run = results.RunEntry(attention="eager", batches=1, kinds=["padded"])
    regime = results.RegimeEntry(**least, runs=[run], sites=[sunk], gradients=gradients)
    model = tiny.build("t5-encoder", num_layers=1)
    index = {"text_encoder": ["transformers", "T5EncoderModel"]}
    shutil.copytree(source, folder / "pipeline" / "text_encoder")
    (folder / "pipeline" / "model_index.json").write_text(json.dumps(index))
    both = tiny.save(tiny.small("t5"), folder / "both")
    with rewritten(both / "config.json") as config:
        config["architectures"] = ["T5EncoderModel"]
    theirs = open_checkpoint(tiny.save(tiny.small("pegasus"), folder / "biased"))
    plan = Plan(family="pegasus", centred_keys=["model.encoder.layers.0.self_attn"])
    whole = convert_pipeline(folder / "pipeline", folder / "pipeline-fp16", run_model=False)
    for name, weight in model.named_parameters():
        if name.endswith("wi_0.weight"):
            weight.data.mul_(1e5)
    gated = convert(tiny.save(model, folder / "gated"), folder / "gated-fp16", max_kl=1.0).report
    return {
        "convert": report,
        "audit of no family": Report.model_validate(audit(tiny.save(other, folder / "bert"), regimes=("half",))),
        "convert with edits": Report.model_validate(gated),
        "convert a pipeline": PipelineReport.model_validate(whole.report),
        "convert its encoder": Report.model_validate(whole.encoders["text_encoder"].report),
        "finetune": descended(report, lineage, Fidelity(kl_fp16=1.0)),
        "finetune that goes on": with_next(descended(report, lineage, Fidelity(kl_fp16=1.0)), [], "go on: ..."),
        "lineage": lineage,
        "what was replaced": Source(replaced=replaced_by(resolve(theirs), plan, theirs)),
        "audit": Report.model_validate(attacked),
        "certify": Report.model_validate(certify(source)),
        "certify a part": Report.model_validate(certify(both)),
        "publish": prepare(changed).report,
        "verify": Verification.model_validate(verify(converted)),
        "verify what was changed": Verification.model_validate(verify(changed)),
        "an exception": results.ExceptionEntry(ids=[7], tokens=["a"], kl=0.5, kl_bf16=1e-3, kl_run=1e-4),
        "regime": regime,
        "measured regime": RegimeResult(**dict(regime), norms={}, vectors=False),
        "inputs": Inputs.model_validate(describe_batches(batches(model.config, None, None), seed=0, data="texts.txt")),
    }


def test_a_value_that_several_heads_read_is_reported_as_each_of_them_has_it() -> None:
    layout = resolve(ModelTensors(tiny.build("gemma3")))
    path, signal = next((w.output, f"{w.at}.value") for w in layout.topology if isinstance(w, Attention))
    channels, heads = layout.signals[signal].size, layout.tensors[f"{path}.weight"].shape[1]
    assert heads == 2 * channels
    amax = torch.zeros(heads)
    amax[-1], amax[0] = 8.0, 4.0
    ranges = {path: ModuleRange(ChannelRange(amax, amax, 1), ChannelRange(torch.ones(1), torch.ones(1), 1))}
    plan = Plan(family="gemma3", exponents={signal: [0] * (channels - 1) + [-3]})
    (row,) = [r for r in signals_of(layout, plan, ranges) if r.side == "input"]
    assert (row.module, row.before, row.after) == (path, 8.0, 4.0)


def parts_of(part: ReportObject) -> Iterator[ReportObject]:
    yield part
    waiting: list[Any] = [getattr(part, name) for name in part.model_fields_set]
    while waiting:
        value = waiting.pop()
        if isinstance(value, ReportObject):
            yield from parts_of(value)
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()


def kinds(base: type[ReportObject] = ReportObject) -> set[type[ReportObject]]:
    return {leaf for kind in base.__subclasses__() for leaf in (kinds(kind) or {kind})}


def keys_of(model: type[BaseModel]) -> dict[str, str]:
    return {field.alias or name: name for name, field in model.model_fields.items()}


def test_the_published_schema_is_current_describes_every_part_and_takes_keys_to_come() -> None:
    """``python -m bf16_to_fp16.report.schema > docs/report.schema.json`` makes it so."""
    assert (ROOT / "docs" / "report.schema.json").read_text(encoding="utf-8") == json_schema()
    schema = json.loads(json_schema())
    parts = {"Report": schema, **schema["$defs"]}
    for name, part in parts.items():
        assert part["description"], name
        if name not in ("Plan", "Drift"):
            assert part["additionalProperties"] is True, name
    assert set(schema["properties"]) == set(keys_of(Report))


def test_what_is_written_has_exactly_the_declared_keys(written: dict[str, ReportObject]) -> None:
    for name, part in written.items():
        assert not any(each.model_extra for each in parts_of(part)), name
    found: dict[type[ReportObject], set[str]] = {}
    for part in written.values():
        for each in parts_of(part):
            found.setdefault(type(each), set()).update(each.model_fields_set)
    assert kinds() - set(found) == set()
    unwritten = {f"{kind.__name__}.{name}" for kind in found for name in set(kind.model_fields) - found[kind]}
    assert unwritten == set()


def test_every_field_is_read_here_or_told_to_readers() -> None:
    used: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if path.name != "schema.py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            used |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    for path in PACKAGE.rglob("*.jinja"):
        used |= set(re.findall(r"\.(\w+)", path.read_text(encoding="utf-8")))
    told = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "report.md").read_text(encoding="utf-8")))
    for kind in kinds():
        for key, name in keys_of(kind).items():
            assert name in used or key in told, f"{kind.__name__}.{name} is neither read nor in docs/report.md"
    assert set(keys_of(Report)) <= told


def test_a_report_that_is_read_and_written_again_is_the_same_to_the_byte(converted: Path) -> None:
    text = (converted / REPORT).read_text(encoding="utf-8")
    assert as_text(results.dump(read(Report, json.loads(text)))) == text


def test_keys_of_another_version_stay_and_no_part_can_be_changed(converted: Path) -> None:
    data = json.loads((converted / REPORT).read_text())
    del data["signals"], data["regimes"]["half"]["runs"]
    data["source"]["certificate"] = data["regimes"]["half"]["sites"][0]["oddity"] = {"b": 1, "a": [None, 2]}
    data = {"later": 1, **{key: data[key] for key in sorted(data, reverse=True)}}
    report = read(Report, data)
    assert report.signals == [] and report.regimes["half"].runs == []
    assert read(Text, {"name": "mine"}).rows is None
    with pytest.raises(ValidationError, match="frozen"):
        report.proof = "certified"
    assert json.loads(as_text(results.dump(report))) == data


def test_nan_is_null_in_json_and_nan_again_when_read() -> None:
    signal = {"module": "a", "side": "input", "kind": "residual", "before": torch.nan, "after": 1.0}
    data = json.loads(as_text({"signals": [signal]}))
    assert data["signals"][0]["before"] is None
    report = read(Report, data)
    assert report.signals[0].before != report.signals[0].before and as_text(results.dump(report)) == as_text(data)


def test_a_finetunes_report_has_the_keys_of_a_conversion_and_its_own(written: dict[str, ReportObject]) -> None:
    assert {*results.dump(written["finetune"])} == {*results.dump(written["convert"]), "finetune"}
    lineage = written["lineage"]
    assert isinstance(lineage, Lineage)
    assert list(results.dump(lineage.source)) == ["path", "revision", "sha256", "other_sha256"]


def test_the_report_of_a_finetune_has_its_recipe_as_written_and_what_became_of_it(source: Path, tmp_path: Path) -> None:
    recipe = parse_recipe({"source": str(source), "out": "out", "data": {"path": "texts.jsonl"}})
    run = Run(tmp_path, FinetuneEntry(steps=10, tokens=100, devices=["cpu"]), None)
    found = lineage_of(open_checkpoint(source), recipe, recipe.settled(), run).finetune
    assert found.recipe["penalty"]["certify"] is None and found.settled == {"penalty.certify": True}
    assert found.holds_bounds
    decided = recipe.model_copy(update={"penalty": recipe.penalty.model_copy(update={"certify": False})})
    written = lineage_of(open_checkpoint(source), decided, decided, run).finetune
    assert written.settled == {} and not written.holds_bounds


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("source", {"dtype": "BF16"}, "has no source.sha256, so convert did not write it"),
        ("source.dtype", "F8_E4M3", "source.dtype is not what convert writes"),
        ("output", {}, "has no output.files, so convert did not write it"),
        ("output.files", [], "is not what convert wrote (SHA-256); fetch or convert it again"),
    ],
)
def test_undo_says_what_it_needs(tmp_path: Path, converted: Path, place: str, value: object, said: str) -> None:
    folder = Path(shutil.copytree(converted, tmp_path / "folder"))
    with rewritten(folder / REPORT) as data:
        *above, key = place.split(".")
        (data[above[0]] if above else data)[key] = value
    with pytest.raises(UserError) as caught:
        undo(folder, tmp_path / "out")
    assert said in str(caught.value) and "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_a_divergence_of_0_that_was_rounded_is_not_called_the_same_function() -> None:
    assert Fidelity(kl_fp32=0.0, squared_error_fp32=0.0).exact
    assert not Fidelity(kl_fp32=0.0, squared_error_fp32=1e-14).exact
    assert not Fidelity(kl_fp32=1e-14, squared_error_fp32=0.0).exact and not Fidelity().exact
