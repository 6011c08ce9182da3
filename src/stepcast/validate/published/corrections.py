"""Where the source of a published run contradicts itself, or says elsewhere what its row leaves out.

``data/corrections/training_runs.toml`` lists such places as data. Each correction names a source, the rows
(by id, or by what other columns hold), the values as published and corrected, and its reason: arithmetic, or
where the source says so. A row that does not hold the published value is left as it is.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

Record = Mapping[str, str | None]
CORRECTED = "corrected"  # the column that tells what was changed, and why
LEFT_OUT = "left out"  # the status of a row that contradicts its source and cannot be put right


class CorrectionError(ValueError):
    """A list of corrections that says too little."""


@dataclass(frozen=True, slots=True)
class Change:
    column: str
    published: str
    corrected: str

    def __str__(self) -> str:
        return f"{self.column} {self.published or 'blank'} -> {self.corrected or 'blank'}"


@dataclass(frozen=True, slots=True)
class Correction:
    """Of the rows whose source starts with *source*: those of *rows*, or all for which *when* holds."""

    source: str
    rows: tuple[str, ...]
    when: tuple[tuple[str, str], ...]
    changes: tuple[Change, ...]
    reason: str

    def concerns(self, record: Record) -> bool:
        if not (record.get("source") or "").startswith(self.source):
            return False
        if self.rows and record.get("id") not in self.rows:
            return False
        return all(_same(record.get(column), value) for column, value in self.when)


def corrected(records: Iterable[Record], known: Iterable[Correction]) -> Iterator[Record]:
    """*records* with what is *known* to be wrong put right, and told in the column ``corrected``."""
    known = tuple(known)
    for record in records:
        told: list[str] = []
        for each in known:
            if not each.concerns(record):
                continue
            made = [one for one in each.changes if _same(record.get(one.column), one.published)]
            if made:
                told.append(f"{', '.join(map(str, made))}: {each.reason}")
                record = {**record, **{one.column: one.corrected for one in made}}
        yield {**record, CORRECTED: "; ".join(told)} if told else record


@lru_cache(maxsize=1)
def corrections() -> tuple[Correction, ...]:
    """Those that ship with the package."""
    return parse(
        files("stepcast").joinpath("data/corrections/training_runs.toml").read_text(encoding="utf-8")
    )


def parse(text: str) -> tuple[Correction, ...]:
    return tuple(_correction(entry) for entry in tomllib.loads(text).get("correction", ()))


def _correction(entry: Mapping[str, object]) -> Correction:
    for needed in ("source", "change", "reason"):
        if not entry.get(needed):
            raise CorrectionError(f"a correction of {entry.get('source', '?')!r} has no {needed}")
    rows, when, change = entry.get("rows", []), entry.get("when", {}), entry["change"]
    if not (rows or when):
        raise CorrectionError(
            f"a correction of {entry['source']!r} needs rows or when: which rows it is about"
        )
    assert isinstance(rows, list)
    assert isinstance(when, dict)
    assert isinstance(change, dict)
    for column, pair in change.items():
        if not (isinstance(pair, list) and len(pair) == 2):
            raise CorrectionError(f"{entry['source']!r}: {column} needs two values, published and corrected")
    return Correction(
        source=str(entry["source"]),
        rows=tuple(map(str, rows)),
        when=tuple((str(column), str(value)) for column, value in when.items()),
        changes=tuple(Change(str(column), str(old), str(new)) for column, (old, new) in change.items()),
        reason=" ".join(str(entry["reason"]).split()),
    )


def _same(held: str | None, stated: str) -> bool:
    """256 and 256.0 are the same."""
    held = (held or "").strip()
    try:
        return float(held) == float(stated)
    except ValueError:
        return held == stated
