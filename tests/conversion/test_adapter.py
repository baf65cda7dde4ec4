"""LoRA adapters taken to a converted checkpoint and back: with the adapter it still computes the same function."""

import functools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny
from support.contract import outputs, random_plan
from support.folders import rewritten
from support.forging import plan_file

from bf16_to_fp16 import UserError, cli, convert, convert_adapter, make_fp16_safe
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.conversion.adapter import CONFIG, NOTE, TENSORS
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.families.signals import Kind
from bf16_to_fp16.measuring.stock import load
from bf16_to_fp16.rescaling.adapters import scaled_adapter
from bf16_to_fp16.rescaling.plan import Plan

PREFIX = "base_model.model."
MOVED = (Kind.RESIDUAL, Kind.NORM, Kind.VALUE, Kind.QUERY_KEY, Kind.NEURON)

Pair = tuple[Path, Path]


def converted_by(kind: str, folder: Path, kinds: tuple[Kind, ...] = MOVED) -> Pair:
    """Return a source and its conversion by a plan that moves every channel of all kinds, and loses no bit."""
    model = tiny.small(kind, factor=30.0)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_((tensor * 256).round() / 256)  # no bit so low that the plan would take it below fp16's last
    source = tiny.save(model, folder / "source", torch.float32)
    plan = plan_file(folder / "plan.json", random_plan(resolve(open_checkpoint(source)), kinds))
    convert(source, folder / "out", plan=plan, run_model=False)
    return source, folder / "out"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    @functools.cache
    def pair_of(kind: str) -> Pair:
        source, out = converted_by(kind, tmp_path_factory.mktemp(kind))
        assert same(load(source, torch.float32), load(out, torch.float32))
        return source, out

    return pair_of


@pytest.fixture(params=["gated", "t5"])
def pair(pairs: Callable[[str], Pair], request: pytest.FixtureRequest) -> Pair:
    return pairs(request.param)


@pytest.fixture
def gated(pairs: Callable[[str], Pair]) -> Pair:
    return pairs("gated")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 8).to(dtype)


def adapter_for(source: Path, folder: Path, dtype: torch.dtype = torch.float32, **config: Any) -> dict[str, Any]:
    """Write a LoRA adapter on every matrix and embedding of a checkpoint, without PEFT, and return its tensors."""
    tensors: dict[str, torch.Tensor] = {}
    for i, (name, info) in enumerate(sorted(open_checkpoint(source).tensors.items())):
        path = f"{PREFIX}{name.removesuffix('.weight')}"
        if len(info.shape) != 2 or "relative" in name or "positions" in name or name == "final_logits_bias":
            continue
        rows, columns = info.shape
        if "shared" in name:
            tensors[f"{path}.lora_embedding_A"] = draw(2, rows, seed=i, dtype=dtype)
            tensors[f"{path}.lora_embedding_B"] = draw(columns, 2, seed=i + 500, dtype=dtype)
        else:
            tensors[f"{path}.lora_A.weight"] = draw(2, columns, seed=i, dtype=dtype)
            tensors[f"{path}.lora_B.weight"] = draw(rows, 2, seed=i + 500, dtype=dtype)
    return write(folder, tensors, source, **config)


def of_config(**changes: Any) -> Callable[[Path], None]:
    def change(adapter: Path) -> None:
        with rewritten(adapter / CONFIG) as config:
            config |= changes

    return change


def write(folder: Path, tensors: dict[str, torch.Tensor], source: Path, **config: Any) -> dict[str, Any]:
    folder.mkdir(parents=True)
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    given = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "base_model_name_or_path": str(source)}
    (folder / CONFIG).write_text(json.dumps(given | {"revision": "main"} | config))
    (folder / "README.md").write_text("# An adapter\n")
    return tensors


def merged(folder: Path, adapter: Path) -> Any:
    """Return a checkpoint in fp32 with an adapter merged by hand: W + alpha/r·B·A."""
    model, tensors = load(folder, torch.float32), load_file(adapter / TENSORS)
    with torch.no_grad():
        for name, b in tensors.items():
            path = name.removeprefix(PREFIX).partition(".lora_")[0]
            weight = model.get_submodule(path).weight
            if name.endswith("lora_B.weight"):
                weight += 1.5 * (b.float() @ tensors[name.replace("lora_B", "lora_A")].float())
            elif name.endswith("lora_embedding_B"):
                weight += 1.5 * (b.float() @ tensors[name.replace("embedding_B", "embedding_A")].float()).T
    return model


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(outputs(one), outputs(other), strict=True))


def test_a_merged_adapter_is_the_same_function_and_comes_back_with_its_config(pair: Pair, tmp_path: Path) -> None:
    source, out = pair
    before = adapter_for(source, tmp_path / "adapter", torch.bfloat16)
    done = convert_adapter(tmp_path / "adapter", tmp_path / "taken", out)
    reference = merged(source, tmp_path / "adapter")
    assert same(reference, merged(out, tmp_path / "taken"))
    assert not same(reference, load(source, torch.float32))  # the adapter does something
    assert not same(reference, merged(out, tmp_path / "adapter"))  # and must be converted
    assert done.tensors.keys() == before.keys() and done.notes == ()
    assert {t.dtype for t in load_file(tmp_path / "taken" / TENSORS).values()} == {torch.bfloat16}
    convert_adapter(tmp_path / "taken", tmp_path / "back", out, back=True)
    after = load_file(tmp_path / "back" / TENSORS)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    configs = [json.loads((tmp_path / name / CONFIG).read_text()) for name in ("adapter", "taken", "back")]
    assert [c["base_model_name_or_path"] for c in configs] == [str(source), str(out), "source"]
    assert configs[1] == configs[0] | {"base_model_name_or_path": str(out), "revision": None}
    assert (tmp_path / "taken" / "SOURCE_README.md").read_text() == "# An adapter\n"
    assert (tmp_path / "back" / "README.md").read_text() == "# An adapter\n"


PEFT_CASES: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q", "k", "v", "o"]},
    "neurons": {"target_modules": r".*DenseReluDense\.w.*", "use_rslora": True},
    "patterns": {"target_modules": ["q", "wo"], "rank_pattern": {"wo": 4}, "alpha_pattern": {"q": 7}},
    "whole": {"target_modules": ["q"], "modules_to_save": ["layer_norm", "final_layer_norm"]},
    "embeddings": {"target_modules": ["embed_tokens", "v"]},
    "head": {"target_modules": ["lm_head"]},
    "whole head": {"target_modules": ["q"], "modules_to_save": ["lm_head"]},
    "tokens": {"target_modules": ["v"], "trainable_token_indices": {"embed_tokens": [5, 9, 11]}},
    "lora bias": {"target_modules": ["q", "wo"], "lora_bias": True},
}
OF_A_TIED_HEAD = ("embeddings", "head", "whole head", "tokens")


def with_peft(source: Path, folder: Path, case: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    model: Any = peft.get_peft_model(load(source, torch.float32), peft.LoraConfig(r=3, **case)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter) * (0.1 * parameter.abs().mean() + 0.02)
    result = outputs(model)
    model.save_pretrained(folder)
    return result


def adapted(base: Path, adapter: Path) -> Any:
    return peft.PeftModel.from_pretrained(load(base, torch.float32), str(adapter)).eval()


@pytest.mark.parametrize(
    ("kind", "case"), [*(("gated", case) for case in PEFT_CASES), *(("t5", case) for case in OF_A_TIED_HEAD)]
)
def test_peft_computes_the_same_function_with_the_converted_adapter(
    kind: str, case: str, pairs: Callable[[str], Pair], tmp_path: Path
) -> None:
    source, out = pairs(kind)
    reference = with_peft(source, tmp_path / "adapter", PEFT_CASES[case])
    convert_adapter(tmp_path / "adapter", tmp_path / "taken", out)
    assert all(map(torch.equal, reference, outputs(adapted(out, tmp_path / "taken"))))
    assert not all(map(torch.equal, reference, outputs(load(source, torch.float32))))


def test_biases_of_pegasus_go_with_what_they_are_added_to(tmp_path: Path) -> None:
    """Without a factor on the residual stream, whose eps stock code has fixed, Pegasus keeps every bit too."""
    kinds = tuple(kind for kind in MOVED if kind is not Kind.RESIDUAL)
    source, out = converted_by("pegasus", tmp_path, kinds)
    targets = ["q_proj", "v_proj", "fc1", "out_proj"]
    reference = with_peft(source, tmp_path / "adapter", {"target_modules": targets, "bias": "all"})
    convert_adapter(tmp_path / "adapter", tmp_path / "taken", out)
    assert all(map(torch.equal, reference, outputs(adapted(out, tmp_path / "taken"))))


@pytest.mark.parametrize("width", [16, 24])
def test_an_adapter_on_a_head_that_the_conversion_separated_takes_its_factor(width: int, tmp_path: Path) -> None:
    """T5 v1.0 multiplies by d^-1/2 before its tied head; a head of its own has that folded in."""
    model = tiny.small("t5", factor=3000.0, d_model=width, num_layers=1)
    model.decoder.final_layer_norm.weight.data.mul_(2.0**18)
    source = tiny.save(model, tmp_path / "source")
    result = convert(source, tmp_path / "out", target="half", run_model=False)
    assert result.plan.untied_head and result.out is not None
    a, b = draw(2, width), draw(97, 2, seed=1)
    names = [f"{PREFIX}lm_head.lora_{side}.weight" for side in "AB"]
    write(tmp_path / "adapter", dict(zip(names, (a, b), strict=True)), source)
    convert_adapter(tmp_path / "adapter", tmp_path / "taken", result.out)
    taken = load_file(tmp_path / "taken" / TENSORS)
    # The head alone, on a hidden state and on the same with the final norm's exponents.
    exponent = result.plan.exponent("decoder.final_layer_norm")
    factors = torch.ldexp(torch.ones(width), torch.as_tensor(exponent, dtype=torch.float32))
    hidden = draw(5, width, seed=2)
    before = (hidden * width**-0.5) @ a.T @ b.T
    after = (hidden * factors) @ taken[names[0]].T @ taken[names[1]].T
    assert torch.allclose(before, after, rtol=1e-6) if width == 24 else torch.equal(before, after)
    convert_adapter(tmp_path / "taken", tmp_path / "back", result.out, back=True)
    assert torch.allclose(load_file(tmp_path / "back" / TENSORS)[names[1]], b, rtol=1e-6)
    # The same by the model in memory.
    loaded = load(result.out, torch.float32)
    safe = make_fp16_safe(loaded, target="half")
    wrapped = peft.get_peft_model(loaded, peft.LoraConfig(r=2, lora_alpha=3, target_modules=["lm_head"]), "mine")
    peft.set_peft_model_state_dict(wrapped, taken, "mine")
    safe.adapter(wrapped, tmp_path / "by-memory")
    assert torch.allclose(load_file(tmp_path / "by-memory" / TENSORS)[names[1]], b, rtol=1e-6)
    wrapped.add_adapter("other", peft.LoraConfig(target_modules=["q"]))
    with pytest.raises(UserError, match="is not a PEFT model with a single adapter"):
        safe.adapter(wrapped, tmp_path / "none")
    safe.undo(loaded := wrapped.unload())
    with pytest.raises(UserError, match="was not rescaled by this result's plan"):
        safe.adapter(peft.get_peft_model(loaded, peft.LoraConfig(target_modules=["q"])), tmp_path / "none")


def test_a_dtype_that_would_lose_bits_becomes_fp32(pair: Pair, tmp_path: Path) -> None:
    layout = resolve(open_checkpoint(pair[1]))
    name, near = f"{PREFIX}shared.lora_embedding_B", f"{PREFIX}shared.lora_embedding_A"
    width, rows = layout.tensors["shared.weight"].shape[1], layout.tensors["shared.weight"].shape[0]
    values = torch.full((width, 1), 2.0**-14 * (1 + 2.0**-10), dtype=torch.float16)
    plan = Plan(family=layout.family.name, residual_exponent=-1)
    found = scaled_adapter({name: values, near: torch.ones(1, rows, dtype=torch.float16)}, layout, plan)
    assert found[name].dtype == torch.float32 and torch.equal(found[name], values.float() / 2)
    assert found[near].dtype == torch.float16
    for bad in (math.inf, math.nan):
        with pytest.raises(UserError, match="inf or NaN"):
            scaled_adapter({name: torch.full((width, 1), bad)}, layout, plan)


def test_the_commands_take_an_adapter_and_back(gated: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = gated
    adapter_for(source, tmp_path / "adapter")
    taken, back = str(tmp_path / "taken"), str(tmp_path / "back")
    capsys.readouterr()
    assert cli.main(["convert", str(out), taken, "--adapter", str(tmp_path / "adapter")]) == 0
    said = capsys.readouterr().out
    assert "no certificate covers an adapter" in said and "bf16-to-fp16 certify" in said
    assert cli.main(["undo", str(out), back, "--adapter", taken, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["base"] == "source"
    assert cli.main(["convert", str(out), taken, "--adapter", str(tmp_path / "adapter")]) == 2
    assert "exists" in capsys.readouterr().err
    assert cli.main(["convert", str(out), taken, "--adapter", str(tmp_path / "adapter"), "--target", "half"]) == 2
    assert "--target is for checkpoints" in capsys.readouterr().err


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pickle": (
        lambda adapter: (adapter / TENSORS).rename(adapter / "adapter_model.bin"),
        r"adapter_model\.bin is a pickle, which is not read",
    ),
    "nothing": (lambda adapter: (adapter / TENSORS).unlink(), f"no {TENSORS}"),
    "a broken file": (lambda adapter: (adapter / TENSORS).write_bytes(b"\x08\0\0\0\0\0\0\0{broken}"), "cannot be read"),
    "an option": (of_config(use_qalora=True), "use_qalora does more than add B·A"),
    "tied copies": (of_config(ensure_weight_tying=True), "ensure_weight_tying does more than add B·A"),
    "DoRA": (of_config(use_dora=True), "use_dora does more than add B·A"),
    "IA3": (of_config(peft_type="IA3"), "peft_type is 'IA3'; only LoRA"),
    "a start": (of_config(init_lora_weights="pissa"), "'pissa' changes the checkpoint's weights"),
}


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_lora_is_refused(gated: Pair, change: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    adapter_for(gated[0], tmp_path / "adapter")
    change(tmp_path / "adapter")
    with pytest.raises(UserError, match=words):
        convert_adapter(tmp_path / "adapter", tmp_path / "taken", gated[1])
    assert not (tmp_path / "taken").exists()


def test_an_unknown_or_misshapen_tensor_is_refused_by_name(gated: Pair, tmp_path: Path) -> None:
    source, out = gated
    a = draw(2, 24)
    wrong = {
        f"{PREFIX}encoder.block.0.layer.9.q.lora_A.weight": (a, "has no tensor encoder.block.0.layer.9.q.weight"),
        f"{PREFIX}encoder.block.0.layer.0.SelfAttention.q.lora_A.weight": (a[:, :23], r"shape \[2, 23\]"),
        f"{PREFIX}encoder.block.0.layer.0.SelfAttention.q.prompt": (a, "has no tensor"),
        f"{PREFIX}shared.weight": (torch.zeros(97, 24, dtype=torch.int64), "int64"),
    }
    for i, (name, (values, words)) in enumerate(wrong.items()):
        write(tmp_path / str(i), {name: values.contiguous()}, source)
        with pytest.raises(UserError, match=words) as caught:
            convert_adapter(tmp_path / str(i), tmp_path / "taken", out)
        assert name in str(caught.value) and "\n" not in str(caught.value) and not (tmp_path / "taken").exists()


def test_an_adapter_is_not_converted_twice(gated: Pair, tmp_path: Path) -> None:
    source, out = gated
    adapter_for(source, tmp_path / "adapter")
    convert_adapter(tmp_path / "adapter", tmp_path / "taken", out)
    with pytest.raises(UserError, match=r"the converted checkpoint already; to .* original one, use undo"):
        convert_adapter(tmp_path / "taken", tmp_path / "twice", out)
    shutil.copytree(out, tmp_path / "moved")  # by its note, wherever the checkpoint lies now
    with pytest.raises(UserError, match="for the converted checkpoint already"):
        convert_adapter(tmp_path / "taken", tmp_path / "twice", tmp_path / "moved")
    convert_adapter(tmp_path / "taken", tmp_path / "back", out, back=True)
    with pytest.raises(UserError, match="give a converted folder"):
        convert_adapter(tmp_path / "adapter", tmp_path / "twice", source)
    with pytest.raises(UserError, match=r"the original checkpoint already; to .* converted one, use convert"):
        convert_adapter(tmp_path / "back", tmp_path / "twice", out, back=True)
    assert json.loads((tmp_path / "back" / NOTE).read_text())["for"] == "original"
    adapter_for(source, tmp_path / "trained", base_model_name_or_path=str(out))  # on the converted checkpoint itself
    with pytest.raises(UserError, match="for the converted checkpoint already"):
        convert_adapter(tmp_path / "trained", tmp_path / "twice", out)
    convert_adapter(tmp_path / "trained", tmp_path / "of-it", out, back=True)
    assert same(merged(source, tmp_path / "of-it"), merged(out, tmp_path / "trained"))


GATE = "encoder.block.0.layer.1.DenseReluDense.gate"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda report: report.update(finetune={}), "was finetuned"),
        (lambda report: report["plan"]["exponents"].update({GATE: -1}), "has edits"),
    ],
)
def test_an_adapter_for_other_weights_or_an_edited_conversion_is_told_so(
    change: Callable[[dict[str, Any]], None], said: str, gated: Pair, tmp_path: Path
) -> None:
    adapter_for(gated[0], tmp_path / "adapter")
    path = Path(shutil.copytree(gated[1], tmp_path / "changed")) / "fp16_report.json"
    with rewritten(path) as report:
        change(report)
    done = convert_adapter(tmp_path / "adapter", tmp_path / "taken", tmp_path / "changed")
    plain = convert_adapter(tmp_path / "adapter", tmp_path / "other", gated[1])
    assert said in done.notes[0] and not any(said in note for note in plain.notes)


OLD_NAMES = {
    "gemma3-images": ("model.language_model.", "language_model.model."),
    "qwen2_5_vl": ("model.language_model.", "model."),
}
"""How modules of the text model are called today, and in adapters of transformers 4.51 and older."""


@pytest.mark.parametrize("kind", OLD_NAMES)
def test_an_adapter_with_the_names_of_older_transformers_is_taken_and_keeps_them(kind: str, tmp_path: Path) -> None:
    source = tiny.save(tiny.build(kind, num_hidden_layers=1), tmp_path / "source", torch.float32)
    converted: Any = convert(source, tmp_path / "out", run_model=False, stream=-3).out
    new, old = OLD_NAMES[kind]
    layout = resolve(open_checkpoint(source))
    down = next(name for name in layout.tensors if name.endswith("layers.0.mlp.down_proj.weight"))
    assert down.startswith(new)
    rows, columns = layout.tensors[down].shape
    found = []
    for name, module in (("new", down), ("old", old + down.removeprefix(new))):
        path = f"{PREFIX}{module.removesuffix('.weight')}"
        tensors = {f"{path}.lora_A.weight": draw(2, columns), f"{path}.lora_B.weight": draw(rows, 2)}
        write(tmp_path / name, tensors, source)
        convert_adapter(tmp_path / name, tmp_path / f"{name}-out", converted)
        written = load_file(tmp_path / f"{name}-out" / TENSORS)
        assert written.keys() == tensors.keys()
        found.append((written[f"{path}.lora_A.weight"], written[f"{path}.lora_B.weight"]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(found[1][1], draw(rows, 2) / 8)
