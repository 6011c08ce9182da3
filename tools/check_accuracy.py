"""Compare the figures of docs/accuracy.md with what ``stepcast validate`` prints for the sets that ship.

    python tools/check_accuracy.py               # runs validate, some minutes
    python tools/check_accuracy.py ANSWER.json   # output of ``stepcast validate --set ... --json``

The exit status is 1 if the page differs, and the correct phrases are printed.
"""

import contextlib
import io
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SHIPPED = ("published", "h200", "transformers")
PAGE = Path(__file__).parents[1] / "docs" / "accuracy.md"
Facts = Mapping[str, Any]


def percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def claims(sets: Mapping[str, Facts]) -> Iterator[str]:
    """Yield the phrases that the page must contain for the results of *sets*."""
    if "published" in sets:
        result = sets["published"]
        figures, error = result["figures"], result["mean_error"]
        yield f"{result['rows']} published training runs"
        yield (
            f"{percent(result['mean_abs_error'])}, median {percent(result['median_abs_error'])}; "
            f"{percent(abs(error))} too {'fast' if error < 0 else 'slow'} on average; "
            f"{result['coverage'] * 100:.0f} % inside the 90 % interval"
        )
        unfitted, fitted = "peak memory, nothing fitted:", "peak memory, overhead fitted to such rows:"
        yield (
            f"{percent(figures[f'{unfitted} mean_abs_error'])} "
            f"(median {percent(figures[f'{unfitted} median_abs_error'])}) for"
        )
        yield f"of which nothing was fitted; {percent(figures[f'{fitted} mean_abs_error'])} for"
    if "h200" in sets:
        chosen, figures = sets["h200"]["selections"], sets["h200"]["figures"]
        mean = {name: percent(one["mean_abs_error"]) for name, one in chosen.items()}
        linear = mean["linear bf16"]
        yield f"matmul of every kind and format {mean['matmul, every kind']} (bf16 linear layers {linear})"
        yield f"attention {mean['attention']}, memory-bound {mean['memory-bound']}"
        yield f"(over 20 us {mean['memory-bound over 20 us']})"
        worst = percent(chosen["training steps"]["worst_abs_error"])
        yield (
            f"{mean['training steps']}, worst {worst}; their peak memory "
            f"{percent(figures['peak memory: mean_abs_error'])}, worst "
            f"{percent(figures['peak memory: worst_abs_error'])}"
        )
    if "transformers" in sets:
        result = sets["transformers"]
        step = result["selections"]["step"]
        yield (
            f"{percent(step['mean_abs_error'])}, median {percent(step['median_abs_error'])}, "
            f"worst {percent(step['worst_abs_error'])} ({step['rows']} rows;"
        )
        yield f"their peak memory {percent(result['figures']['peak memory: mean_abs_error'])} |"


def find_missing(sets: Mapping[str, Facts], page: str) -> list[str]:
    """Return the phrases that *page* should contain and does not."""
    text = " ".join(page.split())
    return [claim for claim in claims(sets) if claim not in text]


def run_validate() -> Mapping[str, Facts]:
    from stepcast.cli.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(["validate", *(word for name in SHIPPED for word in ("--set", name)), "--json"])
    if status:
        raise SystemExit(f"stepcast validate ended with {status}")
    return json.loads(out.getvalue())["sets"]  # type: ignore[no-any-return]


if __name__ == "__main__":
    answer = json.loads(Path(sys.argv[1]).read_text())["sets"] if len(sys.argv) > 1 else run_validate()
    wrong = find_missing(answer, PAGE.read_text(encoding="utf-8"))
    for claim in wrong:
        print(f"the page should say: {claim}")
    count = len(list(claims(answer)))
    print(f"{count - len(wrong)} of {count} claims are what validate prints")
    raise SystemExit(1 if wrong else 0)
