"""Short texts, files of rows, and a folder of a tiny model with a tokenizer of the texts' words."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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


def rows_in(folder: Path, kind: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows to a .jsonl, .csv, .parquet or, of their texts, .txt file in a folder; return the file."""
    path = folder / f"data{kind}"
    if kind == ".parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    lines = [row["text"] for row in rows] if kind == ".txt" else [json.dumps(row) for row in rows]
    if kind == ".csv":
        lines = [",".join(map(str, each)) for each in (rows[0], *(row.values() for row in rows))]
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return path
