"""From a recipe to a converted checkpoint: what appears, what is refused, and what a killed run leaves."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from support import tiny
from support.learner import changed, recipe_tree, rows_of, saved, tiny_model, without_edits
from support.program import refused
from torch.utils._python_dispatch import TorchDispatchMode

from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.cli import main
from bf16_to_fp16.conversion.adapter import convert_adapter
from bf16_to_fp16.conversion.convert import convert
from bf16_to_fp16.conversion.make_safe import make_fp16_safe
from bf16_to_fp16.conversion.options import Options
from bf16_to_fp16.conversion.undo import undo
from bf16_to_fp16.conversion.verify import verify
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.finetuning.recipe import parse_recipe, read_recipe
from bf16_to_fp16.finetuning.run import Run, converted_alone, finetune, train
from bf16_to_fp16.finetuning.start import what_helps, written_trained
from bf16_to_fp16.finetuning.states import RunFolder
from bf16_to_fp16.measuring.stock import load
from bf16_to_fp16.progress import Progress

pytestmark = pytest.mark.usefixtures("first_batch")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("source"), 60, dtype=torch.bfloat16)


def written(origin: Path, folder: Path, **changes: Any) -> Path:
    quick = {"device": "cpu", "evaluation": {"every": 100, "attack_steps": 0}}
    tree = changed(recipe_tree(origin, folder / "out") | quick, changes)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def rewritten(model: Any, folder: Path) -> Path:
    model.to(torch.bfloat16).save_pretrained(folder)
    transformers.ByT5Tokenizer(extra_ids=125).save_pretrained(folder)
    return folder


def test_a_finetune_ends_in_a_converted_checkpoint_with_its_history(source: Path, tmp_path: Path) -> None:
    result = finetune(written(source, tmp_path, schedule={"steps": 3}))
    assert result is not None and result.safe
    report = json.loads((tmp_path / "out" / "fp16_report.json").read_text())
    assert report["command"] == "bf16-to-fp16 finetune recipe.yaml"
    assert report["source"]["path"].endswith(source.name) and list(report["source"]["sha256"]) == ["model.safetensors"]
    assert report["verdict"] == "safe"
    run = report["finetune"]
    assert "next" not in run or run["next"] == ""
    assert (run["steps"], run["processes"], run["devices"]) == (3, 1, ["cpu"])
    assert [e["step"] for e in run["evaluations"]] == [0, 3]
    assert run["recipe"]["source"] == source.name and run["data"]["objective"] == "span-corruption"
    assert str(tmp_path) not in json.dumps(run) and run["fidelity"]["kl_fp16"] > report["fidelity"]["kl_fp16"]
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out", dtype=torch.float16)
    assert {p.dtype for name, p in model.named_parameters() if not name.endswith("wo.weight")} == {torch.float16}
    assert not (tmp_path / "out.run" / "trained").exists()
    original, trained = (load(folder, torch.float32) for folder in (source, tmp_path / "out"))
    batch = {"input_ids": torch.arange(5, 25)[None], "decoder_input_ids": torch.arange(4)[None]}
    with torch.no_grad():
        difference = (original(**batch).logits - trained(**batch).logits).abs().max()
    assert 1e-3 < float(difference) < 5
    assert undo(tmp_path / "out", tmp_path / "back").is_dir()


def test_a_pegasus_whose_head_stands_apart_is_finetuned_with_one_embedding(tmp_path: Path, source: Path) -> None:
    """Stock Pegasus then ties nothing, so that files hold the embedding under three names."""
    model = tiny.pegasus(
        vocab_size=384, d_model=12, encoder_layers=1, decoder_layers=1, tie_word_embeddings=False, dropout=0.0
    )
    with torch.no_grad():
        for part in (model.model.encoder, model.model.decoder):
            part.embed_tokens.weight.copy_(model.model.shared.weight)
    apart = rewritten(model, tmp_path / "apart")
    recipe = read_recipe(written(source, tmp_path, source=str(apart), schedule={"steps": 1}))
    run = train(recipe, open_checkpoint(apart), progress=False)
    assert isinstance(run, Run) and run.weights is not None
    with written_trained(run.folder, run.weights) as trained:
        embedding = load(trained, torch.float32).model
    weights = [part.embed_tokens.weight for part in (embedding.encoder, embedding.decoder)]
    assert torch.equal(*weights) and not torch.equal(weights[0], model.model.shared.weight.float())


def test_what_cannot_be_written_is_known_first(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise UserError("tensor lm_head.weight is missing")

    monkeypatch.setattr("bf16_to_fp16.finetuning.run.convert_by", refuse)
    with pytest.raises(UserError, match="lm_head"):
        finetune(written(source, tmp_path), overrides=("rescale=false",))
    assert not RunFolder(tmp_path / "out.run").steps() and not (tmp_path / "out.run" / "trained").exists()


def test_the_unrescaled_start_is_the_source_and_one_that_overflows_is_refused(source: Path, tmp_path: Path) -> None:
    model = tiny_model()
    model.encoder.block[0].layer[1].DenseReluDense.wo.weight.data.mul_(1e5)
    model.encoder.block[0].layer[1].DenseReluDense.wi_1.weight.data.mul_(1e3)
    recipe = written(source, tmp_path, source=str(rewritten(model, tmp_path / "model")), rescale=False)
    with pytest.raises(UserError, match=r"Dense.wo is inf or NaN before the first .* rescale: true, penalty"):
        finetune(recipe, overrides=("penalty.form=none",))
    assert not (tmp_path / "out").exists()
    assert what_helps(True, False, "fp16", "fp16") == "precision: fp32"
    assert what_helps(True, True, "bf16", "fp16") == what_helps(True, False, "fp32", "fp32") == "another source"
    start = load(tmp_path / "out.run" / "start", torch.float32)
    for name, tensor in load(tmp_path / "model", torch.float32).state_dict().items():
        assert torch.equal(tensor, start.state_dict()[name]), name
    other = ("rescale=true", "schedule.steps=1", f"checkpointing.folder={tmp_path / 'other'}")
    result = finetune(recipe, overrides=other)
    assert result is not None and result.safe
    factor = result.report["outputs"]["encoder_hidden_states"]["factor_log2"]
    assert factor < 0 and result.report["finetune"]["start_outputs"]["encoder_hidden_states"] < 0
    ids, kept = torch.arange(5, 25)[None], verify(tmp_path / "out", run_model=False)
    encoders = (load(tmp_path / name, torch.float32).encoder for name in ("model", "out"))
    before, after = (encoder(ids, output_hidden_states=True) for encoder in encoders)
    ratio = after.hidden_states[0].norm() / before.hidden_states[0].norm()
    assert float(ratio.log2()) == pytest.approx(factor, abs=0.1) and kept["verified"]
    # What was trained comes back to the original's scale: of its own conversion and of the start's.
    folders = tmp_path / "model", undo(tmp_path / "out", tmp_path / "back"), tmp_path / "out"
    original, back, trained = (load(folder, torch.float32) for folder in folders)
    assert back.config.layer_norm_epsilon == original.config.layer_norm_epsilon
    change = (back.shared.weight.norm() / original.shared.weight.norm()).log2()
    assert abs(float(change)) < 0.1 and result.report["finetune"]["start"]["residual_exponent"] < 0
    one, other = (each(input_ids=ids, decoder_input_ids=ids).logits for each in (back, trained))
    assert torch.allclose(one, other, atol=1e-4)
    again = load(undo(tmp_path / "out", tmp_path / "again", plan=tmp_path / "out"), torch.float32)
    assert torch.equal(again.shared.weight, back.shared.weight)
    # An adapter of the original goes to the scale of both, and what is made safe goes back from both.
    at, lora = "encoder.block.0.layer.0.SelfAttention.o", tmp_path / "lora"
    kept_weight, weight = (each.get_submodule(at).weight.detach().clone() for each in (back, trained))
    factors = {"A": torch.ones(1, weight.shape[1]), "B": torch.ones(len(weight), 1)}
    lora.mkdir()
    named = {f"base_model.model.{at}.lora_{side}.weight": x for side, x in factors.items()}
    save_file(named, lora / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "base_model_name_or_path": str(tmp_path / "model")}
    (lora / "adapter_config.json").write_text(json.dumps(config))
    convert_adapter(lora, tmp_path / "taken", tmp_path / "out")
    side_a, side_b = (load_file(tmp_path / "taken" / "adapter_model.safetensors")[name] for name in named)
    torch.testing.assert_close((side_b @ side_a) * kept_weight, weight, rtol=1e-6, atol=0.0)
    assert torch.equal(make_fp16_safe(trained).undo(trained).shared.weight, back.shared.weight)


def test_a_finetune_of_a_converted_folder_comes_back_to_it_and_then_to_its_source(source: Path, tmp_path: Path) -> None:
    model = tiny_model()
    for name, weight in model.named_parameters():
        if name == "shared.weight" or name.endswith((".o.weight", ".wo.weight")):
            weight.data.mul_(2.0**14)
    first = convert(rewritten(model, tmp_path / "model"), tmp_path / "converted", run_model=False).plan
    recipe = written(source, tmp_path, source=str(tmp_path / "converted"))
    # So much headroom has the start moved further, and leaves the last conversion nothing to do.
    result = finetune(recipe, overrides=("schedule.steps=1", "penalty.headroom_bits=12", "penalty.certify=false"))
    assert result is not None and not result.plan.moves and first.residual_exponent < 0
    assert result.report["finetune"]["start"]["residual_exponent"] < 0
    problems = verify(tmp_path / "out", run_model=False)["problems"]
    assert [problem["check"] for problem in problems] == ["report"], problems  # short of the headroom
    for name, plan in (("by-report", None), ("by-plan", tmp_path / "out")):
        back = undo(tmp_path / "out", tmp_path / name, plan=plan)
        with pytest.raises(UserError, match="was not trained from the conversion"):
            undo(back, tmp_path / "twice", plan=tmp_path / "out")
        original = undo(back, tmp_path / f"{name}-original", plan=tmp_path / "converted")
        for folder, scale in ((back, first.residual_exponent), (original, 0)):
            weight = load(folder, torch.float32).shared.weight
            assert float((weight.norm() / model.shared.weight.float().norm()).log2()) == pytest.approx(scale, abs=0.1)


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["penalty.headroom=3"], "unknown key penalty.headroom; did you mean penalty.headroom_bits?"),
        (["device=cuda:9999"], "device cuda:9999: this machine has"),
        (["out={source}"], "overlaps the source"),
        (["source=nowhere"], "nowhere is not a folder here"),
        (["data.path=nowhere.txt"], "nowhere.txt"),
        (["checkpointing.folder={source}"], "overlaps the source"),
    ],
)
def test_bad_input_is_one_line_and_nothing_at_out(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], wanted: str
) -> None:
    arguments = [part for o in overrides for part in ("--set", o.format(source=source))]
    assert wanted in refused(capsys, "finetune", written(source, tmp_path), *arguments)
    assert not (tmp_path / "out").exists()


class FullOnce(TorchDispatchMode):
    """A device whose memory is full in the twelfth backward through an embedding, and never again."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.embedding_dense_backward.default:
            self.calls += 1
            if self.calls == 12:
                raise torch.OutOfMemoryError("out of memory")
        return func(*args, **(kwargs or {}))


def test_a_full_device_is_one_line_and_the_run_goes_on_after(source: Path, tmp_path: Path) -> None:
    settings = ("rescale=false", "schedule.steps=4", "penalty.form=none")
    recipe = read_recipe(written(source, tmp_path, checkpointing={"every": 1}), settings)
    large = parse_recipe(changed(recipe.describe(), {"data": {"batch_size": 10**9}}))
    with pytest.raises(UserError, match=r"batch_size 1000000000: a pass takes .* GB or more, and .* GB are free; give"):
        train(large, open_checkpoint(source), progress=False)
    assert RunFolder(tmp_path / "out.run").steps() == []
    with FullOnce(), pytest.raises(UserError, match=r"cpu is out of memory; give a smaller data\.batch_size"):
        train(recipe, open_checkpoint(source), progress=False)
    before = rows_of(tmp_path / "out.run", "precision")
    run = train(recipe, open_checkpoint(source), progress=False)
    rows = rows_of(tmp_path / "out.run", "precision")
    assert isinstance(run, Run) and run.entry.devices == ["cpu"] and run.entry.steps == 4 and 0 < len(before) < 4
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


def test_only_a_fitting_start_begins_in_fp16(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe is looked at too; what a conversion alone does not prove is trained, and nothing is left of it."""
    without_edits(monkeypatch)
    recipe, one = written(source, tmp_path), ("schedule.steps=1",)
    with monkeypatch.context() as unproven:
        unproven.setattr("bf16_to_fp16.finetuning.run.converted_alone", lambda recipe, progress: None)
        run = train(read_recipe(recipe, one), open_checkpoint(source), if_needed=True)
    assert isinstance(run, Run) and run.entry.steps == 1
    assert [row["precision"] for row in rows_of(tmp_path / "out.run", "precision")] == ["fp16"]
    large = tiny_model()
    large.encoder.block[0].layer[0].SelfAttention.q.weight.data.mul_(3e6)
    loud = rewritten(large, tmp_path / "second" / "loud")
    recipe = written(source, tmp_path / "second", source=str(loud))
    assert converted_alone(read_recipe(recipe), Progress()) is None
    assert {path.name for path in (tmp_path / "second").iterdir()} == {"loud", "recipe.yaml"}
    with pytest.raises(UserError, match=r"scores is inf .* set penalty\.form: smooth-max or precision: fp32"):
        train(read_recipe(recipe, ["penalty.form=none"]), open_checkpoint(loud))
    train(read_recipe(recipe, one), open_checkpoint(loud))
    assert [row["precision"] for row in rows_of(tmp_path / "second" / "out.run", "precision")] == ["bf16"]


def test_convert_finetunes_what_is_unsafe(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = yaml.safe_load(written(source, tmp_path).read_text())
    del tree["source"], tree["out"]
    recipe = tmp_path / "short.yaml"
    recipe.write_text(yaml.safe_dump(tree))
    assert main(["convert", str(source), str(tmp_path / "safe"), "--finetune", str(recipe)]) == 0
    report = json.loads((tmp_path / "safe" / "fp16_report.json").read_text())
    assert "finetune" not in report and not (tmp_path / "safe.run").exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    capsys.readouterr()
    flags = ["--dry-run", "--no-audit"]
    for given in (flags[:1], flags[1:], flags):
        said = refused(capsys, "convert", source, tmp_path / "x", "--finetune", recipe, *given)
        assert said.endswith(f"leave out --finetune or {given[0]}")
    bad = tmp_path / "bad.yaml"
    bad.write_text("data: {path: none.txt}\nschedul: {}\n")
    assert "unknown key schedul" in refused(capsys, "convert", source, tmp_path / "x", "--finetune", bad)
    assert not (tmp_path / "x").exists()


def test_what_a_conversion_certifies_is_told(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = recipe_tree(source, tmp_path / "out")
    recipe, given = tmp_path / "recipe.yaml", {key: tree[key] for key in ("source", "out", "data")}
    recipe.write_text(yaml.safe_dump(given | {"device": "cpu", "evaluation": {"every": 100}}))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / ".env").touch()
    (tmp_path / "out.run").symlink_to("elsewhere")
    assert main(["finetune", str(recipe), "--set", "penalty.headroom_bits=0.5"]) == 0
    assert "Nothing to train: after a conversion alone no input can overflow it (--force" in capsys.readouterr().err
    report = json.loads((tmp_path / "out" / "fp16_report.json").read_text())
    assert report["proof"] == "certified" and "finetune" not in report
    assert report["command"] == f"bf16-to-fp16 convert {source.name} out"
    assert verify(tmp_path / "out", run_model=False)["verified"]
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == [".env"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "out", "out.run", "recipe.yaml"]
    shutil.rmtree(tmp_path / "out")

    def refuse(options: Options, *_: Any, **__: Any) -> None:
        raise UserError(options.target)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match=r"^half$"):
        patch.setattr("bf16_to_fp16.finetuning.run.converted_if_enough", refuse)
        converted_alone(read_recipe(recipe, ("target=half",)), Progress())
    assert main(["finetune", str(recipe), "--set", "schedule.steps=1", "--force"]) == 0
    printed = capsys.readouterr()
    assert "untrained weights (no trained step was kept), from a rescaled start: " in printed.out
    assert "was converted before" not in printed.err
    report = json.loads((tmp_path / "out" / "fp16_report.json").read_text())
    # The start is certified, and nothing is nearer to the original.
    assert (report["finetune"]["steps"], report["finetune"]["kept"]) == (1, 0)
    assert report["finetune"]["fidelity"]["kl_fp16"] == report["fidelity"]["kl_fp16"]


def test_a_recipe_is_met_where_all_that_it_asks_for_is_there() -> None:
    def met(bits: float, **sections: Any) -> bool:
        return parse_recipe({"source": "s", "out": "o", "data": {"path": "t"}, **sections}).is_met_by(bits)

    assert met(0.1) and met(0.1, schedule={"steps": 9}, precision="fp32")
    assert met(3.0, penalty={"headroom_bits": 3.0}) and not met(2.9, penalty={"headroom_bits": 3.0})
    assert met(0.1, penalty={"certify": True})
    assert not met(9.0, penalty={"form": "none"}) and not met(9.0, distillation={"weight": 0.9})
    assert not met(9.0, quality={"max_kl": None})
