"""Makes the text of the demo checkpoints from ``pydoc_data.topics``, the language reference that CPython ships.

``python recipes/extract_text.py TRAIN.txt.gz HELD_OUT.txt`` writes one passage of 200 to 300 characters per line. Whole
topics are held out; the reference repeats paragraphs across topics, so every training passage that shares 48 characters
in a row with a held-out one is dropped. The project's files come from CPython 3.11.7; other versions differ a little.
"""

from __future__ import annotations

import gzip
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

HELD_OUT = ("calls", "comparisons", "import", "objects", "subscriptions", "typesmapping")
SHARED = 48


def paragraphs(names: Iterable[str], seen: set[str]) -> Iterator[str]:
    """Yield each paragraph of the topics once, white space collapsed, heading rules dropped; ``seen`` collects them."""
    for name in names:
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            text = " ".join(re.sub(r"[*=~-]{4,}", " ", paragraph).split())
            if text and text not in seen:
                seen.add(text)
                yield text


def passages(text: str, shortest: int = 200, longest: int = 300) -> Iterator[str]:
    """Cut text into passages of ``shortest`` to ``longest`` characters, at a sentence's end or else a word's."""
    start = 0
    while len(text) - start > longest:
        window = text[start : start + longest]
        end = window.rfind(". ", shortest)
        cut = end + 1 if end >= 0 else window.rfind(" ")
        cut = cut if cut > 0 else longest
        yield text[start : start + cut].strip()
        start += cut
    if len(text) - start >= shortest:
        yield text[start:].strip()


def shingles(text: str) -> set[str]:
    """Return every run of ``SHARED`` characters of the text."""
    return {text[i : i + SHARED] for i in range(len(text) - SHARED + 1)}


def main(train: Path, held_out: Path) -> None:
    """Write both files and print their sizes."""
    seen: set[str] = set()
    held = list(passages(" ".join(paragraphs(HELD_OUT, seen))))
    taken = shingles(" ".join(held))
    rest = [name for name in topics if name not in HELD_OUT]
    kept = [p for p in passages(" ".join(paragraphs(rest, seen))) if shingles(p).isdisjoint(taken)]
    held_out.write_text("\n".join(held) + "\n", encoding="utf-8")
    train.write_bytes(gzip.compress(("\n".join(kept) + "\n").encode("utf-8"), 9, mtime=0))
    for name, lines in (("train", kept), ("held out", held)):
        print(f"{name}: {len(lines)} passages, {sum(map(len, lines))} characters")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
