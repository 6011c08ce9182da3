"""Tables of measured collectives, gathered from many sources: one line for each size of each table (csv)."""

import csv
from dataclasses import dataclass

from stepcast.inputs.errors import FormatError
from stepcast.units import US

COLUMNS = (
    "id",
    "source",
    "gpu",
    "nodes",
    "ranks",
    "network",
    "ranks_per_thread",
    "collective",
    "algo",
    "size_bytes",
    "time_us",
    "time_oop_us",
    "time_ip_us",
    "status",
    "outlier",
    "notes",
    "ranks_per_node",
)


@dataclass(frozen=True, slots=True)
class TableRow:
    """One size of one table; None and 0 stand for what its source does not tell."""

    table: str
    source: str
    gpu: str
    nodes: int
    ranks: int
    network: str
    ranks_per_thread: int
    collective: str
    algorithm: str
    size_bytes: int
    measured_s: float
    out_of_place: bool
    in_place: bool
    problem: bool
    outlier: bool
    notes: str
    ranks_per_node: int

    @property
    def system(self) -> str:
        """The machine: one publisher's GPUs of one kind."""
        return f"{self.source.strip().partition(' ')[0]} {self.gpu}"


def read_rows(path: str) -> list[TableRow]:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise FormatError(f"is no table of collectives: no column {missing[0]}", path)
            return [_row(line, f"{path}:{number}") for number, line in enumerate(reader, start=2)]
    except UnicodeDecodeError:
        raise FormatError("is not UTF-8 text", path) from None
    except csv.Error as error:
        raise FormatError(f"is not valid csv: {error}", path) from None


def _row(line: dict[str, str], where: str) -> TableRow:
    def count(name: str) -> int:
        text = line[name] or "0"
        if not (text.isascii() and text.isdigit()):
            raise FormatError(f"{name}: {line[name]!r} is not a whole number", where)
        return int(text)

    try:
        measured_s = float(line["time_us"] or "nan") * US
    except ValueError:
        raise FormatError(f"time_us: {line['time_us']!r} is not a number", where) from None
    if any(line[name] is None for name in COLUMNS) or not line["source"]:
        raise FormatError("ends early, or names no source", where)
    return TableRow(
        table=line["id"],
        source=line["source"],
        gpu=line["gpu"],
        nodes=count("nodes"),
        ranks=count("ranks"),
        network=line["network"],
        ranks_per_thread=count("ranks_per_thread"),
        collective=line["collective"],
        algorithm=line["algo"],
        size_bytes=count("size_bytes"),
        measured_s=measured_s,
        out_of_place=bool(line["time_oop_us"]),
        in_place=bool(line["time_ip_us"]),
        problem=line["status"] == "problem",
        outlier=bool(line["outlier"]),
        notes=line["notes"],
        ranks_per_node=count("ranks_per_node"),
    )
