"""Every text that the program shows, in one list: ``pytest tests/test_messages.py -rP``; errors say what to do."""

import ast
import re
from collections.abc import Iterator
from functools import cache

from support import parsed

ELSEWHERE = re.compile(r"(.*: )?(config\.json|AdamW)?[:/]? ?\{.*?\}(, or .*)?|.*, and \{why\}")
"""A text that ends in words from elsewhere, which say what to do: of this list, or of a table of families."""

OTHER_NAMES = {"directory": "folder", "argument": "option", "quantized": "quantised", "optimiser": "optimizer"}


def template(node: ast.AST) -> str:
    """Return an expression's text, with the source of what is filled in between braces."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(map(template, values))
        case ast.FormattedValue(value=value):
            return f"{{{ast.unparse(value)}}}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left) + template(right)
    return f"{{{ast.unparse(node)}}}"


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]{2,}", re.sub(r"\{.*?\}", " ", text.lower()))


def texts(node: ast.AST) -> Iterator[tuple[int, bool, str]]:
    """Yield line, whether it is an error, and text of each error, and of each longer string but docstrings."""
    is_error = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("UserError") and bool(node.args)
    if is_error or isinstance(node, ast.JoinedStr | ast.Constant):
        text = template(node.args[0] if isinstance(node, ast.Call) else node)
        if is_error or (len(words_of(text)) > 2 and " " in text):
            yield getattr(node, "lineno", 0), is_error, text
    elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


@cache
def shown() -> list[tuple[str, bool, str]]:
    found = ((file.relative_to(parsed.PACKAGE), texts(parsed.nodes(file)[0])) for file in parsed.package())
    return [(f"{file}:{line}", is_error, text) for file, every in found for line, is_error, text in every]


def test_every_error_is_one_line_that_says_what_happened_and_what_to_do() -> None:
    errors = {place: text for place, is_error, text in shown() if is_error}
    assert len(errors) > 250
    assert not [place for place, text in errors.items() if "; " not in text and not ELSEWHERE.fullmatch(text)]
    assert not [place for place, text in errors.items() if re.search(r"\n|  |\.$", re.sub(r"\{.*?\}", "x", text))]


def test_one_thing_has_one_name_in_every_text() -> None:
    for place, _, text in shown():
        print(place, text)
        assert text == "Missing argument 'OUT'." or not OTHER_NAMES.keys() & {*words_of(text)}, (place, text)
