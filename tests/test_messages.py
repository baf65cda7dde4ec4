"""Every error line says what happened and then what to do, in one list: ``pytest tests/test_messages.py -rP``."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "bf16_to_fp16"

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


def errors() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every ``UserError``."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("UserError") and node.args:
                yield f"{file.relative_to(PACKAGE)}:{node.lineno}", template(node.args[0])


def test_every_error_says_what_happened_and_what_to_do() -> None:
    found = dict(errors())
    for place, text in found.items():
        print(place, text)
    assert len(found) > 300
    mute = {place: text for place, text in found.items() if "; " not in text and not ELSEWHERE.fullmatch(text)}
    assert not mute


def test_errors_are_one_line_without_an_end_mark_and_call_one_thing_one_name() -> None:
    for place, text in errors():
        words = re.sub(r"\{.*?\}", "x", text)
        assert not re.search(r"\n|  |\.$", words), (place, text)
        assert not OTHER_NAMES.keys() & {*re.findall(r"\w+", words.lower())}, (place, text)
