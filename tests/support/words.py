"""Short texts, and a folder of a tiny model with a tokenizer of their words."""

from pathlib import Path

from support import tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEXTS = ["the cat sat", "a dog ran far away", "the dog sat", "it rained"]


def save(folder: Path) -> Path:
    """Save a tiny T5 and a tokenizer that makes one id of each word of ``TEXTS``, without an end; return the folder."""
    words = ["<pad>", "</s>", "<unk>", *sorted({word for text in TEXTS for word in text.split()})]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return tiny.save(tiny.build("t5"), folder)
