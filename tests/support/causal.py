"""Tiny causal language models of stock classes, of families and of none."""

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

SHAPE: dict[str, Any] = {"vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12, "attn_implementation": "eager"}


def make(kind: str, seed: int = 0, **changes: Any) -> Any:
    """Return a random fp32 model in eval mode: a Gemma 3 with one sliding and one full layer, a Llama or a Qwen 3."""
    torch.manual_seed(seed)
    prefix, config = {
        "gemma3": ("Gemma3", transformers.Gemma3TextConfig),
        "llama": ("Llama", transformers.LlamaConfig),
        "qwen3": ("Qwen3", transformers.Qwen3Config),
    }[kind]
    own = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]} if kind == "gemma3" else {}
    model: Any = getattr(transformers, f"{prefix}ForCausalLM")(config(**SHAPE | own | changes)).eval()
    model.config.architectures = [type(model).__name__]  # as a model that was loaded says
    return model


def tokenizer() -> Any:
    """Return a tokenizer of bytes, ids 3 to 258, that begins a text with 2 and names 1 as its end, as Gemma's does."""
    special = {"<pad>": 0, "<eos>": 1, "<bos>": 2}
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(special | {letter: i for i, letter in enumerate(letters, 3)}, []))
    made.add_special_tokens(list(special))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 2)])
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)
