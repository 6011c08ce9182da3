"""The README's table has a place for every figure that ``tools/check_readme.py`` compares."""

import importlib.util
import re
from typing import Any

from tests.shared import ROOT

spec = importlib.util.spec_from_file_location("check_readme", ROOT / "tools" / "check_readme.py")
assert spec is not None
assert spec.loader is not None
check_readme = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_readme)

ONE = {"rows": 7777, "mean_abs_error": 0.1234, "median_abs_error": 0.1234, "worst_abs_error": 0.1234}
CHOSEN = ("matmul, every kind", "linear bf16", "attention", "memory-bound", "memory-bound over 20 us", "training steps")
SETS: dict[str, Any] = {
    "published": {
        **ONE,
        "rows": 7777,
        "mean_error": -0.1234,
        "coverage": 0.12,
        "figures": {
            f"{name}: {kind}": 0.1234
            for name in ("with --residual", "peak memory, nothing fitted", "peak memory, overhead fitted to such rows")
            for kind in ("mean_abs_error", "median_abs_error")
        },
    },
    "h200": {
        "selections": dict.fromkeys(CHOSEN, ONE),
        "figures": {"peak memory: mean_abs_error": 0.1234, "peak memory: worst_abs_error": 0.1234},
    },
    "transformers": {"selections": {"step": ONE}, "figures": {"peak memory: mean_abs_error": 0.1234}},
}


def test_every_claim_stands_in_the_readme_whatever_its_figures() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for claim in check_readme.claims(SETS):
        pattern = re.sub(r"\d+(\\\.\d+)?", r"\\d+(\\.\\d+)?", re.escape(claim))
        pattern = pattern.replace("too\\ fast", "too\\ (fast|slow)")
        assert re.search(pattern, readme), claim


def test_a_figure_that_is_not_so_is_found() -> None:
    wrong = check_readme.missing(SETS, (ROOT / "README.md").read_text(encoding="utf-8"))
    assert wrong == list(check_readme.claims(SETS))
