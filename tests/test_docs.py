"""The pages say what the code does: generated ones match it, links lead somewhere, examples run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import gradwire
import gradwire.testing
from docs.generate import architecture, size, wire
from docs.generate.pages import PAGES
from gradwire.wire.message import kind_of

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "gradwire"
PAGES_TO_READ = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


# -- generated pages


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path.name)
def test_a_generated_page_matches_the_code(page):
    assert page.current() == page.text(), "run `make docs`"


def test_the_wire_page_names_every_kind_of_message_once():
    kinds = [kind_of(cls) for cls in wire.message_types()]

    assert len(set(kinds)) == len(kinds) > 0
    text = (ROOT / "docs" / "wire.md").read_text()
    assert re.findall(r"^### `(0x\w+)`", text, re.M) == [f"{kind:#04x}" for kind in kinds]


@pytest.mark.parametrize("module", [gradwire, gradwire.testing], ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_reference(module):
    entries = re.findall(r"^### (\w+)$", (ROOT / "docs" / "reference.md").read_text(), re.M)

    assert set(module.__all__) <= set(entries)


def test_code_lines_are_those_with_code():
    source = '"""A module."""\n\n# a comment\nx = (\n    1,  # one\n)\n"""about x"""\n'

    assert size.code_lines(source) == 3


def test_the_picture_of_the_architecture_shows_every_folder_and_no_import_that_points_up():
    rooms = architecture.rooms_of(SOURCE)

    folders = {path.parent for path in SOURCE.rglob("*.py") if path.name != "__init__.py"}
    assert len(rooms.order()) == len(folders)
    assert [pair for pair in rooms.imports if rooms.level(pair[0]) < rooms.level(pair[1])] == []


def test_layers_of_the_picture_stand_above_what_they_import(tmp_path):
    texts = {"a/one.py": "from p.b import two\nimport p.words", "b/two.py": "", "words.py": ""}
    for name, text in texts.items():
        path = tmp_path / "p" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    rooms = architecture.rooms_of(tmp_path / "p")

    shared = architecture.SHARED
    assert rooms.order().index("a") == 2
    assert rooms.imports == {("a", "b"), ("a", shared)}


# -- concepts


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "concepts").glob("*.md")), ids=named)
def test_a_concept_fits_on_a_page_with_a_picture(page):
    text = page.read_text()

    assert len(text.splitlines()) <= 120
    assert re.search(r"^```(mermaid)?\n", text, re.M), "it has no picture"
    assert f"(concepts/{page.name})" in (ROOT / "docs" / "architecture.md").read_text()


# -- links


@pytest.mark.parametrize("page", PAGES_TO_READ, ids=named)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    links = re.findall(r"\]\(([^)\s]+)\)", text)

    broken = [link for link in links if not is_there(page, link)]

    assert broken == []


def is_there(page: Path, link: str) -> bool:
    if link.startswith("https://"):
        return True
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists() or ROOT not in target.parents:
        return False
    return not anchor or anchor in anchors(target.read_text())


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


# -- the README


def snippet() -> str:
    return re.search(r"```python\n(import .*?)```", (ROOT / "README.md").read_text(), re.S)[1]


@pytest.mark.slow
@pytest.mark.processes
def test_the_program_of_the_readme_prints_what_it_says(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(snippet())
    expected = re.findall(r"^    print\(.*\)\s+# (.*)$", snippet(), re.M)

    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=100, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == expected
    assert len(expected) == 3


def test_the_program_of_the_readme_is_short():
    assert len(snippet().splitlines()) <= 25


# -- threads


def documented_threads() -> list[re.Pattern[str]]:
    names = re.findall(r"^\| `(gradwire .*?)`", (ROOT / "docs" / "threads.md").read_text(), re.M)
    return [re.compile(re.sub(r"<\w+>", r"\\S+", name)) for name in names]


def thread_names_in(source: str) -> set[str]:
    """The names that a module gives to threads, as far as they are written there."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            found.add(as_written(node))
        elif isinstance(node, ast.keyword) and node.arg == "name":
            found.add(as_written(node.value))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("._spawn"):
            found.add(f"gradwire w {as_written(node.args[0])}")
    spawned = "gradwire w"  # which Threads.spawn completes
    return {name for name in found if name.startswith("gradwire ")} - {spawned}


def as_written(node: ast.expr) -> str:
    """A string with every part that is filled in later as `w`."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if not isinstance(node, ast.JoinedStr):
        return "w"
    return "".join(part.value if isinstance(part, ast.Constant) else "w" for part in node.values)


def modules_of_workers() -> list[Path]:
    testing = SOURCE / "testing"  # threads of tests, not of workers
    return [path for path in sorted(SOURCE.rglob("*.py")) if not path.is_relative_to(testing)]


def test_every_module_that_starts_threads_is_on_the_page():
    starts = re.compile(r"threads\.thread\(|threading\.(Thread|Timer)\(")
    starters = [path for path in modules_of_workers() if starts.search(path.read_text())]

    page = (ROOT / "docs" / "threads.md").read_text()

    assert len(starters) > 3
    assert [path for path in starters if str(path.relative_to(SOURCE)) not in page] == []


def test_every_name_of_a_thread_in_the_source_is_on_the_page():
    names = {name for path in modules_of_workers() for name in thread_names_in(path.read_text())}
    of_pools = {name for name in names if name.endswith((" user", " service"))}
    names = names - of_pools | {f"{name} 0" for name in of_pools}  # the pool adds the number

    patterns = documented_threads()

    assert [name for name in names if not any(p.fullmatch(name) for p in patterns)] == []
    assert [p.pattern for p in patterns if not any(map(p.fullmatch, names))] == []


@pytest.mark.slow
def test_every_thread_of_working_workers_is_on_the_page():
    seen: set[str] = set()

    def work() -> None:
        x = torch.ones(3, requires_grad=True)
        ref = gradwire.remote("w1", torch.ones, args=(3,))
        y = gradwire.rpc_async("w1", torch.sin, args=(x,)).then(lambda future: future.wait())
        (y.wait() * ref.to_here()).sum().backward()
        seen.update(thread.name for thread in threading.enumerate())

    with gradwire.testing.cluster(2) as workers:
        workers[0].run(work)

    ours = {name for name in seen if name.startswith("gradwire ")}
    assert ours
    patterns = documented_threads()
    assert [name for name in ours if not any(p.fullmatch(name) for p in patterns)] == []
