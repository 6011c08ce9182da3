"""Other traffic on the network, as a TOML file describes it.

[[flows]]                      # a plain pattern
nodes = "16-31"
spread = "ring"
bytes = "2 GB"
period = "0.5 s"

[[job]]                        # another training job
nodes = "32-63"
predict = { model = "llama-2-7b", tp = 8 }
"""

import msgspec

from stepcast.inputs.source import FormatError, prefix_errors, read_toml
from stepcast.inputs.topologies import expand_hostlist
from stepcast.ir.flows import FlowSpread, OtherJob, Others, Pattern
from stepcast.ir.limits import BACKGROUND, LISTED
from stepcast.ir.tables import convert_table
from stepcast.ir.types import require
from stepcast.units import Dimension, parse_quantity


class _FlowTable(msgspec.Struct, forbid_unknown_fields=True):
    nodes: object
    bytes: object
    period: object
    spread: FlowSpread = FlowSpread.RING
    start: object = "0 s"
    name: str = ""

    def build(self, default_name: str) -> Pattern:
        nodes = parse_nodes(self.nodes)
        require(len(nodes) >= 2, "nodes: a pattern needs at least two")
        period_s = parse_quantity(self.period, Dimension.TIME)
        require(period_s != 0, "period: must be above zero")
        size_bytes = parse_quantity(self.bytes, Dimension.SIZE)
        start_s = parse_quantity(self.start, Dimension.TIME)
        return Pattern(self.name or default_name, nodes, self.spread, size_bytes, period_s, start_s)


class _JobTable(msgspec.Struct, forbid_unknown_fields=True):
    nodes: object
    predict: dict[str, object]
    start: object = "0 s"
    name: str = ""

    def build(self, default_name: str) -> OtherJob:
        start_s = parse_quantity(self.start, Dimension.TIME)
        return OtherJob(self.name or default_name, parse_nodes(self.nodes), self.predict, start_s)


TABLES: dict[str, type[_FlowTable | _JobTable]] = {"flows": _FlowTable, "job": _JobTable}


def read_background(path: str) -> Others:
    """Return the jobs and patterns of the file at *path*; a FormatError says what is wrong with it."""
    tables = read_toml(path)
    unknown = sorted(set(tables) - set(TABLES))
    if unknown:
        raise FormatError(f"{unknown[0]}: unknown key; expected [[flows]] and [[job]]", path)
    others: list[Pattern | OtherJob] = []
    for key, kind in TABLES.items():
        entries = tables.get(key, [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise FormatError(f"{key}: expected tables, each headed [[{key}]]", path)
        for number, entry in enumerate(entries, 1):
            where = f"[[{key}]] {number}"
            try:
                others.append(convert_table(entry, kind).build(where))
                BACKGROUND.check(len(others))
            except ValueError as error:
                raise FormatError(f"{where}: {error}", path) from None
    if not others:
        raise FormatError("names no other job; expected [[flows]] or [[job]]", path)
    return tuple(others)


def parse_nodes(value: object) -> tuple[int, ...]:
    """Return nodes, counted from 0, given as ``"0-3,8"`` or as a list of numbers."""
    if isinstance(value, list) and all(type(node) is int and 0 <= node < LISTED.most for node in value):
        nodes = value
    elif isinstance(value, str):
        with prefix_errors("nodes"):
            nodes = [int(name) for name in expand_hostlist(f"[{value.replace(' ', '')}]")]
    else:
        raise ValueError('nodes: expected a text such as "0-3,8", or a list of whole numbers')
    LISTED.check(max(nodes, default=0))
    require(len(set(nodes)) == len(nodes), "nodes: one is named twice")
    require(bool(nodes), "nodes: none is named")
    return tuple(nodes)
