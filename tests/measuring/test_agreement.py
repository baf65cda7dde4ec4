"""What a config.json says beyond the keys that the bounds are made from is refused, unless it changes nothing."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from support import config_edits, exhaustive, tiny
from support.folders import rewritten
from support.forging import forge
from support.learner import recipe_tree
from support.program import refused

from bf16_to_fp16 import cli, convert, rescale
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.families.configs import axis_size
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.families.wiring import Attention, FeedForward
from bf16_to_fp16.measuring import agreement
from bf16_to_fp16.measuring.agreement import agreed_layout, check_agreement
from bf16_to_fp16.measuring.stock import load
from bf16_to_fp16.quiet import quiet

Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("folders")
    return cache(lambda kind: tiny.save(tiny.build(kind, factor=1.0), root / kind))


@pytest.fixture(autouse=True)
def looked_into_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "check_agreement", check_agreement)


def edited(folder: Path, to: Path, **changes: Any) -> Path:
    shutil.copytree(folder, to)
    config = json.loads((folder / "config.json").read_text()) | changes
    (to / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return to


@pytest.mark.parametrize("kind", exhaustive.beyond(tiny.FIRST, tiny.KINDS))
def test_what_stock_code_saves_agrees(kind: str, folders: Folders) -> None:
    agreed_layout(open_checkpoint(folders(kind)))


def test_a_rotary_factor_larger_than_the_bounds_have_it_is_named(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    yarn = PLAIN | {"rope_type": "yarn", "factor": 4.0, "attention_factor": 3.0}
    folder = edited(folders("llama"), tmp_path / "edited", rope_parameters=yarn)
    assert cli.main(["certify", str(folder)]) == 0
    monkeypatch.setattr("bf16_to_fp16.families.llama.rotary_factor", lambda config: 2.9)
    assert "rotary_emb.attention_scaling to 3.0" in refused(capsys, "certify", folder)


UNRUN, NO_ANGLES = "cannot be loaded or run", "rotary positions become inf or NaN"
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
SHRINKING = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": -1.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
DYNAMIC = "the factor of 'dynamic' rotary positions is"
DYNAMICS = (("llama", -0.001), ("llama", 0.5), ("glm4", -1.0))
HALF = LINEAR | {"partial_rotary_factor": 0.5}
LONG_AT_ONCE: dict[str, Any] = PLAIN | {"rope_type": "longrope", "attention_factor": 1.0, "short_factor": [1.0] * 5}
LONG_AT_ONCE |= {"original_max_position_embeddings": 8}
"""Rotary positions with other frequencies for inputs of more than 8 tokens."""

BLOCKS = """is 'block_sparse', and attention over blocks has no bound yet; write "original_full" there"""
NAMED: dict[str, tuple[tuple[str, Any], ...]] = {
    "t5": (
        *(("dense_act_fn", "relu2"), ("is_encoder_decoder", False), ("tie_encoder_decoder", True)),
        *(("transformers_weights", "other.safetensors"), ("fusion_config", {})),
        *(("text_config", {"model_type": "t5"}), ("layer_types", ["full_attention"] * 2)),
    ),
    "pegasus": (
        *(("num_attention_heads", 1), ("transformers_weights", "other.safetensors")),
        *(("is_causal", None), ("sliding_window", 1)),
    ),
    "mt5": (("tie_encoder_decoder", 1),),
    **{"umt5": (("dense_act_fn", "relu"),), "gelu": (("dense_act_fn", "gelu_pytorch_tanh"),)},
    **{"gated": (("is_gated_act", False),), "t5-encoder": (("is_decoder", True),)},
    "gemma3": (("sliding_window", 0),),
    "gemma4": (
        *(("attention_bias", True), ("hidden_size_per_layer_input", 4), ("num_kv_shared_layers", 1)),
        *(("enable_moe_block", True), ("sliding_window", 0)),
    ),
}
"""Kinds, and keys that the message must name with their values."""

EDITS: tuple[tuple[str, dict[str, Any], str], ...] = (
    *((kind, {key: value}, f"'{key}' is {value!r}") for kind, said in NAMED.items() for key, value in said),
    ("t5", {"head_dim": 3, "num_attention_heads": 5}, "asks for [9, 5]"),
    ("t5", {"hidden_size": 48}, "asks for [97, 48]"),
    ("t5", {"num_hidden_layers": 4}, "encoder.block.2.layer.0.layer_norm.weight is missing"),
    ("t5", {"num_heads": True}, "'num_heads' expected int, got bool"),
    ("t5", {"attribute_map": {"d_ff": "d_kv"}}, "config.json"),
    ("mt5", {"num_attention_heads": 1}, "asks for [5, 24]"),
    ("embeddinggemma", {"sliding_window": -1}, "'sliding_window' is -2, and must be a whole number of at least 0"),
    ("pegasus", {"decoder_attention_heads": 5}, "does not divide the 24 rows"),
    ("t5", {"layer_norm_epsilon": True}, "layer_norm_epsilon"),
    ("pegasus", {"tie_word_embeddings": False}, "no separate lm_head.weight"),
    ("t5", {"per_layer_config": {"0": {"num_heads": 1}}}, "'num_heads' is"),
    ("gemma4-images", {"tie_word_embeddings": False}, "'tie_word_embeddings' is False"),
    ("gemma4", {"layer_types": ["full_attention"]}, "must be equal to the number of `layer_types` (1)"),
    ("gemma4", {"use_bidirectional_attention": "vision", "sliding_window": 0}, "'sliding_window' is 0"),
    ("t5", {"attn_implementation": "flex_attention"}, "'flex_attention'"),
    ("t5", {"return_dict": False}, UNRUN),
    ("t5", {"tie_word_embeddings": False}, "'tie_word_embeddings' is False, and there is no separate lm_head.weight"),
    ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 0.0}}}, NO_ANGLES),
    ("gemma3", {"rope_parameters": ..., "rope_scaling": {"rope_type": "linear", "factor": 0.0}}, NO_ANGLES),
    ("llama", {"rope_parameters": LONG_AT_ONCE | {"long_factor": [0.0] * 5}}, NO_ANGLES),
    ("llama", {"rope_parameters": LONG_AT_ONCE | {"long_factor": [1.0] * 3}}, "cannot compute rotary position"),
    *((kind, {"rope_parameters": SHRINKING | {"factor": f}}, DYNAMIC) for kind, f in DYNAMICS),
    ("gemma3", {"rope_parameters": {"full_attention": SHRINKING, "sliding_attention": PLAIN}}, DYNAMIC),
    ("llama", {"rope_parameters": ..., "rope_scaling": {"type": "dynamic", "factor": -1}}, DYNAMIC),
    ("llama", {"rope_parameters": HALF}, UNRUN),
    ("t5", {"model_type": ["t5"]}, "'model_type' is ['t5'], which is not a name"),
    *(("bigbird_pegasus", {"attention_type": written}, BLOCKS) for written in ("block_sparse", ...)),
    ("smollm3", {"no_rope_layer_interval": 0}, "cannot make a config from the keys that the bounds use"),
)
"""A kind, what its config says besides, and what the message must name."""


@pytest.mark.parametrize(("kind", "changes", "named"), EDITS)
def test_a_key_by_which_stock_code_runs_another_model_is_one_line(
    kind: str, changes: dict[str, Any], named: str, folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = edited(folders(kind), tmp_path / "edited", **changes)
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in weights.items()}, tmp_path / "edited" / "other.safetensors")
    assert named in refused(capsys, "certify", folder)


def test_a_window_of_zero_is_taken_where_stock_code_writes_it(folders: Folders, tmp_path: Path) -> None:
    """EmbeddingGemma sees both sides: of a window of 1 stock code makes 0//2 + 1 again."""
    folder = edited(folders("embeddinggemma"), tmp_path / "edited", sliding_window=1)
    load(folder, torch.float32).config.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["sliding_window"] == 0
    assert cli.main(["certify", str(folder)]) == 0


def test_dynamic_frequencies_lie_between_those_at_both_ends() -> None:
    """On which ``check_dynamic`` relies for every length between."""
    rotation = SHRINKING | {"factor": 1.0}
    config = transformers.LlamaConfig(hidden_size=60, num_attention_heads=3, rope_parameters=rotation)
    config.max_position_embeddings = 64
    for factor in (1.0, 1.001, 4.0, 1e6):
        config.rope_parameters["factor"] = factor
        make = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["dynamic"]
        first, *between, last = (make(config, None, seq_len=2**k)[0] for k in range(6, 32))
        assert last.isfinite().all()
        assert all(bool((each <= first).all() and (each >= last).all()) for each in between)


T5_SIZES = ("d_model", "d_kv", "d_ff", "num_heads", "num_layers", "vocab_size", "relative_attention_num_buckets")
SIZES = (
    *(("t5", key) for key in (*T5_SIZES, "num_decoder_layers")),
    *(("pegasus", f"encoder_{what}") for what in ("layers", "attention_heads", "ffn_dim")),
    ("pegasus", "max_position_embeddings"),
)


@pytest.mark.parametrize(("kind", "key"), SIZES)
def test_a_size_of_zero_is_one_line_that_names_it(
    kind: str, key: str, folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With weights to match: a model of nothing, of which stock code may well make something."""
    layout = resolve(open_checkpoint(folders(kind)))
    gone = {axis_size(layout.family, layout.config, name) for name, keys in layout.family.sizes.items() if key in keys}
    folder = edited(folders(kind), tmp_path / "edited", **{key: 0})
    weights = load_file(folder / "model.safetensors")
    cut = {n: w[tuple(slice(0 if size in gone else size) for size in w.shape)] for n, w in weights.items()}
    save_file({n: w.contiguous() for n, w in cut.items()}, folder / "model.safetensors", {"format": "pt"})
    assert f"{key!r} is 0, not a" in refused(capsys, "certify", folder)


@pytest.fixture(scope="module")
def spoilt(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A source, its conversion, one whose config stock code reads otherwise with a report to match, and a recipe."""
    root = tmp_path_factory.mktemp("spoilt")
    convert(folders("t5"), root / "whole", run_model=False)
    edited(folders("t5"), root / "source", dense_act_fn="relu2")
    converted = edited(root / "whole", root / "converted", dense_act_fn="relu2")
    forge(converted, views=False)
    (root / "source" / "text.txt").write_text("a line\n")
    recipe = root / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_tree(root / "source", root / "out")))
    return {path.stem: path for path in root.iterdir()}


COMMANDS = (
    *("certify {source}", "audit {source}", "convert {source} {out} --no-audit", "finetune {recipe}"),
    *("verify {converted} --no-audit", "verify {whole} --original {source} --no-audit"),
    "publish {converted} me/it --dry-run",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_claims_something_goes_through_the_same_door(
    command: str, spoilt: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = spoilt["source"].parent / "out"
    assert "'dense_act_fn'" in refused(capsys, *(part.format(**spoilt, out=out) for part in command.split()))
    assert not out.exists()


def test_a_model_that_is_not_its_configs_is_not_rescaled() -> None:
    model = tiny.t5(num_layers=1, num_decoder_layers=1)
    model.encoder.block[0].layer[1].DenseReluDense.act = torch.nn.GELU()
    with pytest.raises(UserError, match=r"DenseReluDense\.act is GELU"):
        rescale(model, [])


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("t5", {"num_attention_heads": 3, "hidden_size": 24, "dense_act_fn": "relu", "is_gated_act": False}),
        ("t5", {"n_positions": 512, "output_past": True, "task_specific_params": {"a": {"num_beams": 4}}}),
        ("t5-encoder", {"is_encoder_decoder": True}),
        ("gated", {"tie_word_embeddings": True, "classifier_dropout": 0.5, "dropout_rate": 0.0}),
        ("pegasus", {"num_hidden_layers": 2, "num_attention_heads": 3, "normalize_before": True, "classif_dropout": 0}),
        ("umt5", {"dense_act_fn": "gelu_new", "is_gated_act": True, "attn_implementation": "sdpa"}),
        ("gemma4", {"use_bidirectional_attention": "all"}),
    ],
)
def test_a_key_without_effect_passes(kind: str, changes: dict[str, Any], folders: Folders, tmp_path: Path) -> None:
    agreed_layout(open_checkpoint(edited(folders(kind), tmp_path / "edited", **changes)))


def test_an_untied_embedding_needs_its_copies_and_its_head(folders: Folders, tmp_path: Path) -> None:
    folder = edited(folders("pegasus"), tmp_path / "edited", tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    shared = weights["model.shared.weight"]
    names = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    for count in range(3):
        stored = weights | {name: shared.clone() for name in names[:count]}
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(UserError, match="random numbers"):
            agreed_layout(open_checkpoint(folder))
    save_file(weights | {name: shared.clone() for name in names}, folder / "model.safetensors", {"format": "pt"})
    agreed_layout(open_checkpoint(folder))


@pytest.mark.parametrize("kind", ["t5", "umt5", "pegasus"])
def test_a_layout_whose_modules_do_otherwise_is_refused(kind: str, folders: Folders) -> None:
    """The factor before the head, too, is what stock code of the installed version applies."""
    checkpoint = open_checkpoint(folders(kind))
    layout = resolve(checkpoint)
    check_agreement(checkpoint, layout)
    attention = next(w for w in layout.topology if isinstance(w, Attention))
    feed_forward = next(w for w in layout.topology if isinstance(w, FeedForward))

    def topology(part: Attention | FeedForward, **changes: Any) -> dict[str, Any]:
        return {"topology": tuple(replace(w, **changes) if w is part else w for w in layout.topology)}

    others: list[tuple[dict[str, Any], str]] = [
        (topology(feed_forward, activation="silu"), "'silu'"),
        (topology(attention, scaled=not attention.scaled), "scaling"),
        ({"family": replace(layout.family, eps=3e-4, eps_key=None)}, r"eps\w* to"),
        ({"head_scale": 1.0 if layout.head_scale != 1.0 else 0.25}, "before the head"),
    ]
    for changes, named in others:
        with pytest.raises(UserError, match=named):
            check_agreement(checkpoint, replace(layout, **changes))


@pytest.mark.parametrize(
    ("name", "tied"),
    [("LlamaModel", False), ("LlamaForCausalLM", False), ("Qwen3ForCausalLM", True), ("Gemma3TextModel", True)],
)
def test_names_of_another_class_are_refused(name: str, tied: bool, tmp_path: Path) -> None:
    kind: Any = getattr(transformers, name)
    shape = tiny.GEMMA3_SHAPE if "Gemma" in name else tiny.LLAMA_SHAPE
    source = tiny.save(kind(kind.config_class(**shape, tie_word_embeddings=tied)), tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    within = any(n.startswith("model.") for n in weights)
    moved = {n.removeprefix("model.") if within else f"model.{n}": weight for n, weight in weights.items()}
    save_file(moved, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"embed_tokens\.weight is missing and the tensors have .* with {name} of"):
        agreed_layout(open_checkpoint(source))
    kind.from_pretrained(source, dtype="auto").save_pretrained(tmp_path / "again")
    layout = agreed_layout(open_checkpoint(tmp_path / "again"))
    assert layout.stock.names[0] == name and layout.tied is (tied if layout.stock.is_language_model else None)


def test_where_a_head_would_be_filled_at_random_the_class_without_one_is_named(tmp_path: Path) -> None:
    source = tiny.save(tiny.stock("LlamaModel", tiny.LLAMA_SHAPE)(), tmp_path / "source")
    file = source / "config.json"
    said = json.loads(file.read_text()) | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    file.write_text(json.dumps(said))
    with pytest.raises(UserError, match=r'no head, write "architectures": \["LlamaModel"\]'):
        agreed_layout(open_checkpoint(source))
    file.write_text(json.dumps(said | {"architectures": ["LlamaModel"]}))
    assert agreed_layout(open_checkpoint(source)).stock.names[0] == "LlamaModel"


def test_a_missing_embedding_is_still_a_file_that_is_not_whole(tmp_path: Path) -> None:
    source = tiny.save(tiny.stock("LlamaForCausalLM", tiny.LLAMA_SHAPE)(), tmp_path / "source")
    with rewritten(source / "model.safetensors") as weights:
        del weights["model.embed_tokens.weight"]
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight is missing; take the whole"):
        agreed_layout(open_checkpoint(source))


EDITED_CONFIGS = {"t5": 300} | dict.fromkeys(("longt5", "switch", "pegasus", "gemma3", "llama-biased"), 200)
EDITED_CONFIGS |= dict.fromkeys(("umt5", "mbart", "bigbird_pegasus"), 100)
"""Edits of each kind, one in four together with another: every key of most, fewer of what others repeat."""


@pytest.mark.parametrize(
    ("kind", "number", "seed"),
    [
        *((kind, 12, exhaustive.TODAY) for kind in exhaustive.of_today([*EDITED_CONFIGS], 3)),
        *(pytest.param(kind, number, 0, marks=pytest.mark.exhaustive) for kind, number in EDITED_CONFIGS.items()),
    ],
)
def test_an_edited_config_is_refused_uncertified_or_agrees(kind: str, number: int, seed: int, tmp_path: Path) -> None:
    case = config_edits.original(kind, tmp_path)
    assert config_edits.judge(case, {}) == "agrees"
    counts, failures = Counter[str](), list[str]()
    with quiet():
        for edit in case.drawn(number, seed):
            try:
                counts[config_edits.judge(case, edit)] += 1
            except Exception as error:
                failures.append(f"{kind} {edit}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    assert not failures, failures
    assert min(counts["refused"], counts["agrees"]) > number / 10


def test_without_the_door_an_edit_passes_its_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what the door keeps out is found by the run."""
    case = config_edits.original("t5", tmp_path)
    monkeypatch.setattr(agreement, "check_agreement", lambda *_: None)
    with pytest.raises(AssertionError, match="DenseReluDense"):
        config_edits.judge(case, {"dense_act_fn": "relu2"})
