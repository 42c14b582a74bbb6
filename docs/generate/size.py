"""How many lines of code there are, as the README says it.

Code lines: those that hold code, not counting blank lines, comments and docstrings. The README's
number is rounded to a hundred, so that it changes when the size does and not with every commit.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_MARKED = re.compile(r"(<!-- size -->).*?(<!-- /size -->)")


def in_text(text: str, package: Path) -> str:
    """The text with the package's size between its marks."""
    hundreds = round(lines_of(package) / 100)
    return _MARKED.sub(rf"\g<1>{hundreds * 100}\g<2>", text)


def lines_of(package: Path) -> int:
    """The code lines of all modules of a package."""
    return sum(code_lines(path.read_text(encoding="utf-8")) for path in package.rglob("*.py"))


def code_lines(source: str) -> int:
    """The code lines of one module."""
    return len(lines_of_code(source))


def lines_of_code(source: str) -> set[int]:
    """The numbers of the lines that are not blank, comment or docstring."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return code - _docstring_lines(source)


def _docstring_lines(source: str) -> set[int]:
    """Lines of strings that stand alone: docstrings, of attributes too."""
    return {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
