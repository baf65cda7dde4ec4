"""Tiny models of every family with odd shapes, whose activations pass fp16's range, and their folders."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bf16_to_fp16.families.experts import experts_apart
from bf16_to_fp16.families.known import of_model_type
from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.families.resolve import ModelTensors, resolve
from bf16_to_fp16.families.wiring import Attention, Experts, FeedForward, StackEnds
from bf16_to_fp16.measuring.stock import config_of

transformers.logging.set_verbosity_error()

T5_SHAPE = {"d_model": 24, "d_kv": 5, "d_ff": 37, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 3}
T5_SHAPE |= {"vocab_size": 97, "relative_attention_num_buckets": 9, "relative_attention_max_distance": 20}
T5_SHAPE |= {"decoder_start_token_id": 0}
LONGT5_SHAPE: dict[str, Any] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
LONGT5_SHAPE |= {"encoder_attention_type": "transient-global", "local_radius": 2, "global_block_size": 4}
TIED_LONGT5: dict[str, Any] = {"feed_forward_proj": "relu", "tie_word_embeddings": True, "local_radius": 4}
TIED_LONGT5 |= {"global_block_size": 3}
SWITCH_SHAPE = {"num_layers": 3, "num_sparse_encoder_layers": 1, "num_decoder_layers": 2}
SWITCH_SHAPE |= {"num_sparse_decoder_layers": 2, "num_experts": 2, "router_bias": True, "expert_capacity": 5}
UNTIED_SWITCH: dict[str, Any] = {"tie_word_embeddings": False, "dense_act_fn": "gelu", "router_bias": False}
UNTIED_SWITCH |= {"num_layers": 2}
PEGASUS_SHAPE: dict[str, Any] = {"d_model": 24, "vocab_size": 97, "encoder_layers": 2, "decoder_layers": 1}
PEGASUS_SHAPE |= {"encoder_attention_heads": 3, "decoder_attention_heads": 2, "encoder_ffn_dim": 37}
PEGASUS_SHAPE |= {"decoder_ffn_dim": 29, "max_position_embeddings": 64, "activation_function": "relu"}
PEGASUS_SHAPE |= {"scale_embedding": True, "decoder_start_token_id": 0}

GEMMA3_SHAPE: dict[str, Any] = {"hidden_size": 24, "vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 4}
GEMMA3_SHAPE |= {"num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 37, "query_pre_attn_scalar": 7}
GEMMA3_SHAPE |= {"sliding_window": 6, "sliding_window_pattern": 2, "initializer_range": 0.2}


def stock(name: str, shape: Mapping[str, Any], **own: Any) -> Callable[..., Any]:
    """Return a function that makes a model of a stock class from changes to a shape and to what is its own."""
    kind: Any = getattr(transformers, name)
    return lambda **changes: kind(kind.config_class(**{**shape, **own, **changes}))


def of_t5(name: str, **own: Any) -> Callable[..., Any]:
    return stock(name, T5_SHAPE, **own)


def untied(model: Any) -> Any:
    model.lm_head.weight = torch.nn.Parameter(torch.randn(model.config.vocab_size, model.config.d_model))
    return model


def gated(projection: str = "gated-gelu", **changes: Any) -> Any:
    """Return a T5 v1.1: gated, untied, unscaled head."""
    own = {"feed_forward_proj": projection, "tie_word_embeddings": False}
    return untied(of_t5("T5ForConditionalGeneration", **own)(**changes))


t5 = of_t5("T5ForConditionalGeneration")  # v1.0: ReLU, tied head
t5_encoder = of_t5("T5EncoderModel", feed_forward_proj="gated-gelu")

pegasus = stock("PegasusForConditionalGeneration", PEGASUS_SHAPE)
FULL: dict[str, Any] = {"attention_type": "original_full", "use_bias": True}
FULL |= {"decoder_start_token_id": 2}  # which has an embedding
bigbird_pegasus = stock("BigBirdPegasusForConditionalGeneration", PEGASUS_SHAPE, **FULL)
gemma3 = stock("Gemma3ForCausalLM", GEMMA3_SHAPE)


def gemma4(kind: str = "Gemma4ForCausalLM", **changes: Any) -> Any:
    """Return a Gemma 4 whose layers see a window and everything by turns, from 1 on, with scalars behind them."""
    own: dict[str, Any] = {"global_head_dim": 8, "hidden_size_per_layer_input": 0, "num_hidden_layers": 2}
    shape = {key: value for key, value in GEMMA3_SHAPE.items() if key not in NOT_GEMMA4} | own | changes
    model = stock(
        kind, shape, layer_types=(["sliding_attention", "full_attention"] * 9)[: shape["num_hidden_layers"]]
    )()
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.75 if ".0." in name else 1.5)
    return model


def gemma4_images(**changes: Any) -> Any:
    """Return a Gemma 4 with a vision tower; changes: to the config of its text model."""
    own: dict[str, Any] = {"final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision"}
    text = gemma4(**own | changes).config
    config = transformers.Gemma4Config(
        text_config=text.to_dict(),
        vision_config=PATCHES_OF_GEMMA4,
        image_token_id=96,
        video_token_id=95,
        audio_token_id=94,
        tie_word_embeddings=text.tie_word_embeddings,
    )
    model = transformers.Gemma4ForConditionalGeneration(config)
    for layer, number in zip(model.model.language_model.layers, (0.75, 1.5), strict=False):
        layer.layer_scalar.fill_(number)
    return model


TOWER: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "patch_size": 4}
TOWER |= {"num_attention_heads": 2}
PATCHES_OF_GEMMA4 = TOWER | {"num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 2}
PATCHES_OF_GEMMA4 |= {"position_embedding_size": 16}
NOT_GEMMA4 = ("query_pre_attn_scalar", "sliding_window_pattern")
ONE_FOR_BOTH: dict[str, Any] = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_hidden_layers": 3}
ONE_FOR_BOTH |= {"tie_word_embeddings": False, "final_logit_softcapping": 30.0}


def longt5(kind: str = "LongT5ForConditionalGeneration", **changes: Any) -> Any:
    """Return a LongT5 with a gate and a head of its own, of transient-global attention unless asked for another."""
    shape = LONGT5_SHAPE | changes
    model = of_t5(kind, **shape)()
    return untied(model) if hasattr(model, "lm_head") and not shape["tie_word_embeddings"] else model


def switch(kind: str = "SwitchTransformersForConditionalGeneration", **changes: Any) -> Any:
    """Return a Switch Transformer with few places in each expert, and a tied head unless asked for another."""
    shape = SWITCH_SHAPE | changes
    model = of_t5(kind, **shape)()
    for module in model.modules():
        if hasattr(module, "classifier"):
            # What is loudest would choose for all tokens.
            module.classifier.weight.data[:, :2] /= 100
    if not shape.get("tie_word_embeddings", True):
        for module in model.modules():
            if hasattr(module, "embed_tokens"):
                module.embed_tokens.weight = torch.nn.Parameter(model.shared.weight.detach().clone())
        if hasattr(model, "lm_head"):
            untied(model)
    return model


VISION = TOWER | {"model_type": "siglip_vision_model", "image_size": 16}


def gemma3_images(**changes: Any) -> Any:
    """Return a Gemma 3 with a vision tower; changes: to the config of its text model."""
    text = GEMMA3_SHAPE | {"num_hidden_layers": 2} | changes
    tied = {"tie_word_embeddings": text["tie_word_embeddings"]} if "tie_word_embeddings" in text else {}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=VISION, mm_tokens_per_image=4, image_token_index=96, **tied
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # stock code's are 0
    return model


LLAMA_SHAPE: dict[str, Any] = {"eos_token_id": 2, "hidden_size": 24, "vocab_size": 97, "num_hidden_layers": 2}
LLAMA_SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 37}
LLAMA_SHAPE |= {"initializer_range": 0.2}
UNTIED_GEMMA3: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6}
UNTIED_GEMMA3 |= {"tie_word_embeddings": False, "final_logit_softcapping": 30.0}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}  # that scores and logits come near
BIASED_LLAMA: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
MULTIPLIERS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0156}
MULTIPLIERS |= {"logits_scaling": 8.0}
SIX_OF_TEN = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.6}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256}


PATCHES: dict[str, Any] = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4}
PATCHES |= {"out_hidden_size": 24}
DEEP = {"deepstack_visual_indexes": [0], "num_position_embeddings": 16, "out_hidden_size": 24}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 1]}


def qwen_vl(name: str, **vision: Any) -> Callable[..., Any]:
    """Return a function that makes a model with images; changes: to the text model's config; vision: the tower's."""
    kind: Any = getattr(transformers, f"{name}ForConditionalGeneration")

    def made(**changes: Any) -> Any:
        tied = changes.pop("tie_word_embeddings", False)
        text = LLAMA_SHAPE | {"rope_parameters": MROPE} | changes
        if "Qwen2" in name:
            del text["head_dim"]
            text["rope_parameters"] = MROPE | {"mrope_section": [1, 1, 1]}
        tower = PATCHES | vision | {"out_hidden_size": text["hidden_size"]}
        if name == "Qwen2VL":
            tower |= {"embed_dim": tower["hidden_size"], "hidden_size": tower.pop("out_hidden_size"), "mlp_ratio": 2}
        config = kind.config_class(text_config=text, vision_config=tower, image_token_id=96, tie_word_embeddings=tied)
        return kind(config)

    return made


QWEN2_VL = qwen_vl("Qwen2VL")
QWEN2_5_VL = qwen_vl("Qwen2_5_VL", fullatt_block_indexes=[0], window_size=16)
QWEN3_VL = qwen_vl("Qwen3VL", **DEEP)


def headless(made: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **changes: made(**changes).model


GROWING: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.02}
GROWING |= {"original_max_position_embeddings": 4}  # so few that short rows show it


def mistral3(kind: str = "mistral", **changes: Any) -> Any:
    """Return a Mistral 3 with a Pixtral tower; kind, changes: of its text model, and to its config."""
    tied = changes.pop("tie_word_embeddings", False)
    own = {"rope_parameters": GROWING} if kind == "ministral3" else {}
    text = LLAMA_SHAPE | {"model_type": kind, "sliding_window": None} | own | changes
    tower = TOWER | {"model_type": "pixtral", "head_dim": 8, "image_size": 32}
    config = transformers.Mistral3Config(
        text_config=text, vision_config=tower, image_token_index=96, tie_word_embeddings=tied
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def olmo3(**changes: Any) -> Any:
    """Return an OLMo 3 whose layers see a window and everything by turns, with YaRN where they see everything."""
    own: dict[str, Any] = {"tie_word_embeddings": True, "sliding_window": 6}
    if "rope_parameters" not in changes:
        own["rope_scaling"] = dict(YARN)
    shape = LLAMA_SHAPE | own | changes
    kinds = ["sliding_attention", "full_attention"] * shape["num_hidden_layers"]
    return stock("Olmo3ForCausalLM", shape, layer_types=kinds[: shape["num_hidden_layers"]])()


def experts(name: str, **own: Any) -> Callable[..., Any]:
    """Return the same of a stock class with experts, taken apart, whose router is sure; None: the class's size."""

    def made(**changes: Any) -> Any:
        shape = {"num_experts_per_tok": 2, **LLAMA_SHAPE, **own, **changes}
        model = stock(name, {key: value for key, value in shape.items() if value is not None})()
        for module in model.modules():
            if type(module).__name__.endswith("Router"):
                torch.nn.init.normal_(module.weight, 0, 2.0)
                if hasattr(module, "e_score_correction_bias"):
                    torch.nn.init.normal_(module.e_score_correction_bias, 0, 0.2)
        return experts_apart(model, of_model_type(model.config.model_type))

    return made


OF_QWEN3_MOE = {"num_experts": 4, "moe_intermediate_size": 19}
EVERY_OTHER = {"decoder_sparse_step": 2, "norm_topk_prob": True}
OF_GLM4_MOE = {"n_routed_experts": 4, "moe_intermediate_size": 19, "head_dim": 12, "routed_scaling_factor": 2.5}
OF_OLMOE = {"head_dim": None, "num_experts": 5}
LARGE_SHARED = {"n_shared_experts": 2, "num_experts_per_tok": 3, "norm_topk_prob": False, "use_qk_norm": True}

SLIDING_QWEN2: dict[str, Any] = {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 6}
SLIDING_QWEN2 |= {"max_window_layers": 1}


def t5gemma(**changes: Any) -> Any:
    """Return a T5Gemma of two different stacks; changes are made to both."""
    shape = GEMMA3_SHAPE | {"attn_logit_softcapping": 5.0}
    own: dict[str, dict[str, Any]] = {
        "encoder": {"num_hidden_layers": 2},
        "decoder": {"hidden_size": 12, "num_hidden_layers": 2, "intermediate_size": 29, "head_dim": 6},
    }
    stacks = {stack: shape | sizes | changes for stack, sizes in own.items()}
    rates = {key: value for key, value in changes.items() if "dropout" in key}
    vocabulary = changes.get("vocab_size", shape["vocab_size"])
    config = transformers.T5GemmaConfig(**stacks, vocab_size=vocabulary, **rates)
    return transformers.T5GemmaForConditionalGeneration(config)


@dataclass(frozen=True)
class Entry:
    """What one family enters the tests with.

    ``kinds``: its models by name, each made from changes to a config of its own. ``shape``: config keys and the values
    that the contract draws for each. ``outliers``: how much larger than its others the outlier channels of a kind are,
    where it is not 8. ``wide``: how much larger the weights into the stream are than they are drawn. ``alike``: kinds
    whose parts are another's, all or some of them, so that searches for the worst input, which take long, go without.
    """

    kinds: Mapping[str, Callable[..., Any]]
    shape: Mapping[str, Sequence[Any]]
    outliers: Mapping[str, float] = field(default_factory=dict)
    wide: float = 1.0
    alike: tuple[str, ...] = ()


T5_DRAWN: dict[str, Sequence[Any]] = {"d_model": range(3, 41), "d_kv": range(1, 10), "num_heads": range(1, 5)}
T5_DRAWN |= {"d_ff": range(1, 51), "num_layers": (1, 2), "num_decoder_layers": (1, 2)}
PEGASUS_DRAWN: dict[str, Sequence[Any]] = {"d_model": (12, 24, 36), "encoder_attention_heads": range(1, 5)}
PEGASUS_DRAWN |= {"decoder_attention_heads": (1, 2, 3), "encoder_ffn_dim": range(1, 51)}
PEGASUS_DRAWN |= {"decoder_ffn_dim": range(1, 51), "encoder_layers": (1, 2), "decoder_layers": (1, 2)}
PEGASUS_DRAWN |= {"activation_function": ("relu", "relu", "gelu", "gelu_new", "silu"), "scale_embedding": (False, True)}
LLAMA_DRAWN: dict[str, Sequence[Any]] = {"hidden_size": (12, 24, 36), "num_attention_heads": (2, 4)}
LLAMA_DRAWN |= {"num_key_value_heads": (1, 2), "head_dim": (2, 6, 10)}
LLAMA_DRAWN |= {"intermediate_size": range(1, 51), "num_hidden_layers": (2, 1)}
VL_SHAPE = {key: value for key, value in LLAMA_SHAPE.items() if key != "head_dim"}
VL_SHAPE |= {"rope_parameters": MROPE | {"mrope_section": [1, 1, 1]}}
GEMMA_DRAWN = LLAMA_DRAWN | {"query_pre_attn_scalar": (1, 7, 64)}
ONE_HEAD_DIM = {key: values for key, values in LLAMA_DRAWN.items() if key != "head_dim"}  # hidden size by heads
MBARTS = {"mbart": "ForConditionalGeneration", "mbart-states": "Model"}
VL_DRAWN = {key: value for key, value in LLAMA_DRAWN.items() if key in ("intermediate_size", "num_hidden_layers")}
ENTRIES = (
    Entry(
        {"t5": t5, "gated": gated, "t5-encoder": t5_encoder, "t5-states": of_t5("T5Model")}
        | {"gelu": partial(gated, "gelu"), "silu": partial(gated, "gated-silu")}
        | {"t5-classifier": of_t5("T5ForSequenceClassification", feed_forward_proj="gated-gelu")}
        | {"t5-token-classifier": of_t5("T5ForTokenClassification", num_labels=3)}
        | {"t5-spans": of_t5("T5ForQuestionAnswering", feed_forward_proj="gated-gelu")},
        T5_DRAWN,
        # Plain feed-forwards give smaller products than gated ones.
        outliers={"t5": 100.0, "gelu": 100.0, "t5-states": 100.0, "t5-token-classifier": 100.0},
        alike=("t5-states",),
    ),
    Entry(
        {"mt5": lambda **changes: untied(of_t5("MT5ForConditionalGeneration")(**changes))}
        | {
            "mt5-encoder": of_t5("MT5EncoderModel"),
            "mt5-classifier": of_t5("MT5ForSequenceClassification", num_labels=3),
        },
        T5_DRAWN,
        alike=("mt5", "mt5-encoder", "mt5-classifier"),
    ),
    Entry(
        {"umt5": lambda **changes: untied(of_t5("UMT5ForConditionalGeneration")(**changes))}
        | {"umt5-encoder": of_t5("UMT5EncoderModel"), "umt5-spans": of_t5("UMT5ForQuestionAnswering")},
        T5_DRAWN,
        alike=("umt5-encoder",),
    ),
    Entry(
        {"longt5": longt5, "longt5-local": lambda **changes: longt5(**{"encoder_attention_type": "local"} | changes)}
        | {"longt5-tied": lambda **changes: longt5(**TIED_LONGT5 | changes)}
        | {"longt5-encoder": partial(longt5, "LongT5EncoderModel"), "longt5-states": partial(longt5, "LongT5Model")},
        T5_DRAWN | {"local_radius": range(5), "global_block_size": range(1, 7)},
        outliers={"longt5-tied": 100.0},
        alike=("longt5-encoder", "longt5-states"),
    ),
    Entry(
        {"switch": switch, "switch-untied": lambda **changes: switch(**UNTIED_SWITCH | changes)}
        | {"switch-encoder": partial(switch, "SwitchTransformersEncoderModel")}
        | {"switch-states": partial(switch, "SwitchTransformersModel")},
        T5_DRAWN
        | dict.fromkeys(("num_sparse_encoder_layers", "num_sparse_decoder_layers"), range(3))
        | {"num_experts": range(1, 5), "router_bias": (False, True)},
        outliers=dict.fromkeys(("switch", "switch-untied", "switch-encoder", "switch-states"), 100.0),
        alike=("switch-encoder", "switch-states"),
    ),
    Entry({"pegasus": pegasus}, PEGASUS_DRAWN, outliers={"pegasus": 100.0}, wide=20.0),
    Entry(
        {kind: stock(f"MBart{name}", PEGASUS_SHAPE) for kind, name in MBARTS.items()},
        PEGASUS_DRAWN,
        outliers={"mbart": 100.0, "mbart-states": 100.0},
        wide=20.0,
        alike=("mbart-states",),
    ),
    Entry(
        {"bigbird_pegasus": bigbird_pegasus},
        PEGASUS_DRAWN | {"use_bias": (False, True)},
        outliers={"bigbird_pegasus": 100.0},
        wide=20.0,
    ),
    Entry(
        {"gemma3": gemma3, "gemma3-untied": stock("Gemma3ForCausalLM", GEMMA3_SHAPE, **UNTIED_GEMMA3)}
        | {"embeddinggemma": stock("Gemma3TextModel", GEMMA3_SHAPE, use_bidirectional_attention=True)},
        GEMMA_DRAWN,
        alike=("gemma3-untied",),
    ),
    Entry(
        {"gemma3-images": gemma3_images, "gemma3-images-states": headless(gemma3_images)},
        GEMMA_DRAWN,
        alike=("gemma3-images", "gemma3-images-states"),
    ),
    Entry(
        {"gemma4": gemma4, "gemma4-equal": lambda **changes: gemma4(**ONE_FOR_BOTH | changes)}
        | {"gemma4-states": partial(gemma4, "Gemma4TextModel")},
        LLAMA_DRAWN | {"global_head_dim": (4, 8, 12)},
        alike=("gemma4-states",),
    ),
    Entry(
        {"gemma4-images": gemma4_images, "gemma4-images-states": headless(gemma4_images)},
        LLAMA_DRAWN | {"global_head_dim": (4, 8, 12)},
        alike=("gemma4-images", "gemma4-images-states"),
    ),
    Entry(
        {"gemma2": stock("Gemma2ForCausalLM", GEMMA3_SHAPE, **CAPS)}
        | {"gemma2-classifier": stock("Gemma2ForSequenceClassification", GEMMA3_SHAPE, **CAPS)},
        GEMMA_DRAWN | {"attn_logit_softcapping": (0.5, 50.0, None)},
        alike=("gemma2-classifier",),
    ),
    Entry({"gemma": stock("GemmaForCausalLM", GEMMA3_SHAPE)}, LLAMA_DRAWN),
    Entry(
        {"llama": stock("LlamaForCausalLM", LLAMA_SHAPE)}
        | {"llama-biased": stock("LlamaForCausalLM", LLAMA_SHAPE, **BIASED_LLAMA)}
        | {"llama-reward": stock("LlamaForSequenceClassification", LLAMA_SHAPE, num_labels=1, pad_token_id=0)},
        LLAMA_DRAWN | {"attention_bias": (False, True), "mlp_bias": (False, True)},
        alike=("llama-reward",),
    ),
    Entry({"mistral": stock("MistralModel", LLAMA_SHAPE, sliding_window=6)}, LLAMA_DRAWN, alike=("mistral",)),
    Entry({"qwen2": stock("Qwen2ForCausalLM", LLAMA_SHAPE, **SLIDING_QWEN2)}, LLAMA_DRAWN),
    Entry(
        {"qwen3": stock("Qwen3ForCausalLM", LLAMA_SHAPE)}
        | {"qwen3-labels": stock("Qwen3ForTokenClassification", LLAMA_SHAPE, num_labels=3)},
        LLAMA_DRAWN,
        alike=("qwen3-labels",),
    ),
    Entry(
        {"seed_oss": stock("SeedOssForCausalLM", LLAMA_SHAPE)}
        | {"seed_oss-biased": stock("SeedOssModel", LLAMA_SHAPE, attention_out_bias=True, mlp_bias=True)},
        LLAMA_DRAWN | dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias"), (False, True)),
    ),
    Entry(
        {"glm4": stock("Glm4ForCausalLM", LLAMA_SHAPE, pad_token_id=0)},
        LLAMA_DRAWN | {"head_dim": (4, 8, 10), "attention_bias": (False, True)},
    ),
    Entry({"glm": stock("GlmForCausalLM", LLAMA_SHAPE, pad_token_id=0)}, LLAMA_DRAWN | {"head_dim": (4, 8, 12)}),
    Entry(
        {"smollm3": stock("SmolLM3ForCausalLM", LLAMA_SHAPE, pad_token_id=0, no_rope_layer_interval=2)},
        ONE_HEAD_DIM | {"attention_bias": (False, True), "no_rope_layer_interval": (1, 2)},
    ),
    Entry({"ernie4_5": stock("Ernie4_5ForCausalLM", LLAMA_SHAPE)}, LLAMA_DRAWN | {"use_bias": (False, True)}),
    Entry(
        {"granite": stock("GraniteForCausalLM", LLAMA_SHAPE, **MULTIPLIERS)},
        ONE_HEAD_DIM
        | {"residual_multiplier": (0.3, 2.5), "embedding_multiplier": (1.0, 12.0), "logits_scaling": (0.5, 8.0)},
    ),
    Entry(
        {"phi3": stock("Phi3ForCausalLM", LLAMA_SHAPE, pad_token_id=0)}
        | {"phi3-partial": stock("Phi3ForCausalLM", LLAMA_SHAPE, pad_token_id=0, rope_parameters=SIX_OF_TEN)},
        ONE_HEAD_DIM,
    ),
    Entry(
        {"exaone4": stock("Exaone4ForCausalLM", LLAMA_SHAPE, sliding_window=6, sliding_window_pattern=2)},
        ONE_HEAD_DIM | {"sliding_window_pattern": (1, 2)},
    ),
    Entry({"qwen2_vl": QWEN2_VL}, VL_DRAWN, alike=("qwen2_vl",)),
    Entry({"qwen2_vl_text": stock("Qwen2VLTextModel", VL_SHAPE)}, VL_DRAWN, alike=("qwen2_vl_text",)),
    Entry(
        {"qwen2_5_vl": QWEN2_5_VL, "qwen2_5_vl-states": headless(QWEN2_5_VL)}, VL_DRAWN, alike=("qwen2_5_vl-states",)
    ),
    Entry({"qwen2_5_vl_text": stock("Qwen2_5_VLTextModel", VL_SHAPE)}, VL_DRAWN, alike=("qwen2_5_vl_text",)),
    Entry({"qwen3_vl": QWEN3_VL, "qwen3_vl-states": headless(QWEN3_VL)}, ONE_HEAD_DIM, alike=("qwen3_vl-states",)),
    Entry(
        {"qwen3_vl_text": stock("Qwen3VLTextModel", LLAMA_SHAPE, rope_parameters=MROPE)},
        LLAMA_DRAWN,
        alike=("qwen3_vl_text",),
    ),
    Entry(
        {"mistral3": mistral3, "mistral3-states": headless(mistral3)}
        | {"mistral3-growing": partial(mistral3, "ministral3")},
        LLAMA_DRAWN,
        alike=("mistral3-states", "mistral3-growing"),
    ),
    Entry({"ministral3": stock("Ministral3ForCausalLM", LLAMA_SHAPE, rope_parameters=GROWING)}, LLAMA_DRAWN),
    Entry({"olmo2": stock("Olmo2ForCausalLM", LLAMA_SHAPE)}, LLAMA_DRAWN | {"attention_bias": (False, True)}),
    Entry({"olmo3": olmo3}, LLAMA_DRAWN),
    Entry(
        {"mixtral": experts("MixtralForCausalLM", num_local_experts=3)},
        LLAMA_DRAWN | {"num_local_experts": range(2, 5), "num_experts_per_tok": (1, 2)},
    ),
    Entry(
        {"qwen3_moe": experts("Qwen3MoeForCausalLM", **OF_QWEN3_MOE)}
        | {"qwen3_moe-mixed": experts("Qwen3MoeForCausalLM", **OF_QWEN3_MOE | EVERY_OTHER)},
        LLAMA_DRAWN | {"num_experts": range(2, 6), "moe_intermediate_size": range(1, 30)},
    ),
    Entry(
        {"olmoe": experts("OlmoeForCausalLM", **OF_OLMOE)},
        {key: drawn for key, drawn in LLAMA_DRAWN.items() if key not in ("head_dim", "hidden_size")}
        | {"num_experts": range(2, 6), "attention_bias": (False, True)},
    ),
    Entry(
        {"glm4_moe": experts("Glm4MoeForCausalLM", **OF_GLM4_MOE)}
        | {"glm4_moe-shared": experts("Glm4MoeForCausalLM", **OF_GLM4_MOE | LARGE_SHARED, first_k_dense_replace=0)},
        ONE_HEAD_DIM
        | {"n_routed_experts": range(3, 6), "moe_intermediate_size": range(1, 30), "attention_bias": (False, True)},
    ),
    Entry({"t5gemma": t5gemma}, LLAMA_DRAWN | {"attn_logit_softcapping": (0.5, None)}),
)
"""One for each family; a new one adds its own here."""

KINDS = {kind: make for entry in ENTRIES for kind, make in entry.kinds.items()}
SEARCHED = [kind for entry in ENTRIES for kind in entry.kinds if kind not in entry.alike]
"""The kinds among which every part of every family is."""

FIRST = [kinds[0] for entry in ENTRIES if (kinds := [kind for kind in entry.kinds if kind in SEARCHED])]
"""One of them for each family."""

CORE = ["t5", "longt5", "switch", "pegasus", "mbart", "gemma3", "gemma4", "gemma2", "qwen3", "glm4", "granite", "phi3"]
CORE += ["qwen3_vl", "mistral3", "olmo2", "qwen3_moe", "t5gemma"]
"""Of those the ones whose parts differ: on them is run what asks a family's data for nothing more."""

FEW_LAYERS = {"num_layers": 2, "encoder_layers": 2, "num_hidden_layers": 2, "num_decoder_layers": 1}
FEW_LAYERS |= {"decoder_layers": 1, "num_sparse_decoder_layers": 1}
"""A stack whose first layer differs from the others, as T5's does, or every other one has two; a third repeats them."""


def config(kind: str, **changes: Any) -> Any:
    """Return the config of a kind's model, naming its class as that of a loaded one does."""
    return config_of(KINDS[kind](**changes))


def few_layers(kind: str) -> dict[str, Any]:
    """Return the changes that leave a kind no more layers than differ, for what takes long in each."""
    entry = next(entry for entry in ENTRIES if kind in entry.kinds)
    return {key: number for key, number in FEW_LAYERS.items() if key in entry.shape}


def build(
    kind: str, seed: int = 0, *, factor: float = 900.0, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Any:
    """Return a random fp32 model in eval mode of ``dtype``'s values; factor: how much larger its stream is."""
    torch.manual_seed(seed)
    entry = next(entry for entry in ENTRIES if kind in entry.kinds)
    model = KINDS[kind](**changes).eval()
    model.config.architectures = [type(model).__name__]  # as a model that was loaded says
    layout = resolve(ModelTensors(model))
    feed_forwards = layout.feed_forwards
    sums = {w.output for w in feed_forwards}
    outputs = sums | {w.output for w in layout.topology if isinstance(w, Attention)}
    gated = {w.linear: w for w in feed_forwards if w.gate}
    tables = {layout.table(stack.ends) for stack in layout.stacks()}
    behind = {w.post_norm for w in layout.topology if isinstance(w, Attention | FeedForward)}
    bare = {path for w in layout.topology if isinstance(w, Attention | FeedForward) for path in unnormed(w)}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            module, _, what = name.rpartition(".")
            if name in (*tables, *layout.family.copies, layout.family.projector and layout.family.projector.weight):
                weight.mul_(factor)
            elif module in outputs and what == "weight":
                weight.mul_(factor * entry.wide)
                if module in sums and any(f".{i}." in name for i in (1, 2)):
                    weight[:2].mul_(entry.outliers.get(kind, 8.0))
            if module in bare and what == "weight":
                weight.div_(max(1.0, 15.0 * factor))  # of what no norm makes small, as training does
            if name == layout.family.head:
                weight.mul_(0.1)
            if what == "bias":
                weight.normal_(0, 0.3 * (factor if module in outputs else 1))
            if name in layout.tensors and layout.tensors[name].offset:
                gains(weight, layout, module, factor)
            elif "norm" in name and what == "weight":
                weight.mul_(torch.rand_like(weight) + 0.5)
                if module in behind:
                    weight[::2].mul_(max(1.0, 15.0 * factor))
            if module in gated:
                neurons = weight.chunk(2)[1] if gated[module].fused else weight
                neurons[:2].mul_(20)
        if layout.tied and not any(tensor.offset for tensor in layout.tensors.values()):
            # A tied head sees the large embedding; small gains keep its logits sane, as training does.
            for parameter in model.get_submodule(final_norm(layout)).parameters():
                parameter.mul_(8.0 / factor)
        for tensor in model.state_dict().values():
            tensor.copy_(tensor.to(dtype).to(tensor.dtype))
    return model


def unnormed(sublayer: Attention | FeedForward) -> tuple[str, ...]:
    """Return the linears that read the stream without a norm before or behind them."""
    if sublayer.norm:
        return ()
    return (sublayer.value,) if isinstance(sublayer, Attention) else (sublayer.gate, sublayer.linear)


def small(kind: str, seed: int = 0, **options: Any) -> Any:
    return build(kind, seed, **few_layers(kind) | options)


def final_norm(layout: Layout) -> str:
    return [w.norm for w in layout.topology if isinstance(w, StackEnds)][-1]


def gains(weight: torch.Tensor, layout: Layout, module: str, factor: float) -> None:
    """Fill what is stored of gains, less an offset, with few bits; behind a sublayer every other one is large."""
    gain, grid = torch.rand_like(weight) + 0.5, 64
    if module in {w.post_norm for w in layout.topology if isinstance(w, (Attention, FeedForward, Experts))}:
        gain[::2] *= max(1.0, 15.0 * factor)
    if layout.tied and module == final_norm(layout):
        gain *= min(1.0, 5.0 / factor)
        grid = 256
    weight.copy_((gain * grid).round().clamp(min=1) / grid - 1)


def save(model: Any, folder: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    """Save a model as its publisher would: ``dtype`` safetensors, and a config that says whether the head is tied."""
    folder.mkdir(parents=True, exist_ok=True)
    deepcopy(model).to(dtype).save_pretrained(folder, **options)
    config = json.loads((folder / "config.json").read_text())
    for key in ("scale_decoder_outputs", "tie_word_embeddings", "transformers_version"):
        config.pop(key, None)
    head = model.get_output_embeddings()
    tied = head is None or any(m.weight is head.weight for m in model.modules() if isinstance(m, torch.nn.Embedding))
    config["tie_word_embeddings"] = tied
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


@contextmanager
def no_models() -> Iterator[None]:
    """Let no stock model be loaded with its values: to load one fails the test."""
    load = transformers.PreTrainedModel.from_pretrained.__func__

    def without_values(kind: Any, *arguments: Any, **options: Any) -> Any:
        return load(kind, *arguments, **options) if options.get("device_map") == {"": "meta"} else pytest.fail("loaded")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.PreTrainedModel, "from_pretrained", classmethod(without_values))
        yield
