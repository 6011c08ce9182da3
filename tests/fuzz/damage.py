"""Random damage of a good file: by bytes, by lines, by words, and by structure."""

import contextlib
import json
import pickle
import re
import sqlite3
from random import Random
from typing import Any

import yaml

NASTY = (
    b"-1", b"NaN", b"inf", b"1e400", b"1e-320", b"9" * 30, b"9" * 5000, b"0", b"", b"\x00", b"\xff\xfe", b"\r\n",
    b"\t\t", b",,", b'"', b"[[[[", b"{", b"}", "é漢".encode(), b"1_000", b"0x10", b"None", b"true", b"-0.0",
    b"9223372036854775807", b"9223372036854775808", b"18446744073709551616", b"2147483648", b"\x1b[31m", b"%s",
    b"\xed\xa0\x80", b"\xe2\x80\xa8", b"'", b"\\", b"=", b":", b"#",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 10**6, 2**31, 2**53, 2**63 - 1, 2**63, 10**30, 0.5, -0.0, 1e300, 1e-320,
    "", "x", "0", "NaN", "llama", "é", "\x00", "a" * 3000, [], {}, [0], [[]], {"a": 1}, [1, "x", None],
)  # fmt: skip
MOST_BYTES = 10**6
WORD = re.compile(rb"[A-Za-z0-9_.+-]+")
NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?")


def damaged(seed: bytes, others: tuple[bytes, ...], random: Random) -> bytes:
    """*seed* after one to four damages; some take a piece of another file."""
    data = seed
    if random.random() < 0.3 and (changed := _structure(seed, random)) is not None:
        data = changed
        if random.random() < 0.7:
            return data
    for _ in range(random.choice((1, 1, 1, 2, 3, 4))):
        if len(data) > MOST_BYTES:  # a long word in place of a common one, twice
            return data[:MOST_BYTES]
        data = random.choice((_bytes, _bytes, _lines, _words, _words))(data, others, random)
    return data


def _bytes(data: bytes, others: tuple[bytes, ...], random: Random) -> bytes:
    at = random.randrange(len(data) + 1)
    length = random.choice((1, 1, 2, 7, 60, 1000))
    match random.randrange(7):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + data[at + length :]
        case 2:
            return data[: at + length] + data[at:]
        case 3:
            return data[:at] + random.choice(NASTY) + data[at:]
        case 4:
            return data[:at] + bytes([random.randrange(256)]) + data[at + 1 :]
        case 5:
            return data[:at] + random.randbytes(length) + data[at + length :]
        case _:
            other = random.choice(others)
            start = random.randrange(len(other) + 1)
            return data[:at] + other[start : start + length] + data[at:]


def _lines(data: bytes, others: tuple[bytes, ...], random: Random) -> bytes:
    lines = data.splitlines(keepends=True) or [b""]
    at = random.randrange(len(lines))
    match random.randrange(6):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, lines[random.randrange(len(lines))])
        case 2:
            lines[at:at] = lines[at : at + 1] * random.choice((2, 10, 100))
        case 3:
            other = random.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        case 4:
            foreign = random.choice(others).splitlines(keepends=True) or [b""]
            lines.insert(at, random.choice(foreign))
        case _:
            random.shuffle(lines)
    return b"".join(lines)


def _words(data: bytes, others: tuple[bytes, ...], random: Random) -> bytes:
    """Another word or number in place of one or of all that are equal to it."""
    found = list((NUMBER if random.random() < 0.6 else WORD).finditer(data))
    if not found:
        return data
    one = random.choice(found)
    match random.randrange(4):
        case 0:
            word = random.choice(found)[0]
        case 1:
            word = str(random.choice((0, 1, 2, 3, 8, 1000, 10**9, 10**15))).encode()
        case _:
            word = random.choice(NASTY)
    if random.random() < 0.2:
        return data.replace(one[0], word)
    return data[: one.start()] + word + data[one.end() :]


def _structure(data: bytes, random: Random) -> bytes | None:
    """Another value, or none, at some place of JSON, a pickle, a database, protobuf or a table; None for other files."""
    if data[:1] == b"\x80":
        return _pickled(data, random)
    if data.startswith(b"SQLite format 3"):
        return _database(data, random)
    if b"\0" in data[:64] and (messages := _fields(data, delimited=True)):
        return _protobuf(messages, random)
    if data[:1] == b"\x0a" and _fields(data):  # one message, as of OTLP
        for _ in range(random.choice((1, 1, 2, 4))):
            data = _changed_message(data, random)
        return data
    if data[:1] in b"{[":
        try:
            tree = json.loads(data)
        except ValueError:
            return None
        for _ in range(random.choice((1, 1, 2, 4))):
            tree = _changed(tree, random)
        return json.dumps(tree, allow_nan=True, ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass")
    if re.match(rb"[A-Za-z_]+:[ \n]", data):
        with contextlib.suppress(yaml.YAMLError, UnicodeDecodeError):
            tree = yaml.load(data, yaml.CSafeLoader)
            for _ in range(random.choice((1, 1, 2, 4))):
                tree = _changed(tree, random)
            text: str = yaml.safe_dump(tree, allow_unicode=random.random() < 0.5)
            return text.encode("utf-8", "surrogatepass")
    separator = next((mark for mark in (b"\t", b",") if data.split(b"\n", 1)[0].count(mark) > 1), None)
    if separator is None:
        return None
    rows = [line.split(separator) for line in data.split(b"\n")]
    column = random.randrange(len(rows[0]))
    match random.randrange(4):
        case 0:  # a column goes
            rows = [row[:column] + row[column + 1 :] for row in rows]
        case 1:  # a column moves to the front
            rows = [row[column : column + 1] + row[:column] + row[column + 1 :] for row in rows]
        case 2:  # a column of one value
            value = random.choice(NASTY)
            rows[1:] = [[*row[:column], value, *row[column + 1 :]] for row in rows[1:]]
        case _:  # one cell
            row = random.choice(rows)
            row[random.randrange(len(row))] = random.choice(NASTY)
    return b"\n".join(separator.join(row) for row in rows)


def _pickled(data: bytes, random: Random) -> bytes:
    """The value of a good pickle with places changed, some of them shared, of any protocol."""
    tree = pickle.loads(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        tree = _changed(tree, random)
    if random.random() < 0.3:
        tree = {"entries": [tree] * random.choice((2, 50)), "again": tree, (1, "x"): tree}
    return pickle.dumps(tree, random.randrange(6))


def _database(data: bytes, random: Random) -> bytes:
    """A database with other columns, rows, types, views or settings."""
    base = sqlite3.connect(":memory:")
    base.deserialize(data)
    tables = [row[0] for row in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for _ in range(random.choice((1, 1, 2, 3))):
        table = random.choice(tables)
        columns = [row[1] for row in base.execute(f"PRAGMA table_info({table})")]
        if not columns:
            continue
        column, value = random.choice(columns), random.choice(VALUES)
        value = json.dumps(value).encode() if isinstance(value, list | dict) else value
        value = random.choice((2**63 - 1, -(2**63))) if isinstance(value, int) and abs(value) >= 2**63 else value
        statements: tuple[tuple[str, tuple[Any, ...]], ...] = (
            (f"UPDATE {table} SET {column} = ?", (value,)),
            (f"UPDATE {table} SET {column} = ? WHERE rowid = 1", (value,)),
            (f"ALTER TABLE {table} DROP COLUMN {column}", ()),
            (f"ALTER TABLE {table} RENAME COLUMN {column} TO other", ()),
            (f"ALTER TABLE {table} ADD COLUMN made AS (hex(zeroblob(1000)))", ()),
            (f"ALTER TABLE {table} RENAME TO {table}_old", ()),
            (f"DROP TABLE {table}", ()),
            (f"DELETE FROM {table}", ()),
            (f"INSERT INTO {table} SELECT * FROM {table}", ()),
            (f"CREATE VIEW v{random.randrange(9**9)} AS SELECT * FROM {table}", ()),
            (f"CREATE INDEX i{random.randrange(9**9)} ON {table} (abs({column}))", ()),
            ("PRAGMA encoding = 'UTF-16'", ()),
            (f"PRAGMA user_version = {random.randrange(2**31)}", ()),
        )
        with contextlib.suppress(sqlite3.Error, OverflowError):
            base.execute(*random.choice(statements))
            tables = [row[0] for row in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")] or tables
    base.commit()
    changed = base.serialize()
    base.close()
    return changed


Field = tuple[int, int, Any]
"""Number, wire type and value of a protobuf field: a number, or bytes."""


def _fields(data: bytes, delimited: bool = False) -> list[Field]:
    """The fields of a message, or the messages of a file as fields; none where the bytes are no protobuf."""
    at, found = 0, list[Field]()

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value
            if shift > 70:
                raise ValueError

    try:
        while at < len(data):
            key = 2 if delimited else number()
            if key & 7 == 0:
                found.append((key >> 3, 0, number()))
                continue
            size = {1: 8, 5: 4}.get(key & 7) or (number() if key & 7 == 2 else len(data) + 1)
            if at + size > len(data):
                return []
            found.append((key >> 3, key & 7, data[at : at + size]))
            at += size
    except (IndexError, ValueError):
        return []
    return found


def _protobuf(messages: list[Field], random: Random) -> bytes:
    """Messages with one field changed, somewhere inside."""
    at = random.randrange(len(messages))
    if random.random() < 0.2:
        messages = random.choice((messages[:at], messages[at:], messages * 2, random.sample(messages, len(messages))))
    else:
        messages[at] = (0, 2, _changed_message(messages[at][2], random))
    return b"".join(_varint(len(value)) + value for _, _, value in messages)


def _changed_message(data: bytes, random: Random) -> bytes:
    fields = _fields(data)
    if not fields:
        return data + random.choice(NASTY)
    at = random.randrange(len(fields))
    number, kind, value = fields[at]
    match random.randrange(8):
        case 0:
            del fields[at]
        case 1:
            fields *= random.choice((2, 30))
        case 2:
            fields[at] = (random.randrange(1, 40), kind, value)
        case 3:
            fields[at] = (number, 0, random.choice((0, 1, 2**31, 2**63, 2**64 - 1, 10**6)))
        case 4:
            fields[at] = (number, 2, random.choice(NASTY))
        case _ if kind == 2:
            fields[at] = (number, 2, _changed_message(value, random))
        case _ if kind == 0:
            fields[at] = (number, 0, random.choice((0, 1, 7, value + 1, 2**40, 2**63)))
        case _:
            fields[at] = (number, kind, random.randbytes(len(value)))
    parts = []
    for number, kind, value in fields:
        body = _varint(value) if kind == 0 else (_varint(len(value)) if kind == 2 else b"") + value
        parts.append(_varint(number << 3 | kind) + body)
    return b"".join(parts)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _changed(tree: Any, random: Random) -> Any:
    """*tree* with one place changed, deep down more often than not."""
    if isinstance(tree, dict) and tree and random.random() < 0.9:
        key = random.choice(list(tree))
        match random.randrange(12):
            case 0:
                return {name: value for name, value in tree.items() if name != key}
            case 1:
                return {(random.choice(VALUES[20:24]) if name == key else name): value for name, value in tree.items()}
            case _:
                return {**tree, key: _changed(tree[key], random)}
    if isinstance(tree, list) and tree and random.random() < 0.9:
        at = random.randrange(len(tree))
        match random.randrange(8):
            case 0:
                return tree[:at] + tree[at + 1 :]
            case 1:
                return tree[:at] + [tree[at]] * random.choice((2, 30)) + tree[at:]
            case _:
                return [*tree[:at], _changed(tree[at], random), *tree[at + 1 :]]
    return random.choice(VALUES)
