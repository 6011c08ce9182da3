"""The page docs/accuracy.md has a place for every figure that ``tools/check_accuracy.py`` compares."""

import importlib.util
import re
from typing import Any

from tests.shared import ROOT

spec = importlib.util.spec_from_file_location("check_accuracy", ROOT / "tools" / "check_accuracy.py")
assert spec is not None
assert spec.loader is not None
check_accuracy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_accuracy)

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
            for name in ("peak memory, nothing fitted", "peak memory, overhead fitted to such rows")
            for kind in ("mean_abs_error", "median_abs_error")
        },
    },
    "h200": {
        "selections": dict.fromkeys(CHOSEN, ONE),
        "figures": {"peak memory: mean_abs_error": 0.1234, "peak memory: worst_abs_error": 0.1234},
    },
    "transformers": {"selections": {"step": ONE}, "figures": {"peak memory: mean_abs_error": 0.1234}},
}


def test_the_page_has_a_phrase_for_every_claim() -> None:
    page = " ".join((ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8").split())
    for claim in check_accuracy.claims(SETS):
        pattern = re.sub(r"\d+(\\\.\d+)?", r"\\d+(\\.\\d+)?", re.escape(claim))
        pattern = pattern.replace("too\\ fast", "too\\ (fast|slow)")
        assert re.search(pattern, page), claim


def test_wrong_figures_are_reported() -> None:
    wrong = check_accuracy.find_missing(SETS, (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8"))
    assert wrong == list(check_accuracy.claims(SETS))
