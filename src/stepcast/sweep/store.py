"""Sweeps: open points go to an engine in chunks, and each answered chunk to the store, ``results.sqlite``.

The key of ``answers`` is the digest of a point's resolved inputs and of the program, so that a changed
specification reuses the answers that are still valid. ``points`` has a row for each point of the current one.
"""

import contextlib
import hashlib
import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import msgspec

from stepcast.inputs.source import Source, read_toml
from stepcast.ir.limits import RESULT
from stepcast.ir.types import FactDict, dataclass, require
from stepcast.outputs.files import hold
from stepcast.sweep.engines import Answer, AnsweredChunk, ChunkPace, EngineSetting, PointChunk, load_engine
from stepcast.sweep.spec import Spec, Words
from stepcast.units import DEFAULT_CURRENCY, MIB

NAME = "results.sqlite"
LOCK = "driver.lock"
# "swep" as a number, which identifies our files.
APPLICATION = 0x73776570
VERSION = 4
# Columns of an answer; times in seconds, sizes in bytes.
COLUMNS = {
    **dict.fromkeys(("step_s", "low_s", "high_s", "tokens_per_s_per_gpu", "mfu", "bubble", "exposed"), "REAL"),
    "memory_bytes": "REAL",
    "fits": "INTEGER",
    **dict.fromkeys(("days", "gpu_hours", "cost", "goodput"), "REAL"),
    **dict.fromkeys(("found", "state", "error"), "TEXT"),  # state "out of time": the best so far, or nothing yet
}
RETRY = "retry"  # the state of an error that another run may not meet: a file or memory that was missing
BATCH = 1000
_WAIT_S = 30.0
# Limits of a condition that somebody wrote (--where): operations of the database (usual ones take some tens for each
# row, and a million rows two seconds), seconds, memory, and bytes of a text.
OPERATIONS, OPERATIONS_PER_ROW, LOOK_EVERY = 20_000_000, 1_000, 10_000
CONDITION_S, CONDITION_BYTES, LONGEST_TEXT = 15.0, 512 * MIB, 64 * 1024


class Store(contextlib.AbstractContextManager["Store"]):
    """Answers in a folder; with *writes* only this process adds to it until :meth:`close`."""

    def __init__(self, folder: str, writes: bool = False) -> None:
        self.path = os.path.join(folder, NAME)
        self._lock: int | None = None
        if writes:
            os.makedirs(folder, exist_ok=True)
            self._lock = hold(os.path.join(folder, LOCK))
            if self._lock is None:
                raise ValueError(f"{folder}: another sweep is writing there; wait for it, or use another folder")
        elif not os.path.exists(self.path):
            raise ValueError(f"{folder}: has no sweep; 'stepcast sweep SPEC.toml -o {folder}' starts one")
        try:
            with self._explain_errors():
                self._open(writes)
        except BaseException:
            self.close()
            raise

    def _open(self, writes: bool) -> None:
        name = "file:" + self.path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
        mode = "rwc" if writes else "ro"
        self.base = sqlite3.connect(f"{name}?mode={mode}", timeout=_WAIT_S, uri=True, isolation_level=None)
        application = self.base.execute("PRAGMA application_id").fetchone()[0]
        tables = [name for (name,) in self.base.execute("SELECT name FROM sqlite_master")]
        require(not tables or application == APPLICATION, f"{self.path}: is not the store of a sweep")
        if tables and self.base.execute("PRAGMA user_version").fetchone()[0] != VERSION:
            raise ValueError(f"{self.path}: was written by another version of stepcast; use another folder")
        if not writes and "points" not in tables:
            raise ValueError(f"{self.path}: the sweep ended before its first point; the same command starts it again")
        for table in ("points",) * ("points" in tables) + ("answers",) * bool(tables):
            for *values, checksum in self.base.execute(f"SELECT * FROM {table}"):
                if checksum != _checksum(values):  # not as it was written, e.g. on a damaged disk
                    raise sqlite3.DatabaseError(f"malformed row of {table}")
        if not writes:
            return
        identity = f"application_id = {APPLICATION}", f"user_version = {VERSION}"
        for setting in ("journal_mode = WAL", "synchronous = FULL", *identity):
            self.base.execute(f"PRAGMA {setting}")
        columns = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
        self.base.execute(
            f"CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, {columns}, checksum INTEGER) WITHOUT ROWID"
        )

    def close(self) -> None:
        if base := getattr(self, "base", None):
            with contextlib.suppress(sqlite3.Error):
                base.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Raise errors of the database as a ValueError that names its file and says what to do."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{self.path}: {_explain(' '.join(str(error).split()))}") from None

    def ask(self, names: Sequence[str], points: Iterable[tuple[int, bytes, Words]]) -> None:
        """Make *points* the current ones, all or none."""
        columns = "".join(', "' + name.replace('"', '""') + '"' for name in names)
        places = ", ".join("?" * (3 + len(names)))
        with self._transaction():
            self.base.execute("DROP VIEW IF EXISTS results")
            self.base.execute("DROP TABLE IF EXISTS points")
            self.base.execute(
                f"CREATE TABLE points (position INTEGER PRIMARY KEY, key BLOB{columns}, checksum INTEGER)"
            )
            rows = ((position, key, *(_plain(words.get(name)) for name in names)) for position, key, words in points)
            self.base.executemany(f"INSERT INTO points VALUES ({places})", map(_with_checksum, rows))
            self.base.execute("DELETE FROM answers WHERE state = ?", (RETRY,))
            answers = ", ".join(f"answers.{name}" for name in COLUMNS)
            self.base.execute(
                f"CREATE VIEW results AS SELECT position{columns}, {answers} FROM points JOIN answers USING (key)"
            )

    def add(self, chunk: AnsweredChunk) -> None:
        """Store the answers of a chunk, all or none."""
        places = ", ".join("?" * (2 + len(COLUMNS)))
        answers = zip(chunk.chunk.keys, chunk.answers, strict=True)
        rows = ((key, *(answer.get(name) for name in COLUMNS)) for key, answer in answers)
        with self._transaction():
            self.base.executemany(f"INSERT OR REPLACE INTO answers VALUES ({places})", map(_with_checksum, rows))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._explain_errors():
            self.base.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self.base.execute("ROLLBACK")
                raise
            self.base.execute("COMMIT")

    def open_points(self) -> Iterator[tuple[int, bytes]]:
        """Yield positions and keys of points without an answer, in order."""
        last = -1
        while True:
            with self._explain_errors():
                rows = self.base.execute(
                    "SELECT position, key FROM points WHERE position > ? AND NOT EXISTS "
                    "(SELECT 1 FROM answers WHERE answers.key = points.key) ORDER BY position LIMIT ?",
                    (last, BATCH),
                ).fetchall()
            if not rows:
                return
            yield from rows
            last = rows[-1][0]

    def rows(self, query: str, values: Sequence[object] = ()) -> list[FactDict]:
        """Return the rows of *query* over ``points``, ``answers`` and ``results``; it cannot change them."""
        with self._explain_errors():
            self.base.set_authorizer(_allow_reading)
            try:
                cursor = self.base.execute(query, values)
                names = [column[0] for column in cursor.description]
                return [dict(zip(names, row, strict=True)) for row in cursor]
            finally:
                self.base.set_authorizer(None)

    @contextlib.contextmanager
    def limit_queries(self) -> Iterator[None]:
        """Limit the time, the memory and the texts of queries with a condition that somebody wrote."""
        until = time.monotonic() + CONDITION_S
        left = (OPERATIONS + OPERATIONS_PER_ROW * self.counts()["points"]) // LOOK_EVERY

        def is_over() -> bool:
            nonlocal left
            left -= 1
            return left < 0 or time.monotonic() > until

        old_limit = self.base.getlimit(sqlite3.SQLITE_LIMIT_LENGTH)
        self.base.execute(f"PRAGMA hard_heap_limit = {CONDITION_BYTES}").fetchall()
        self.base.execute("PRAGMA temp_store = MEMORY")
        self.base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_TEXT)
        self.base.set_progress_handler(is_over, LOOK_EVERY)
        try:
            yield
        except MemoryError:
            raise ValueError(f"the condition needs more than {CONDITION_BYTES // MIB:,} MiB") from None
        except ValueError as error:
            if str(error).endswith("interrupted"):
                raise ValueError("the condition takes too long; use one that looks at each row alone") from None
            raise
        finally:
            self.base.set_progress_handler(None, 0)
            self.base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, old_limit)

    def columns(self) -> list[str]:
        """Return the columns of ``results``."""
        with self._explain_errors():
            return [column[0] for column in self.base.execute("SELECT * FROM results LIMIT 0").description]

    def counts(self) -> dict[str, int]:
        """Return the numbers of points, of answered ones, and of errors."""
        rows = self.rows(
            "SELECT (SELECT count(*) FROM points) AS points, count(*) AS answered, count(error) AS errors FROM results"
        )
        return {name: int(value) for name, value in rows[0].items()}


def _checksum(values: Sequence[object]) -> int:
    """Return a checksum that does not depend on how SQLite stores numbers: -0.0 as 0, no number as NULL."""
    plain = [float(value) + 0.0 if isinstance(value, int | float) else value for value in values]
    return zlib.crc32(repr([None if value != value else value for value in plain]).encode("utf-8", "surrogatepass"))


def _with_checksum(values: Sequence[object]) -> tuple[object, ...]:
    return (*values, _checksum(values))


def _plain(value: object) -> object:
    return " ".join(value) if isinstance(value, list) else int(value) if isinstance(value, bool) else value


_READS = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)
_FORBIDDEN = ("load_extension", "readfile", "writefile", "edit", "zeroblob", "randomblob")


def _allow_reading(action: int, first: str | None, second: str | None, *_: object) -> int:
    if action == sqlite3.SQLITE_FUNCTION and second in _FORBIDDEN:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK if action in _READS else sqlite3.SQLITE_DENY


def _explain(error: str) -> str:
    if "malformed" in error or "not a database" in error or "corrupt" in error:
        return f"is damaged ({error}); move it away to start the sweep again"
    if "disk is full" in error or "I/O error" in error:
        return f"{error}: earlier answers are saved; free some space and run the command again to continue"
    if "readonly" in error or "unable to open" in error:
        return f"cannot be written ({error})"
    if "locked" in error:
        return "is in use by another program"
    return error


# ---- summaries ----------------------------------------------------------------------------------------------

OUT_OF_TIME = "out of time"
# Rows that are compared: those that fit, or whose memory is not checked.
COMPARED = "fits IS NOT 0 AND step_s IS NOT NULL"
USUAL_ORDER = '"fits" DESC, "tokens_per_s_per_gpu" DESC, "position"'
COMMON_ERRORS = 5
PAGE_ROWS = 200
WIDEST_MAP = 16
NOT_MAPPED = ("gpus", "price", "currency")


def rows_of(
    store: Store, where: str | None = None, sort: str | None = None, top: int | None = None, reverse: bool = False
) -> list[FactDict]:
    """Return answered points, the fastest that fit first."""
    known = store.columns()
    order = USUAL_ORDER
    if sort is not None:
        require(sort in known, f"--sort {sort}: unrecognised column; choose from {', '.join(known)}")
        order = f'"{sort}" IS NULL, "{sort}"{" DESC" if reverse else ""}, "position"'
    condition = f"WHERE ({where})" if where else ""
    limit = f"LIMIT {top}" if top is not None else ""
    query = f"SELECT * FROM results {condition} ORDER BY {order} {limit}"
    if where is None:
        return store.rows(query)
    try:
        with store.limit_queries():
            return store.rows(query)
    except ValueError as error:
        raise ValueError(f"--where {where!r}: {error}; columns are {', '.join(known)}") from None


def page_facts(store: Store) -> FactDict:
    """Return the facts of a sweep's page: the fastest rows, their scaling, and the fastest settings."""
    names = [name for name in store.columns() if name not in (*COLUMNS, "position")]
    counts = ", ".join(f'count(DISTINCT "{name}") + max("{name}" IS NULL) AS "{name}"' for name in names)
    distinct = store.rows(f"SELECT {counts} FROM points")[0] if names else {}
    words = [name for name in names if (distinct[name] or 0) > 1]  # None: there is no point
    kinds = [name for name in ("model", "cluster") if name in words]
    return {
        **status_facts(store),
        "words": words,
        "kinds": kinds,
        "rows": rows_of(store, COMPARED, top=PAGE_ROWS),
        "scaling": _fastest(store, [*kinds, "gpus"]) if "gpus" in words else [],
        "heat": _heat(store, kinds, [name for name in words if name not in (*kinds, *NOT_MAPPED)]),
    }


def _fastest(store: Store, names: Sequence[str]) -> list[FactDict]:
    """Return the highest throughput that fits for each combination of *names*."""
    listed = ", ".join(f'"{name}"' for name in names)
    return store.rows(
        f"SELECT {listed}, max(tokens_per_s_per_gpu) AS tokens_per_s_per_gpu FROM results "
        f"WHERE {COMPARED} AND tokens_per_s_per_gpu IS NOT NULL GROUP BY {listed} ORDER BY {listed}"
    )


def _heat(store: Store, kinds: Sequence[str], words: Sequence[str]) -> FactDict | None:
    """Return a heat map of the two settings with most values, for each of *kinds*."""
    values = {
        name: [row[name] for row in store.rows(f'SELECT DISTINCT "{name}" FROM points ORDER BY 1')] for name in words
    }
    fitting = sorted((name for name in words if len(values[name]) <= WIDEST_MAP), key=lambda name: -len(values[name]))
    if len(fitting) < 2:
        return None
    across, down = fitting[:2]
    cells = _fastest(store, [*kinds, across, down])
    return {"across": across, "down": down, "x": values[across], "y": values[down], "cells": cells}


def status_facts(store: Store) -> FactDict:
    """Return the counts of points and answers, the best figures, and the most frequent errors."""
    points = store.rows("SELECT count(*) AS points FROM points")[0]["points"]
    facts = store.rows(
        "SELECT count(*) AS answered, count(error) AS errors, sum(fits) AS fit, min(step_s) AS least_step_s, "
        f"max(step_s) AS most_step_s, max(CASE WHEN {COMPARED} THEN mfu END) AS best_mfu, "
        f"max(CASE WHEN {COMPARED} THEN tokens_per_s_per_gpu END) AS best_tokens_per_s_per_gpu, "
        f"min(CASE WHEN {COMPARED} THEN days END) AS least_days, "
        f"min(CASE WHEN {COMPARED} THEN cost END) AS least_cost, "
        f"sum(state = '{OUT_OF_TIME}') AS out_of_time FROM results"
    )[0]
    currencies = {DEFAULT_CURRENCY}
    if "currency" in store.columns():
        currencies = {row["currency"] or DEFAULT_CURRENCY for row in store.rows("SELECT DISTINCT currency FROM points")}
    facts["currency"] = currencies.pop() if len(currencies) == 1 else None
    if facts["currency"] is None:  # costs in several currencies are not compared
        facts["least_cost"] = None
    errors = facts["errors"] and store.rows(
        "SELECT error, count(*) AS points FROM results WHERE error IS NOT NULL "
        "GROUP BY error ORDER BY points DESC, error LIMIT ?",
        (COMMON_ERRORS,),
    )
    return {"points": points, "left": points - facts["answered"], **facts, "common_errors": errors or []}


Digest = Callable[[str, object], str]
"""Return the identity of a word: the digest of the model, cluster or file that it names, else the word."""

KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a sweep; *new* and *seconds* are those of this run."""

    points: int
    answered: int
    errors: int
    new: int
    seconds: float
    best: FactDict | None

    @property
    def rate(self) -> float:
        return self.new / self.seconds if self.seconds > 0 else 0.0


def sweep(
    spec: Spec,
    folder: str,
    answer: Answer,
    digest: Digest,
    program: str,
    engine: str = "local",
    workers: int = 1,
    address: str | None = None,
    watch: Callable[[Progress], None] = lambda progress: None,
    most: int | None = None,
    identify: Callable[[], str] | None = None,
) -> Progress:
    """Answer every point of *spec*, or *most* of them, into the store in *folder*.

    Args:
        spec: the points.
        folder: the folder of the store.
        answer: the function that answers points.
        digest: the function that returns the identity of a word.
        program: the version of everything else that an answer depends on.
        engine: the name of an engine.
        workers: the number of workers.
        address: the address of the engine's cluster.
        watch: a function that is called with the progress.
        most: the maximum number of points, spread evenly over all.
        identify: a module-level function that returns *program* where a worker has the same; None trusts them.
    """
    run = load_engine(engine)
    files = () if engine == "local" else named_files(spec)
    setting = EngineSetting(answer, workers, address, folder, program, identify, files)
    with Store(folder, writes=True) as store:
        key_of = point_keys(program, spec.ask, digest)
        store.ask(spec.names, ((position, key_of(words), words) for position, words in spec.points(most)))
        counts = store.counts()
        began, new, best, pace = time.monotonic(), 0, None, ChunkPace()

        def progress() -> Progress:
            return Progress(**counts, new=new, seconds=time.monotonic() - began, best=best)

        watch(progress())
        for chunk in run(_chunks(spec, store, pace), setting):
            store.add(chunk)
            pace.note(chunk)
            new += len(chunk.answers)
            counts["answered"] += len(chunk.answers)
            counts["errors"] += sum(1 for row in chunk.answers if row.get("error"))
            known = filter(None, [best, *chunk.answers])
            best = max(known, key=lambda row: row.get("tokens_per_s_per_gpu") or 0.0, default=None)
            watch(progress())
        counts = store.counts()
        return progress()


def named_files(spec: Spec) -> tuple[tuple[str, bytes], ...]:
    """Return the files that words of *spec* name, and those that they build on, by their relative paths."""
    names = [value for row in (spec.fixed, *(row for axis in spec.axes for row in axis)) for value in row.values()]
    files: dict[str, bytes] = {}
    while names:
        value = names.pop()
        if not isinstance(value, str) or not os.path.isfile(value) or (name := os.path.normpath(value)) in files:
            continue
        if os.path.isabs(name) or name.startswith(os.pardir):
            raise ValueError(f"{value}: files of a sweep on a cluster must be below the current folder")
        files[name] = Source(value).raw(RESULT)
        if name.endswith(".toml"):
            folder = os.path.dirname(name)
            texts = [value for value in read_toml(name).values() if isinstance(value, str)]
            names += [os.path.join(folder, value) for value in texts]
    return tuple(sorted(files.items()))


def _chunks(spec: Spec, store: Store, pace: ChunkPace) -> Iterator[PointChunk]:
    """Yield chunks of open points; their size follows the time of the last ones."""
    points = store.open_points()
    while batch := list(islice(points, pace.size)):
        positions, keys = zip(*batch, strict=True)
        yield PointChunk(spec.ask, keys, tuple(map(spec.point, positions)))


def point_keys(program: str, ask: str, digest: Digest) -> Callable[[Words], bytes]:
    """Return the function that returns the key of a point: the digest of everything that its answer depends on."""
    start = hashlib.blake2b(f"{program} {ask}".encode(), digest_size=KEY_BYTES)
    tokens: dict[tuple[str, str], bytes] = {}

    def key_of(words: Words) -> bytes:
        key = start.copy()
        for name in sorted(words):
            # 1, 1.0 and True are the same key of a dictionary, but different words.
            place = (name, repr(words[name]))
            if place not in tokens:
                tokens[place] = msgspec.json.encode([name, digest(name, words[name])])
            key.update(tokens[place])
        return key.digest()

    return key_of
