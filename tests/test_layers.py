"""The import rule: a module imports only what stands to its left. And: only the edges touch the world."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "stepcast"

MAY_IMPORT: dict[str, set[str]] = {
    "units": set(),
    "ir": {"units"},
    "hardware": {"units", "ir"},
    "inputs": {"units", "ir"},
    "outputs": {"units", "ir", "hardware", "inputs", "simulation"},
    "models": {"units", "ir", "inputs"},
    "generate": {"units", "ir"},
    "cost": {"units", "ir", "hardware"},
    "frameworks": {"units", "ir", "hardware"},
    "pytorch": {"units", "ir", "hardware", "cost"},
    "simulation": {"units", "ir"},
    "analyze": {"units", "ir", "hardware", "cost", "simulation"},
    "report": {"units", "ir"},
    "calibrate": {"units", "ir", "hardware", "models", "generate", "cost", "analyze", "pytorch"},
    "forecast": {"units", "ir", "hardware", "generate", "cost", "simulation"},
    "optimus": {"units", "ir", "hardware", "inputs", "models", "cost", "simulation", "analyze"},
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
        "optimus",
    },
    # cli, __init__ and __main__ may import everything
}
FREE = ("cli", "__init__", "__main__")
# Who may open files: the edges of the program.
MAY_OPEN = ("inputs", "outputs", "models", "validate", "cli")
MAY_OPEN_FILES = ("hardware/catalog.py", "frameworks/catalog.py")
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_parts(path: Path) -> set[str]:
    """Top-level parts of our package that the file at *path* imports."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
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
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return {call.id for call in calls if isinstance(call, ast.Name)} | {
        f".{call.attr}" for call in calls if isinstance(call, ast.Attribute)
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_import_points_left(path: Path) -> None:
    part = part_of(path)
    if part not in FREE:
        extra = imported_parts(path) - MAY_IMPORT[part] - {part, "__version__"}
        assert not extra, f"{path.relative_to(PACKAGE)} imports {sorted(extra)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_edges_print_or_open_files(path: Path) -> None:
    calls = called_names(path)
    if part_of(path) != "cli":
        assert "print" not in calls, "only cli/ prints"
    name = path.relative_to(PACKAGE).as_posix()
    if part_of(path) not in MAY_OPEN and name not in MAY_OPEN_FILES:
        assert not calls & {"open", ".read_text", ".read_bytes", ".write_text", ".write_bytes"}, name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_room_for_pytorch_imports_it(path: Path) -> None:
    tree = ast.parse(path.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert part_of(path) == "pytorch" or "torch" not in {name.split(".")[0] for name in names}


def test_the_page_of_the_house_has_the_same_rooms() -> None:
    page = (PACKAGE.parents[1] / "docs" / "architecture.md").read_text()
    told = dict(re.findall(r"^\| `(\w+)` \| [^|]* \|(.*)\|$", page, re.MULTILINE))
    assert told.pop("cli").strip() == "everything"
    assert {room: set(words.replace(",", " ").split()) for room, words in told.items()} == MAY_IMPORT
    assert set(told) | {"cli", "data"} == {path.stem for path in PACKAGE.iterdir() if path.stem[0] != "_"} - {
        "py"
    }
