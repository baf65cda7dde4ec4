"""Edits of every key that stock code knows in a config.json, and of keys that nobody knows, to every kind of value."""

import copy
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from support import tiny
from support.adversary import adverse_inputs, observe
from support.contract import FREE, broken
from transformers.generation import GenerationConfig

from bf16_to_fp16.bounds.certificate import bound, fp16_weights
from bf16_to_fp16.bounds.findings import Certificate
from bf16_to_fp16.checkpoint.reader import Checkpoint, open_checkpoint
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.families.known import family_of, names_of, stock_class
from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.measuring import agreement
from bf16_to_fp16.measuring.observer import SiteObserver
from bf16_to_fp16.measuring.stock import config_of, load, takes_decoder_ids

LOADER = (
    *("_attn_implementation_internal", "_commit_hash", "_heterogeneity_spec", "_name_or_path", "attention_chunk_size"),
    *("attn_implementation", "attribute_map", "auto_map", "base_model_tp_plan", "compression_config", "decoder"),
    *("dense_act_fn", "device_map", "distributed_config", "dtype", "encoder", "experts_implementation", "extra_files"),
    *("fusion_config", "generator", "get_text_config", "gradient_checkpointing", "is_causal", "is_gated_act"),
    *("kv_sharing_modes", "layer_types", "layerdrop", "name_or_path", "num_kv_shared_layers", "per_layer_config"),
    *("quantization_config", "rope_local_base_freq", "rope_scaling", "rope_theta", "scale_decoder_outputs"),
    *("sliding_window", "sliding_window_pattern", "sub_configs", "text_config", "tie_encoder_decoder"),
    *("tie_word_embeddings", "to_dict", "torch_dtype", "transformers_weights", "use_bidirectional_attention"),
    "weight_mapping",
)
"""Names that the loader, masks, caches and classes look for besides the fields of the config class."""

UNKNOWN = ("n_positions", "output_past", "x", "", "__class__", "__dict__", "model", "classif_dropout", "état")

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 37, 97, 128, -1, 10**12, 2**70),
    *(0.0, 0.5, 1.0, 1e-6, 1e-5, 1e-3, 30.0, -0.5, 1e300),
    *("", "x", "relu", "relu2", "gelu", "gelu_new", "silu", "tanh", "gated-gelu", "gated-relu", "eager", "sdpa"),
    *("flash_attention_2", "float16", "bfloat16", "other.safetensors", "../model.safetensors", "model.safetensors"),
    *([], [0], [1, 2], ["full_attention"], ["sliding_attention", "sliding_attention"], {}, {"a": 1}, {"0": {}}),
    *("local", "transient-global", *({"rope_type": "linear", "factor": x, "rope_theta": 1e4} for x in (8.0, 0.0))),
    *({"full_attention": {"rope_type": "default", "rope_theta": x}} for x in (1e4, 0.0, -1.0, 1e-60)),
    {"full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}},
    *({"0": {"d_ff": 5}}, {"0": {"encoder_attention_heads": 1}}, {"model_type": "t5"}, {"quant_method": "gptq"}),
)

ONE_LAYER: Mapping[str, Any] = {"num_layers": 1, "num_decoder_layers": 1}

SMALL: Mapping[str, Mapping[str, Any]] = {
    "pegasus": {"encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 16},
    "gemma3": {"num_hidden_layers": 2},  # one of each kind of layer
}
"""Changes that leave a model of a kind one layer a stack, of those that have not T5's keys."""


@dataclass(frozen=True)
class Original:
    """A small certified folder and edits of its config; certificates: by the keys that bounds are made from."""

    kind: str
    folder: Path
    config: dict[str, Any]
    ids: torch.Tensor
    logits: torch.Tensor
    keys: str
    certificates: dict[str, Certificate] = field(default_factory=dict)

    def edits(self) -> list[dict[str, Any]]:
        """Return every edit of one key, in order: each known and unknown key with each value, and removed (...)."""
        kind = transformers.CONFIG_MAPPING[self.config["model_type"]]
        fields = {*vars(kind()), *kind.attribute_map, *GenerationConfig().to_dict()}
        keys = sorted({*fields, *self.config, *LOADER, *UNKNOWN})
        return [{key: value} for key in keys for value in (..., *VALUES)]

    def drawn(self, number: int, seed: int = 0) -> Iterator[dict[str, Any]]:
        """Yield so many edits: first each key once, then any; one in four has a second key."""
        generator = random.Random(seed)
        every = self.edits()
        by_key: dict[str, list[dict[str, Any]]] = {}
        for edit in every:
            by_key.setdefault(next(iter(edit)), []).append(edit)
        keys = list(by_key)
        for i in range(number):
            edit = generator.choice(by_key[keys[i % len(keys)]])
            yield edit | generator.choice(every) if generator.random() < 0.25 else edit


def original(kind: str, root: Path) -> Original:
    folder = tiny.save(tiny.build(kind, 1, factor=1.0, **SMALL.get(kind, ONE_LAYER)), root / kind)
    weights = load_file(folder / "model.safetensors")
    save_file({name: t * 2 for name, t in weights.items()}, folder / "other.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    half = load(folder, torch.float16, half=True)
    ids = torch.arange(32).reshape(2, 16) * 3 % half.config.vocab_size
    return Original(kind, folder, config, ids, run_on(half, ids), keys_of(open_checkpoint(folder)))


def keys_of(checkpoint: Checkpoint) -> str:
    family, config = family_of(checkpoint.config), checkpoint.config
    return json.dumps([stock_class(config), agreement.layout_values(family, config)])


def run_on(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        decoder = {"decoder_input_ids": ids.flip(0)[:, :7]} if takes_decoder_ids(config_of(model)) else {}
        return model(input_ids=ids, **decoder)[0]


def passed(half: Any, ids: torch.Tensor, layout: Layout, certificate: Certificate) -> list[str]:
    """Return the sites of a folder's stock model, as ``.half()`` runs it, that pass their bounds."""
    seen = observe(half, layout, adverse_inputs(copy.deepcopy(half).float(), layout, 4, 0))
    wrong = list(broken(certificate, seen, FREE))
    with SiteObserver(half) as observer:
        run_on(half, ids)
    plain = {site.name: site.amax for site in observer.sites() if "constant" not in site.name}
    assert seen and plain
    return [str(site) for site in [*wrong, *broken(certificate, plain, ())]]


def judge(case: Original, edit: dict[str, Any]) -> str:
    """Return what comes of one edit: "refused", "uncertified" or "agrees"; raise AssertionError for anything else."""
    config = {key: value for key, value in (case.config | edit).items() if value is not ...}
    (case.folder / "config.json").write_text(json.dumps(config))
    try:
        checkpoint = open_checkpoint(case.folder)
        layout = agreement.agreed_layout(checkpoint)
        keys = keys_of(checkpoint)
        if keys not in case.certificates:
            case.certificates[keys] = bound(layout, fp16_weights(checkpoint, layout))
    except UserError as error:
        assert "\n" not in str(error) and 0 < len(str(error)) < 2000, str(error)[:3000]
        return "refused"
    certificate = case.certificates[keys]
    if not certificate.holds:
        return "uncertified"
    assert stock_class(config) in names_of(layout.family)
    half = load(case.folder, torch.float16, half=True)
    # The same bounds and, bit for bit, the same outputs as of the unedited model, which has been looked into.
    if not edit or keys != case.keys or not torch.equal(run_on(half, case.ids), case.logits):
        wrong = passed(half, case.ids, layout, certificate)
        assert not wrong, wrong[:3]
    return "agrees"
