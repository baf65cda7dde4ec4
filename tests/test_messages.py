"""Every error line says what happened and then what to do, in one list: ``pytest tests/test_messages.py -rP``."""

import ast
import re
from functools import cache

from support import parsed

ELSEWHERE = re.compile(r"(.*: )?(config\.json|AdamW)?[:/]? ?\{.*?\}(, or .*)?|.*, and \{why\}")
"""A text that ends in words from elsewhere, which say what to do: of this list, or of a table of families."""

OTHER_NAMES = {"directory": "folder", "argument": "option", "quantized": "quantised", "optimiser": "optimizer"}


def template(node: ast.expr) -> str:
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
        case ast.IfExp(body=body, orelse=otherwise):
            return f"{template(body)}{template(otherwise)}"
    return f"{{{ast.unparse(node)}}}"


@cache
def errors() -> dict[str, str]:
    """Return the text of every ``UserError`` by its place."""
    return {
        f"{file.relative_to(parsed.PACKAGE)}:{node.lineno}": template(node.args[0])
        for file in parsed.package()
        for node in parsed.nodes(file)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("UserError") and node.args
    }


def test_every_error_says_what_happened_and_what_to_do() -> None:
    for place, text in errors().items():
        print(place, text)
    assert len(errors()) > 250
    mute = {place: text for place, text in errors().items() if "; " not in text and not ELSEWHERE.fullmatch(text)}
    assert not mute


def test_errors_are_one_line_without_an_end_mark_and_call_one_thing_one_name() -> None:
    for place, text in errors().items():
        words = re.sub(r"\{.*?\}", "x", text)
        assert not re.search(r"\n|  |\.$", words), (place, text)
        assert not OTHER_NAMES.keys() & {*re.findall(r"\w+", words.lower())}, (place, text)
