"""What the source says beside its code: docstrings, the words under a field, tables."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterable, Mapping, Sequence


def field_words(cls: type) -> Mapping[str, str]:
    """The string that follows each field of a class, for those that have one."""
    body = _body_of(cls)
    return {
        field.target.id: " ".join(words.value.value.split())
        for field, words in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(words, ast.Expr) and isinstance(words.value, ast.Constant)
        if isinstance(words.value.value, str)
    }


def field_types(cls: type) -> Mapping[str, str]:
    """The annotation of each field as it is written, the fields of its bases first."""
    return {
        statement.target.id: ast.unparse(statement.annotation)
        for heir in reversed(cls.__mro__)
        if heir.__module__.startswith("gradwire")
        for statement in _body_of(heir)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def markdown(thing: object) -> str:
    """A docstring as markdown: its examples become blocks of code."""
    paragraphs = (inspect.getdoc(thing) or "").split("\n\n")
    return "\n\n".join(
        f"```pycon\n{paragraph}\n```" if paragraph.startswith(">>>") else paragraph
        for paragraph in paragraphs
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _body_of(cls: type) -> list[ast.stmt]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    return definition.body
