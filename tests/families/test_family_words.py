"""What is known of one family stands in ``families/`` alone: no other module names a family or a module of one."""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from functools import cache

from support import parsed, tiny
from support.contract import layout_of

from bf16_to_fp16.families.known import FAMILIES, names_of
from bf16_to_fp16.families.types import Family
from bf16_to_fp16.families.wiring import Topology

ROLES = {"encoder", "decoder", "model", "output", "weight", "bias"}
"""Parts of paths that every family shares, and that the package speaks of itself."""

COMMON = {
    *("act", "block", "dropout", "gate", "k", "key", "layer", "layers", "norm"),
    *("o", "q", "query", "self", "shared", "v", "value", "w3"),
}
"""Words of English or of mathematics as well: they give a family away inside a path only."""

OF_TRANSFORMERS = {
    *("dropout", "hidden_size", "id2label", "initializer_range", "layer_types", "max_position_embeddings"),
    *("num_hidden_layers", "num_labels", "sliding_window", "text_config", "tie_word_embeddings", "vocab_size"),
}
"""Config keys that mean the same in every family."""

OPERATIONS = {"layer_norm"}  # torch's names of operations, by which audits name sites
ALLOWED = {("t5", "demo"), ("pegasus", "demo"), ("gemma3", "demo")}  # the names of the shipped checkpoints

FILES = {
    *("advise/initialisation.py", "checkpoint/naming.py"),
    *("checkpoint/contents.py", "checkpoint/single_file.py", "finetuning/launching.py"),
}
"""Tables of what files of single encoders are called and what models they are, by which a file is opened before there
is a config that could have a family; of what configs of any class call their width and deviations or have position
biases, and of what sentence-transformers calls its own modules."""


def paths_of(topology: Topology) -> Iterator[str]:
    for value in astuple(topology):
        values = value if isinstance(value, tuple) else (value,)
        yield from (each for each in values if isinstance(each, str))


def module_names() -> set[str]:
    paths = set()
    for layout in map(layout_of, map(tiny.small, tiny.KINDS)):
        # Another model, which has no family.
        inside = (f"{layout.family.projector.tower}.",) if layout.family.projector else ()
        paths |= {name for name in (*layout.tensors, *layout.dropped) if not name.startswith(inside)}
        paths |= {text.partition(":")[0] for record in layout.topology for text in paths_of(record) if "." in text}
    for family in FAMILIES:
        paths |= {*family.copies, *family.ignorable, *family.kept_in_fp32, family.logits_bias}
    return {part for path in paths for part in path.split(".") if part and not part.isdigit()} - ROLES


def config_keys(family: Family) -> set[str]:
    keys = {*family.config_keys, family.output_scale_key}
    return keys | {family.eps_key or ""}


@cache
def words() -> set[str]:
    """Return what only ``families/`` may spell out, besides the families' own names."""
    keys = {key for family in FAMILIES for key in config_keys(family) if not key.isdigit()}
    classes = {name for family in FAMILIES for name in names_of(family)}
    return (module_names() | keys | classes) - OF_TRANSFORMERS - OPERATIONS - {""}


def constants(nodes: Sequence[ast.AST]) -> Iterator[str]:
    said = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.value


def found_in(nodes: Sequence[ast.AST], known: set[str]) -> set[str]:
    names = "|".join(re.escape(family.name) for family in FAMILIES)
    found = {
        node.module.rpartition(".")[2]
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module and re.fullmatch(rf"(?i).*families\.({names})", node.module)
    }
    for text in constants(nodes):
        found |= {match.lower() for match in re.findall(rf"(?i)(?<![a-z0-9])(?:{names})(?![a-z0-9])", text)}
        found |= set(re.findall(r"\w+", text)) & (known - COMMON)
        if re.fullmatch(r"[\w.:#]*\.[\w.:#]*", text):
            found |= set(re.findall(r"\w+", text)) & known
    return found


def test_only_the_families_spell_out_what_is_theirs() -> None:
    known = words()
    found = {
        (word, path.stem)
        for path in parsed.package()
        if not (inside := path.relative_to(parsed.PACKAGE).as_posix()).startswith("families/") and inside not in FILES
        for word in found_in(parsed.nodes(path), known)
    }
    assert found == ALLOWED
