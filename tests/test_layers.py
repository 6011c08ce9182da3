"""The import rule: a module imports only what stands to its left. And: only the edges touch the world.

Files are written in one place, ``outputs/files.py``, which leaves none half written.
"""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.shared import nodes_of
from tools.mutants import AREAS

PACKAGE = Path(__file__).parents[1] / "src" / "stepcast"

MAY_IMPORT: dict[str, set[str]] = {
    "units": set(),
    "ir": {"units"},
    "hardware": {"units", "ir", "inputs"},
    "inputs": {"units", "ir"},
    "outputs": {"units", "ir", "hardware", "inputs", "simulation"},
    "models": {"units", "ir", "inputs"},
    "generate": {"units", "ir"},
    "cost": {"units", "ir", "hardware"},
    "frameworks": {"units", "ir", "hardware", "inputs"},
    "goodput": {"units", "ir", "hardware", "inputs", "views"},
    "pytorch": {"units", "ir", "hardware", "inputs", "outputs", "cost"},
    "simulation": {"units", "ir"},
    "analyze": {"units", "ir", "hardware", "cost", "simulation", "views"},
    "views": {"units", "ir"},
    "serve": {"units", "ir", "hardware", "frameworks", "goodput", "models", "questions", "views"},
    "calibrate": {"units", "ir", "hardware", "models", "generate", "cost", "analyze", "pytorch"},
    "forecast": {"units", "ir", "hardware", "outputs", "generate", "cost", "simulation", "views"},
    "generation": {"units", "ir", "hardware", "inputs", "cost", "views"},
    "searching": {"units", "ir", "hardware", "generate", "cost", "forecast", "goodput", "views"},
    "questions": {
        "units",
        "ir",
        "hardware",
        "inputs",
        "models",
        "frameworks",
        "cost",
        "forecast",
        "generation",
        "goodput",
        "searching",
        "outputs",
        "views",
    },
    "rl": {"units", "ir", "hardware", "inputs", "cost", "forecast", "generation", "questions", "views"},
    "sweep": {"units", "ir", "inputs", "outputs"},
    "optimus": {"units", "ir", "hardware", "inputs", "models", "cost", "simulation", "analyze", "views"},
    "validate": {
        "units",
        "ir",
        "hardware",
        "frameworks",
        "inputs",
        "models",
        "generate",
        "cost",
        "simulation",
        "analyze",
        "forecast",
        "generation",
        "questions",
        "rl",
        "optimus",
        "pytorch",
    },
    "checking": {"units", "ir", "inputs", "forecast", "questions", "pytorch"},
    "keywords": {"questions", "rl"},
    # cli, library, __init__ and __main__ may import everything
}
FREE = ("cli", "library", "__init__", "__main__", "version")
# Who may open files: the edges of the program.
MAY_OPEN = ("inputs", "outputs", "models", "validate", "cli")
MAY_OPEN_FILES = (
    "__init__.py",
    "hardware/catalog.py",
    "ir/layers/lists.py",
    "ir/tables.py",
    "frameworks/catalog.py",
    "generation/engine.py",
    "generation/lengths.py",
    "simulation/kernels.py",
    "views/declared.py",
    "views/document.py",
    "views/markup.py",
    "views/view.py",
    "serve/app.py",
)
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


PACKAGES = sorted({part_of(path) for path in FILES})
each_package = pytest.mark.parametrize("package", PACKAGES)


def files_of(package: str) -> list[tuple[Path, str]]:
    """Paths and names of the files of *package*, hundreds in all: a test for each would take longer to report than to run."""
    return [(path, path.relative_to(PACKAGE).as_posix()) for path in FILES if part_of(path) == package]


def modules_of(path: Path) -> set[str]:
    """The modules that the file at *path* imports, up to the first dot."""
    names = {alias.name for node in nodes_of(path) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes_of(path) if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


def imported_parts(path: Path) -> set[str]:
    """Top-level parts of our package that the file at *path* imports."""
    parts = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: use absolute imports"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        parts |= {name.split(".")[1] for name in names if name.startswith("stepcast.")}
    return parts


def called_names(path: Path) -> set[str]:
    """Plain names and methods that the file at *path* calls."""
    calls = [node.func for node in nodes_of(path) if isinstance(node, ast.Call)]
    return {call.id for call in calls if isinstance(call, ast.Name)} | {
        f".{call.attr}" for call in calls if isinstance(call, ast.Attribute)
    }


@each_package
def test_every_import_points_left(package: str) -> None:
    if package in FREE:
        return
    for path, name in files_of(package):
        extra = imported_parts(path) - MAY_IMPORT[package] - {package, "version"}
        assert not extra, f"{name} imports {sorted(extra)}"


@each_package
def test_only_the_edges_print_or_open_files(package: str) -> None:
    for path, name in files_of(package):
        calls = called_names(path)
        assert package == "cli" or "print" not in calls, f"{name}: only cli/ prints"
        if package not in MAY_OPEN and name not in MAY_OPEN_FILES:
            assert not calls & {"open", ".read_text", ".read_bytes", ".write_text", ".write_bytes"}, name


@each_package
def test_only_the_package_for_pytorch_imports_it(package: str) -> None:
    for path, name in files_of(package):
        assert package == "pytorch" or "torch" not in modules_of(path), name


# Calls that write, create or move files, whatever they are given.
WRITES = {"write_text", "write_bytes", "touch", "rename", "savetxt", "savez", "tofile", "to_csv", "fdopen"}
WRITES |= {"mkstemp", "NamedTemporaryFile", "copyfile", "unlink"}
READ_MODE = re.compile("[rbt]*|utf-8")


def writing_calls(nodes: Iterable[ast.AST]) -> list[str]:
    """Calls among *nodes* that write files; opening one in a mode that is not plain to see counts too."""
    found = []
    for node in nodes:
        last = getattr(getattr(node, "func", None), "attr", getattr(getattr(node, "func", None), "id", ""))
        if not isinstance(node, ast.Call) or last not in {"open", "replace", *WRITES}:
            continue
        name = ast.unparse(node.func)
        of_path = last == "open" and name not in ("open", "io.open", "os.open", "gzip.open")
        given = [*node.args[not of_path :], *(word.value for word in node.keywords)]
        plain = all(isinstance(each, ast.Constant) and READ_MODE.fullmatch(str(each.value)) for each in given)
        to_nowhere = bool(node.args) and ast.unparse(node.args[0]) == "os.devnull"
        if (last == "open" and not plain and not to_nowhere) or last in WRITES or name == "os.replace":
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@each_package
def test_files_are_written_in_one_place(package: str) -> None:
    for path, name in files_of(package):
        calls = writing_calls(nodes_of(path))
        assert bool(calls) == (name in ("outputs/files.py", "simulation/kernels.py")), (
            f"{name} {calls}: write through stepcast.outputs.files, which leaves no file half written"
        )


@pytest.mark.parametrize(
    "text",
    ['open(p, "w")', 'open(p, mode="ab")', "open(p, mode)", 'p.open("x")', 'gzip.open(p, "wt")', "p.write_text(t)", "os.replace(a, b)", "np.savez(p)"],
)  # fmt: skip
def test_a_call_that_writes_is_seen(text: str) -> None:
    assert writing_calls(ast.walk(ast.parse(text)))


@pytest.mark.parametrize("text", ["open(p)", 'open(p, "rb")', 'p.open(encoding="utf-8")', "open(os.devnull, m)"])
def test_a_call_that_reads_is_none(text: str) -> None:
    assert not writing_calls(ast.walk(ast.parse(text)))


# What could run a file, or send it away; pytorch joins its own processes by a socket.
RUNS_OR_SENDS = {"pickle", "marshal", "shelve", "subprocess", "ctypes", "urllib", "http", "ssl", "requests", "runpy"}


# record starts the job that a user names, and capture runs the script of one; the ``__init__`` of our own classes is compiled from the names of their
# fields, as the standard library does it. The engine calls object code that numba compiled from its own functions, and has it linked.
NEEDED = {"cli/record.py": "subprocess", "ir/types.py": "exec", "pytorch/capture/script.py": "runpy"}
NEEDED |= {"simulation/kernels.py": "ctypes subprocess"}


@each_package
def test_nothing_runs_what_it_reads_or_sends_it_away(package: str) -> None:
    for path, name in files_of(package):
        forbidden = RUNS_OR_SENDS | (set() if package == "pytorch" else {"socket"})
        forbidden -= set(NEEDED.get(name, "").split())
        assert not forbidden & modules_of(path), name
        called = {"eval", "exec", "__import__", ".system", ".popen"} - {NEEDED.get(name, "")}
        assert not called & called_names(path), name


def test_the_architecture_page_lists_the_same_packages() -> None:
    page = (PACKAGE.parents[1] / "docs" / "architecture.md").read_text()
    told = dict(re.findall(r"^\| `(\w+)` \| [^|]* \|(.*)\|$", page, re.MULTILINE))
    assert {told.pop(package).strip() for package in ("cli", "library")} == {"everything"}
    assert {package: set(words.replace(",", " ").split()) for package, words in told.items()} == MAY_IMPORT
    assert set(told) | {"cli", "library", "data", "version"} == {
        path.stem
        for path in PACKAGE.iterdir()
        if path.stem[0] != "_" and (path.suffix == ".py" or path.name == "data" or any(path.glob("*.py")))
    }


def imported_modules(path: Path, names: set[str]) -> set[str]:
    """Modules of the package that the file at *path* imports, anywhere in it and also for types alone."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in names else str(node.module))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & names


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_modules_import_each_other_in_a_circle() -> None:
    paths = {module_name(path): path for path in FILES}
    imports = {name: imported_modules(path, set(paths)) - {name} for name, path in paths.items()}
    while True:
        leaves = {name for name, others in imports.items() if not others}
        if not leaves:
            break
        imports = {name: others - leaves for name, others in imports.items() if name not in leaves}
    assert not imports, f"import each other, or modules that do: {sorted(imports)}"


def test_class_names_are_unique() -> None:
    """One name means one thing, also for classes that are private to a module."""
    places: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = nodes_of(path)[0]
        assert isinstance(module, ast.Module)
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_planted_bugs_are_drawn_from_files_that_are_there() -> None:
    """A module that is renamed or joined to another takes its entry in tools/mutants.py with it."""
    for files, tests in AREAS.values():
        missing = [name for name in files if not (PACKAGE / name).is_file()]
        missing += [name for name in tests if not (PACKAGE.parents[1] / name).exists()]
        assert missing == []


def test_a_module_has_at_most_600_lines() -> None:
    long = {path.name: lines for path in PACKAGE.rglob("*.py") if (lines := len(path.read_text().splitlines())) > 600}
    assert not long
