"""Find the measurements of ``../shared/data``, which are not part of the repository, and skip tests without them.

Each test names the folders that it reads: where only some are present, the others' tests are skipped. Tests that look
at the code of the package share its syntax trees.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"


def needs_data(*folders: str) -> pytest.MarkDecorator:
    """Skip a test if ``../shared/data`` or one of its *folders* does not exist."""
    missing = [folder for folder in folders if not (DATA / folder).is_dir()]
    reason = f"needs the measurements in ../shared/data/{', '.join(missing)}"
    if not DATA.is_dir():
        reason = "needs the measurements in ../shared/data, which is not part of the repository"
    return pytest.mark.skipif(bool(missing) or not DATA.is_dir(), reason=reason)


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return the nodes of the syntax tree of a Python file; its module is the first."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
