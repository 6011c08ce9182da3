"""Files that the gate writes: a history of runs in one SQLite file, Markdown for a pull request, and JUnit XML."""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from xml.sax.saxutils import escape, quoteattr

import msgspec

from stepcast.inputs.source import prefix_errors
from stepcast.ir.types import Facts
from stepcast.units import format_seconds

APPLICATION, VERSION = 0x53744761, 1  # "StGa"
WAIT_S = 30.0  # for another gate that writes
MOST_PARTS = 8
MARKS = {"regression": ":x:", "suspected": ":warning:", "improved": ":rocket:"}  # emoji codes of GitHub and GitLab


@contextmanager
def open_history(path: str) -> Iterator[sqlite3.Connection]:
    """Open the history at *path*, with a lock that keeps other gates out until it is closed."""
    explain = partial(prefix_errors, f"{path}: cannot be used as a history", kinds=(sqlite3.Error,))
    with explain():
        base = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None)
    with closing(base), explain():
        tables = base.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables and base.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
            raise ValueError(f"{path}: is not a history of the gate; use another file")
        base.execute("BEGIN IMMEDIATE")
        base.execute(f"PRAGMA application_id = {APPLICATION}")
        base.execute(f"PRAGMA user_version = {VERSION}")
        columns = "name TEXT, number INTEGER, at REAL, run TEXT, PRIMARY KEY (name, number)"
        base.execute(f"CREATE TABLE IF NOT EXISTS runs ({columns})")
        yield base


def read_runs(base: sqlite3.Connection, name: str) -> list[bytes]:
    """Return the runs of one name as JSON, the oldest first."""
    return [run for (run,) in base.execute("SELECT run FROM runs WHERE name = ? ORDER BY number", (name,))]


def add_runs(base: sqlite3.Connection, name: str, first: int, runs: Sequence[object]) -> None:
    """Add *runs*, numbered from *first*, and commit."""
    rows = [(name, number, time.time(), msgspec.json.encode(run).decode()) for number, run in enumerate(runs, first)]
    base.executemany("INSERT INTO runs VALUES (?, ?, ?, ?)", rows)
    base.execute("COMMIT")


def write_markdown(facts: Facts, rows: Sequence[tuple[str, Sequence[str]]]) -> bytes:
    """Return the verdict and its largest parts for a comment; *rows* are measures and their texts."""
    mark = MARKS.get(facts["status"], ":x:" if facts["failed"] else ":white_check_mark:")
    lines = [f"### {mark} {_plain(facts['name'])}: {facts['status']}", "", _plain(facts["verdict"]), ""]
    lines += ["| measure | run | baseline | change | noise |", "|---|---:|---:|---:|---:|"]
    lines += [f"| {_plain(name)} | {' | '.join(texts)} |" for name, texts in rows[:MOST_PARTS]]
    recent = " -> ".join(format_seconds(run["step_s"]) for run in facts["trend"][-6:])
    lines += ["", f"Run {facts['run']}, baseline of {facts['baseline_runs']} runs. Last steps: {recent}"]
    lines += ["", *(f"- Warning: {_plain(text)}" for text in facts["warnings"]), ""]
    return "\n".join(lines).encode()


def _plain(text: str) -> str:
    """Return text that Markdown shows as it is, in one line."""
    return "".join(f"\\{letter}" if letter in r"\`*_{}[]<>#|" else letter for letter in " ".join(text.split()))


def write_junit(facts: Facts) -> bytes:
    """Return one test case for each gated measure, as CI systems show them."""
    cases: list[tuple[str, str]] = [
        (row["name"], facts["verdict"] if row["status"] == facts["status"] == "regression" else "")
        for row in facts["measures"]
        if row["name"] in ("step", "peak memory")
    ]
    if facts["forecast"]:
        cases.append(("forecast", facts["verdict"] if facts["forecast"]["slower"] else ""))
    failures = sum(bool(message) for _, message in cases)
    suite = quoteattr(f"stepcast gate {_printable(facts['name'])}")
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<testsuite name={suite} tests="{len(cases)}" failures="{failures}">',
    ]
    for name, message in cases:
        failure = f"<failure message={quoteattr(_printable(message))}/>" if message else ""
        lines.append(f"  <testcase classname={suite} name={quoteattr(name)}>{failure}</testcase>")
    output = "; ".join([facts["verdict"], *(f"warning: {text}" for text in facts["warnings"])])
    lines += [f"  <system-out>{escape(_printable(output))}</system-out>", "</testsuite>", ""]
    return "\n".join(lines).encode()


def _printable(text: str) -> str:
    """Return text without the characters that XML forbids."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
