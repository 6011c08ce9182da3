"""The choices of a strategy as words of a command line, to search among and to show."""

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stepcast.questions.numbers import MOST_LAYERS, MOST_SEQUENCES, count, gpu_count
from stepcast.questions.question import PRECISIONS, SCHEDULES
from stepcast.views.search import row_words as row_words

if TYPE_CHECKING:
    from stepcast.ir.strategy import Strategy

SHARDINGS = ("none", "zero-1", "zero-2", "zero-3", "fsdp")
RECOMPUTES = ("none", "selective", "full")
OVERLAPPING = ("usual", "none", "tensor", "experts")
MOST_GPU_COUNTS = 64


def _one_of(words: Sequence[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(words)}, not {text!r}")
        return text

    return read


def _schedule(text: str) -> Any:
    from stepcast.ir.schedules import ScheduleKind

    return ScheduleKind(_one_of(SCHEDULES)(text))


def _sharding(text: str) -> Any:
    from stepcast.ir.strategy import Sharding

    return Sharding(_one_of(SHARDINGS)(text))


def _precision(text: str) -> Any:
    from stepcast.ir.dtype import DType

    return DType(_one_of(PRECISIONS)(text))


# Choice -> what one value of it is.
GIVEN: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("tp", "cp", "ep", "expert-tp", "pp"), gpu_count),
    "vpp": count(1, MOST_LAYERS),
    "micro-batch": count(1, MOST_SEQUENCES),
    "schedule": _schedule,
    "recompute": _one_of(RECOMPUTES),
    "sharding": _sharding,
    "sequence-parallel": lambda text: _one_of(("yes", "no"))(text) == "yes",
    "precision": _precision,
    "overlap": _one_of(OVERLAPPING),
}


def allowed(fixed: Sequence[str], several: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Values by choice, of ``--fix NAME=VALUE`` and ``--allow NAME=A,B``."""
    found: dict[str, tuple[Any, ...]] = {}
    for option, texts in (("--fix", fixed), ("--allow", several)):
        for text in texts:
            name, equals, words = text.partition("=")
            if name not in GIVEN or not equals:
                raise ValueError(f"{option} {text!r}: expected a value of {', '.join(GIVEN)}, such as tp=8")
            values = words.split(",")
            if option == "--fix" and len(values) > 1:
                raise ValueError(f"--fix {text!r}: that are several values; give --allow {text}")
            key = name.replace("-", "_")
            if key in found:
                raise ValueError(f"{option} {text!r}: {name} is given twice")
            try:
                found[key] = tuple(dict.fromkeys(GIVEN[name](value) for value in values))
            except argparse.ArgumentTypeError as error:
                raise ValueError(f"{option} {text!r}: {error}") from None
    return found


def gpu_counts(text: str) -> tuple[int, ...]:
    """``64``, ``64,96``, or ``64..512``, which doubles; as an argparse type."""
    first, dots, last = text.partition("..")
    if not dots:
        return tuple(sorted({gpu_count(each) for each in text.split(",")}))
    low, high = gpu_count(first), gpu_count(last)
    if high < low:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins; give {high}..{low}")
    return tuple(low * 2**power for power in range(MOST_GPU_COUNTS) if low * 2**power <= high)


def all_words(strategy: "Strategy") -> dict[str, Any]:
    """With what else a search decides: what overlaps, and layers that are split unevenly."""
    from stepcast.frameworks.words import overlap_words

    return {
        **row_words(strategy),
        "overlap": ",".join(overlap_words(strategy.overlap)) or "none",
        "stage_layers": ",".join(map(str, strategy.stage_layers)),
    }
