"""Functions of one breath, modules one can hold in mind: code lines, counted.

Over budget means that a name is missing. Whoever has a better answer writes it down here.
"""

from __future__ import annotations

import ast
from pathlib import Path

from docs.generate.size import lines_of_code

ROOT = Path(__file__).parents[1] / "src" / "gradwire"
MOST_IN_A_FUNCTION = 40
MOST_IN_A_MODULE = 350

LARGE_FUNCTIONS: dict[str, str] = {}  # "path:function": the reason
LARGE_MODULES: dict[str, str] = {  # "path": the reason
    "agent/links/readers.py": "readers, waits inside of them and the watchdog share their steps",
    "transport/sockets/channel.py": "a read may run inside a read: its steps must be seen together",
}


def module_sizes() -> dict[str, int]:
    return {
        path.relative_to(ROOT).as_posix(): len(lines_of_code(path.read_text(encoding="utf-8")))
        for path in ROOT.rglob("*.py")
    }


def function_sizes() -> dict[str, int]:
    """The code lines of every function, those of functions inside it included."""
    sizes = {}
    for path in ROOT.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        code = lines_of_code(source)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{path.relative_to(ROOT).as_posix()}:{node.name}"
                size = len(code & set(range(node.lineno, node.end_lineno + 1)))
                sizes[name] = max(size, sizes.get(name, 0))
    return sizes


def over(sizes: dict[str, int], most: int) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size > most}


def test_lines_of_code_are_those_that_do_something():
    source = '"""A module."""\n\n# a comment\nx = (\n    1,  # one\n)\n"""about x"""\n'

    assert lines_of_code(source) == {4, 5, 6}


def test_no_function_is_longer_than_one_breath():
    assert over(function_sizes(), MOST_IN_A_FUNCTION).keys() == LARGE_FUNCTIONS.keys()


def test_no_module_is_more_than_one_can_hold_in_mind():
    assert over(module_sizes(), MOST_IN_A_MODULE).keys() == LARGE_MODULES.keys()


def test_functions_are_small_on_the_whole():
    sizes = sorted(function_sizes().values())

    assert sizes[len(sizes) // 2] <= 8
    assert sizes[len(sizes) * 9 // 10] <= 25
