"""A tokenizer of causal language models."""

from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors


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
