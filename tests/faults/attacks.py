"""Files of some bytes or kilobytes that would take hours or gigabytes, and the commands that read them.

Each is refused in one line within seconds: ``tests/faults/test_attacks.py``. ``python -m tests.faults.attacks DIR``
writes them all, to try them by hand.
"""

import io
import pickle
import sqlite3
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

PREDICT = ("predict", "--cluster", "dgx-h100", "--gpus", "8", "--config")
KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"


def pickles() -> Iterator[tuple[str, bytes]]:
    """Pickles that make Python's unpickler, or whoever looks at their values, work without end."""
    plain = b"\x80\x02"
    entries = b"}X\x07\x00\x00\x00entries"
    doubled = b"".join(b"h%c2h%c\x86q%c" % (turn, turn, turn + 1) for turn in range(100))
    yield "nested tuples as a key", plain + entries + b"}" + b")q\x00" + doubled + b"K\x01ss."
    shared = b"".join(b"](h%ch%ceq%c" % (turn, turn, turn + 1) for turn in range(60))
    yield "shared lists", plain + entries + b"]q\x00" + shared + b"s."
    yield "a list in itself", plain + entries + b"]q\x00h\x00as."
    yield "a list that grows once shared", plain + entries + b"]q\x00(h\x00h\x00e](" + b"h\x00" * 50 + b"es."
    yield "an integer of 250 bytes", plain + entries + b"](\x8a\xfa" + b"\x7f" * 250 + b"es."
    yield "an integer of 900 kB", plain + entries + b"](\x8b" + struct.pack("<i", 900_000) + b"\x7f" * 900_000 + b"es."
    yield "an integer as text", plain + entries + b"](I" + b"9" * 900_000 + b"\nes."
    yield "a memo of two billion", plain + entries + b"]r\xff\xff\xff\x7f(K\x01es" + b"p2147483640\n."
    yield "a frame of 2^60 bytes", b"\x80\x04\x95" + struct.pack("<Q", 2**60) + entries + b"]s."
    yield "a text of 2^60 bytes", b"\x80\x04" + entries + b"]s\x8d" + struct.pack("<Q", 2**60) + b"."
    yield "nested lists", plain + entries + b"]" * 300_000 + b"a" * 299_999 + b"s."
    yield "marks", plain + entries + b"(" * 900_000 + b"."
    yield "a function", pickle.dumps({"entries": [print]}, 2)
    yield "a class of its own", plain + entries + b"](cos\nsystem\nX\x04\x00\x00\x00true\x85Res."
    yield "a reduce", b"\x80\x04" + entries + b"](\x8c\x08builtins\x8c\x04exec\x93\x8c\x01x\x85Res."
    yield (
        "a long shared text",
        plain
        + entries
        + b"](X"
        + struct.pack("<I", 500_000)
        + b"1," * 250_000
        + b"q\x00"
        + (b"h\x00" * 200_000)
        + b"es.",
    )
    long = {"0": {"ranks": "1," * 200_000}}
    groups = io.BytesIO()
    pickle.Pickler(groups, 2).dump({"pg_config": long | {str(at): long["0"] for at in range(1, 40_000)}, "entries": []})
    yield "a group of many ranks, often", groups.getvalue()
    huge = [{"input_sizes": [[2**62] * 60_000], "profiling_name": "nccl:x"}]
    yield "a shape of huge lengths", pickle.dumps({"entries": huge}, 2)
    yield "times beyond a float", pickle.dumps({"entries": [{"duration_ms": 10**400}]}, 2)


def databases() -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Exports of Nsight Systems whose tables compute, or stand for, far more than they hold."""
    plain = "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER"
    # Generated columns are added last, as each row that is inserted would compute them.
    yield "generated names", partial(
        _database,
        f"CREATE TABLE {KERNELS} ({plain})", 20_000,
        after=f"ALTER TABLE {KERNELS} ADD COLUMN demangledName TEXT AS (hex(zeroblob(100000 + start)))",
    )  # fmt: skip
    yield "generated starts", partial(
        _database,
        f"CREATE TABLE {KERNELS} (begin INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER)", 20_000, "begin",
        after=f"ALTER TABLE {KERNELS} ADD COLUMN start TEXT AS (printf('%100000d', begin))",
    )  # fmt: skip
    yield "30,000 devices", partial(_database, f"CREATE TABLE {KERNELS} ({plain})", 30_000, devices=30_000)
    yield "a device beyond 32 bits", partial(_database, f"CREATE TABLE {KERNELS} ({plain})", 3, devices=2**40)
    yield "a default of 200 kB in every row", partial(
        _database,
        f"CREATE TABLE {KERNELS} ({plain}); ", 30_000,
        after=f"ALTER TABLE {KERNELS} ADD COLUMN demangledName TEXT DEFAULT '{'x' * 200_000}'",
    )  # fmt: skip
    yield "a view of itself often", partial(
        _database,
        "CREATE TABLE k (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER)", 100, table="k",
        after=f"CREATE VIEW {KERNELS} AS SELECT a.* FROM k a, k b, k c, k d, k e",
    )  # fmt: skip


def _database(
    create: str, rows: int, start: str = "start", devices: int = 1, after: str = "", table: str = KERNELS
) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "made.sqlite")
        base = sqlite3.connect(path)
        base.executescript(create)
        base.executemany(
            f"INSERT INTO {table} ({start}, end, deviceId, streamId) VALUES (?, ?, ?, 7)",
            ((row, row + 1, row * max(1, devices // rows) % devices) for row in range(rows)),
        )
        if after:
            base.execute(after)
        base.commit()
        base.close()
        return path.read_bytes()


def yamls() -> Iterator[tuple[str, bytes]]:
    """Numbers of base 60 take the square of their length; aliases unfold."""
    yield "an integer of base 60", b"model:\n  a: 1" + b":1" * 490_000
    yield "a float of base 60", b"model:\n  a: 1" + b":1" * 490_000 + b".5"
    yield "an integer of base 60 in quotes", b'model:\n  a: !!int "' + b" 1 :" * 240_000 + b'1"'
    yield "digits", b"model:\n  a: " + b"9" * 900_000
    yield "no timestamp", b"model:\n  a: !!timestamp x"
    doubled = b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (turn + 1, turn + 1, turn, turn) for turn in range(60))
    yield "aliases", b"a0: &a0 [x]\n" + doubled
    yield (
        "merged aliases",
        b"a0: &a0 {x: 1}\n"
        + b"".join(b"a%d: &a%d {<<: [*a%d, *a%d]}\n" % (turn + 1, turn + 1, turn, turn) for turn in range(60)),
    )


def others() -> Iterator[tuple[str, str, bytes, tuple[str, ...]]]:
    entities = b"".join(b'<!ENTITY e%d "&e%d;&e%d;">' % (turn + 1, turn, turn) for turn in range(60))
    laughs = (
        b'<?xml version="1.0"?><!DOCTYPE system [<!ENTITY e0 "x">' + entities + b']><system version="1">&e60;</system>'
    )
    yield "entities of XML", "t.xml", laughs, ("show", "--format", "nccl-topo", "t.xml")
    shape = b'{"pg_config": {}, "entries": [{"input_sizes": [[' + b"9" * 18 + b", 9" * 200_000 + b"]]}]}"
    yield "a shape of huge lengths as JSON", "fr.json", shape, ("show", "fr.json")


def attacks() -> Iterator[tuple[str, str, bytes | Callable[[], bytes], tuple[str, ...]]]:
    """Yield each attack: its name, the name and the bytes of its file (or what makes them), and its command."""
    for name, data in pickles():
        yield f"pickle: {name}", "fr.pickle", data, ("show", "--format", "flight-recorder", "fr.pickle")
    for name, make in databases():
        yield f"sqlite: {name}", "report.sqlite", make, ("analyze", "report.sqlite")
    for name, data in yamls():
        yield f"yaml: {name}", "run.yaml", data, (*PREDICT, "run.yaml")
    yield from others()


CONDITIONS = {
    "joins": "(SELECT count(*) FROM results a, results b, results c, results d, results e) > 0",
    "long texts": "(SELECT length(group_concat(printf('%9000d', a.position))) FROM results a, results b) > 9",
    "distinct joins": "(SELECT count(DISTINCT a.position || b.position || c.position || d.position || printf('%9000d', 1)) "
    "FROM results a, results b, results c, results d) > 0",
    "recursion": "(WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c) > 0",
    "zeroblob": "length(zeroblob(900000000)) > 0",
}
"""Conditions of ``sweep show --where`` that would never end, or take all memory."""


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for number, (_name, file, data, words) in enumerate(attacks()):
        (folder / str(number)).mkdir(parents=True, exist_ok=True)
        (folder / str(number) / file).write_bytes(data() if callable(data) else data)
        sys.stdout.write(f"{folder}/{number}: stepcast {' '.join(words)}\n")
