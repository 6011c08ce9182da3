"""Where the shared reference material lies, for tests that need it."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
DATA = SHARED / "data"

needs_shared = pytest.mark.skipif(
    not DATA.is_dir(), reason="needs the measurement folder ../shared/data, which is not beside this checkout"
)
