"""The list of a survey: which checkpoints, checked before anything loads, and pinned to commits on request.

A list is YAML::

    - source: google/flan-t5-base
      revision: main
    - source: black-forest-labs/FLUX.1-dev
      subfolder: text_encoder_2
    - source: my/folder
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..checkpoint.hub import reading_from
from ..checkpoint.places import local_source
from ..errors import UserError
from ..yaml_files import kind_in_words, parse_yaml, read_yaml

COMMIT = re.compile(r"[0-9a-f]{40}")


Text = Annotated[str, Field(min_length=1, pattern=r"\S")]


class Listed(BaseModel):
    """One checkpoint of a list: a folder, a file of weights or a Hub id; of a Hub id the revision, by default main."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    source: Text
    revision: Text | None = None
    subfolder: Text | None = None

    @cached_property
    def local(self) -> Path | None:
        """The folder or the file, None for a Hub id; raises UserError for what is none of them."""
        return local_source(self.source)

    @property
    def where(self) -> str:
        """The source as the other commands take it."""
        return self.source if self.revision is None else f"{self.source}@{self.revision}"

    @property
    def name(self) -> str:
        """The source as a page names it: a Hub id, of a local path the last part, and the folder inside it."""
        name = self.source if self.local is None else Path(self.source).expanduser().absolute().name
        return "/".join(filter(None, (name, self.subfolder)))

    @property
    def folder(self) -> str:
        """The name of the folder of its results, which no other checkpoint of a list has."""
        described = json.dumps([self.source, self.revision, self.subfolder])
        words = re.sub(r"[^\w.-]+", "-", self.name).strip("-.")[-80:]
        return f"{words}-{hashlib.sha256(described.encode()).hexdigest()[:8]}"

    def check(self) -> None:
        """Raise UserError for a source that is nowhere, and for a revision that says nothing."""
        if "@" in self.source and not Path(self.source).expanduser().exists():
            raise UserError(f"source {self.source} has a revision in it; write it under a key of its own, revision")
        if self.local is not None and self.revision is not None:
            raise UserError(f"{self.source} is on this machine and has no revision; leave revision out")


def read_list(path: Path) -> list[Listed]:
    """Return the checkpoints of a list, in its order.

    Raises UserError of one line, with the file and the entry, for a file that cannot be read or is no list, an entry
    that is no mapping, has an unknown key or none that says where it is, and one that is there twice.
    """
    return checked(read_yaml(path, "list"), path)


def checked(tree: Any, path: Path) -> list[Listed]:
    """Return the checkpoints of a list that was read, as ``read_list`` does."""
    if not isinstance(tree, list) or not tree:
        found = "empty" if tree is None or tree == [] else kind_in_words(tree)
        raise UserError(f"{path}: a list is made of entries like `- source: org/name`, and this is {found}")
    found_at: dict[Listed, int] = {}
    for number, entry in enumerate(tree, 1):
        place = f"{path}: entry {number}"
        if not isinstance(entry, dict):
            raise UserError(
                f"{place} is {kind_in_words(entry)} ({str(entry)[:60]}); write `source: {entry or 'org/name'}`"
            )
        try:
            listed = Listed.model_validate(entry)
            listed.check()
        except ValidationError as error:
            raise UserError(f"{place} ({entry.get('source', 'no source')}): {problem(error)}") from None
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
        if listed in found_at:
            raise UserError(f"{place} ({listed.where}) is entry {found_at[listed]} once more; remove one of them")
        found_at[listed] = number
    return list(found_at)


def problem(error: ValidationError) -> str:
    """Return what is wrong with an entry, and how to mend it; an unknown key comes before one that is missing."""
    found: Any = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    key, kind, keys = found["loc"][0], found["type"], list(Listed.model_fields)
    if kind == "extra_forbidden":
        (close, *_) = difflib.get_close_matches(str(key), keys, 1, 0.5) or [", ".join(keys)]
        return f"unknown key {key}; did you mean {close}?"
    if kind == "missing":
        return f"{key} is missing; add the folder, the file or the Hub id"
    if kind == "string_type":
        return f"{key} is {found['input']!r}, {kind_in_words(found['input'])}; give text, if need be in quotes"
    return f"{key} is empty; give it, or leave it out"


# --- pinning ---------------------------------------------------------------------------------------------------------


def pin(path: Path) -> int:
    """Write the commit that each Hub id of a list stands for now into the list, and return how many were written.

    Commits stay as they are, and so does all else of the file, comments included. Raises UserError where the list is
    bad or a revision cannot be found; the file then is as it was.
    """
    listed = read_list(path)
    text = path.read_text(encoding="utf-8")
    commits = [
        None if entry.local is not None or COMMIT.fullmatch(entry.revision or "") else commit_of(entry)
        for entry in listed
    ]
    nodes: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    for node, commit in reversed(list(zip(nodes.value, commits, strict=True))):
        if commit is not None:
            text = with_revision(text, node, commit)
    wanted = [
        entry if commit is None else entry.model_copy(update={"revision": commit})
        for entry, commit in zip(listed, commits, strict=True)
    ]
    if checked(parse_yaml(text, str(path)), path) != wanted:
        raise UserError(f"{path}: cannot be pinned as it is written; give each entry a line `revision: main`")
    path.write_text(text, encoding="utf-8", newline="\n")
    return sum(commit is not None for commit in commits)


def with_revision(text: str, node: Any, commit: str) -> str:
    """Return the text of a list with a commit for the entry at a node: in place of its revision, or behind its
    source."""
    values = {key.value: (key, value) for key, value in node.value}
    if "revision" in values and values["revision"][1].value:
        _, old = values["revision"]
        return text[: old.start_mark.index] + commit + text[old.end_mark.index :]
    key, value = values["source"]
    if node.flow_style:
        at = value.end_mark.index
        return f"{text[:at]}, revision: {commit}{text[at:]}"
    at = text.find("\n", value.end_mark.index)
    at = len(text) if at < 0 else at
    return f"{text[:at]}\n{' ' * key.start_mark.column}revision: {commit}{text[at:]}"


def commit_of(entry: Listed) -> str:
    """Return the commit that a Hub id stands for now; raise UserError where the Hub does not say."""
    from huggingface_hub import HfApi

    found = reading_from(
        entry.source, entry.revision, lambda: HfApi().model_info(entry.source, revision=entry.revision).sha
    )
    if found is None or not COMMIT.fullmatch(found):
        raise UserError(f"{entry.where}: the Hub names no commit of it; give one under revision")
    return found
