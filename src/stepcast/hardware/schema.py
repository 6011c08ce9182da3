"""What a GPU or cluster description may say, and the nouns it becomes.

A description is flat here: dotted key -> Entry. ``catalog.py`` reads files into that form. The key of a field
is its name without the unit: ``memory = "80 GB"`` sets ``memory_bytes``. Other fields have their defaults.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import StrEnum
from functools import lru_cache
from types import NoneType
from typing import TypeVar, get_args, get_origin, get_type_hints

from stepcast.hardware.cluster import Cluster, Communication, Link, Node, Topology
from stepcast.hardware.described import CatalogError, nearest
from stepcast.hardware.gpu import Gpu
from stepcast.hardware.quantity import Dimension, parse_quantity

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "fp4", "nvfp4", "int8")
UNITS = ("matrix", "vector", "reached")  # reached: the fastest matrix multiply that was published
LARGEST_COUNT = 10_000_000
SMALLEST_RATIO = 1e-4
USUAL_TRANSPORT = "infiniband"
DIMENSION_OF_SUFFIX = {
    "_bytes_per_s": Dimension.RATE,
    "_bytes": Dimension.SIZE,
    "_s": Dimension.TIME,
    "_hz": Dimension.FREQUENCY,
    "_w": Dimension.POWER,
}
EXPECTED = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", list: "a list"}

Kind = Dimension | type
Built = TypeVar("Built")


@dataclass(frozen=True, slots=True)
class Transport:
    """What carries messages between nodes: the time of an empty one, and the share of the line rate."""

    latency_s: float
    efficiency: float
    source: str


Transports = Mapping[str, Transport]


@dataclass(frozen=True, slots=True)
class Entry:
    """One value of a description, the ``file:line`` it stands at and where its author has it from."""

    value: object
    where: str
    source: str


Entries = Mapping[str, Entry]


@dataclass(frozen=True, slots=True)
class DescribedField:
    """A field that a key of a description sets, or the keys of a table below it where it is a noun itself."""

    name: str
    key: str
    kind: Kind
    required: bool
    noun: type | None = None
    choices: type[StrEnum] | None = None


@lru_cache(maxsize=16)
def described_fields(noun: type) -> tuple[DescribedField, ...]:
    """Return the fields of *noun* that a description sets; names, sources and peaks are not among them."""
    hints, found = get_type_hints(noun), []
    for each in fields(noun):
        kind = next((part for part in get_args(hints[each.name]) if part is not NoneType), hints[each.name])
        if get_origin(hints[each.name]) is tuple:
            kind = list
        elif get_origin(hints[each.name]) is Mapping or kind in (Mapping, Gpu) or each.name == "name":
            continue
        name, key = each.name, each.name
        required = each.default is MISSING and each.default_factory is MISSING
        if isinstance(kind, type) and is_dataclass(kind):
            found.append(DescribedField(name, key, str, required, noun=kind))
        elif issubclass(kind, StrEnum):
            found.append(DescribedField(name, key, str, required, choices=kind))
        else:
            suffix = next((end for end in DIMENSION_OF_SUFFIX if name.endswith(end)), "")
            dimension = DIMENSION_OF_SUFFIX.get(suffix, kind)
            found.append(DescribedField(name, key.removesuffix(suffix), dimension, required))
    return tuple(found)


def _keys_of(noun: type, prefix: str = "") -> dict[str, Kind]:
    keys: dict[str, Kind] = {}
    for each in described_fields(noun):
        key = f"{prefix}{each.key}"
        keys |= _keys_of(each.noun, f"{key}.") if each.noun else {key: each.kind}
    return keys


GPU_KEYS: dict[str, Kind] = {
    "base": str,
    "aliases": list,
    **_keys_of(Gpu),
    **{f"{unit}.{dtype}": Dimension.FLOPS for unit in UNITS for dtype in DTYPES},
}
CLUSTER_KEYS: dict[str, Kind] = {
    "base": str,
    "aliases": list,
    "description": str,
    "nodes": int,
    "other.cluster": str,
    "other.nodes": int,
    **{key: kind for key, kind in _keys_of(Node, "node.").items() if key != "node.transport"},
    "node.nic.transport": str,
    **_keys_of(Topology, "network."),
    **_keys_of(Communication, "communication."),
    **{f"gpu.{key}": kind for key, kind in GPU_KEYS.items()},
}


def check_keys(entries: Entries, keys: Mapping[str, Kind]) -> None:
    for key, entry in entries.items():
        if key not in keys:
            raise CatalogError(entry.where, key, f"unknown key{nearest(key, keys)}")


class Reader:
    """Takes typed values out of the entries of one description; every error names file, line and key."""

    def __init__(self, entries: Entries, keys: Mapping[str, Kind], where: str) -> None:
        check_keys(entries, keys)
        self.entries, self.keys, self.where = entries, keys, where

    def has(self, prefix: str) -> bool:
        return any(key == prefix or key.startswith(f"{prefix}.") for key in self.entries)

    def get(self, key: str) -> object:
        """Return the value in SI; the key must be there."""
        entry = self.entries.get(key)
        if entry is None:
            raise CatalogError(self.where, key, "is missing")
        kind = self.keys[key]
        if isinstance(kind, Dimension):
            try:
                return parse_quantity(entry.value, kind)
            except ValueError as error:
                raise CatalogError(entry.where, key, str(error)) from None
        if kind in (int, float) and type(entry.value) in (int, float):
            self._check_number(key, entry)
        if kind is float and type(entry.value) is int:
            return float(entry.value)
        if type(entry.value) is not kind:
            raise CatalogError(entry.where, key, f"{entry.value!r} is not {EXPECTED[kind]}")
        return entry.value

    def _check_number(self, key: str, entry: Entry) -> None:
        """Shares, ratios and counts beyond anything built; that none is below zero its noun checks."""
        value = entry.value
        assert isinstance(value, (int, float))
        small = self.keys[key] is float and 0 < value < SMALLEST_RATIO
        if small or abs(value) > LARGEST_COUNT:
            limit = f"at least {SMALLEST_RATIO}" if small else f"at most {LARGEST_COUNT:,}"
            shown = f"{value:.6g}" if abs(value) < 1e300 else "a number of so many digits"
            raise CatalogError(entry.where, key, f"{shown} is beyond anything built; expected {limit}")

    def rate(self, key: str) -> float:
        value = self.get(key)
        assert isinstance(value, float)
        return value

    def text(self, key: str, default: str) -> str:
        return str(self.get(key)) if key in self.entries else default

    def build(self, noun: type[Built], prefix: str, **given: object) -> Built:
        """Build *noun* of the values below *prefix*, which ends with a point unless it is empty."""
        values = dict(given)
        described: type = noun
        for each in described_fields(described):
            key = f"{prefix}{each.key}"
            if each.name in given or not (each.required or self.has(key)):
                continue
            if each.noun is not None:
                values[each.name] = self.build(each.noun, f"{key}.")
            else:
                values[each.name] = self._value(each, key)
        build: Callable[..., Built] = noun
        with self.section(prefix.removesuffix(".")):
            return build(**values)

    def _value(self, field: DescribedField, key: str) -> object:
        value = self.get(key)
        if field.choices is not None:
            if value not in list(field.choices):
                known = ", ".join(field.choices)
                problem = f"unknown {field.key} {value!r}, expected one of {known}"
                raise CatalogError(self.entries[key].where, key, problem)
            return field.choices(str(value))
        if not isinstance(value, list):
            return value
        if field.name in ("failed", "slow"):
            for name in value:
                if not isinstance(name, str):
                    raise CatalogError(self.entries[key].where, key, f"{name!r} is not a text, the name of a link")
        return tuple(value)

    @contextmanager
    def section(self, prefix: str) -> Iterator[None]:
        """Turn what a noun says of its own values into an error at the section they came from."""
        try:
            yield
        except CatalogError:
            raise
        except ValueError as error:
            key = self._blamed(prefix, str(error))
            where = self.entries[key].where if key in self.entries else self.where
            raise CatalogError(where, key, str(error)) from None

    def _blamed(self, prefix: str, problem: str) -> str:
        """The key that a noun's complaint is about: it begins with the field's name, which adds the unit."""
        field = problem.split()[0]
        for key in self.entries:
            last = key.rpartition(".")[2]
            if key.startswith(prefix) and (field == last or field.startswith(f"{last}_")):
                return key
        return prefix

    def sources(self) -> dict[str, str]:
        """Key -> source, of everything that is a number."""
        names = (str, list)
        return {key: entry.source for key, entry in self.entries.items() if self.keys[key] not in names}


def build_gpu(name: str, entries: Entries, where: str) -> Gpu:
    read = Reader(entries, GPU_KEYS, where)
    flops = {
        unit: {dtype: read.rate(f"{unit}.{dtype}") for dtype in DTYPES if f"{unit}.{dtype}" in entries}
        for unit in UNITS
    }
    for dtype, reached in flops["reached"].items():
        if reached > flops["matrix"].get(dtype, 0.0):
            key = f"reached.{dtype}"
            raise CatalogError(
                entries[key].where, key, f"a product cannot exceed the peak, matrix.{dtype}; correct one of them"
            )
    peaks = {f"{unit}_flops": values for unit, values in flops.items()}
    return read.build(Gpu, "", name=name, sources=read.sources(), **peaks)


def build_cluster(
    name: str, entries: Entries, gpu: Gpu, where: str, transports: Transports, other: Cluster | None = None
) -> Cluster:
    """Build the cluster of *entries*, whose ``gpu.*`` keys have become *gpu*, and ``other.*`` *other*."""
    read = Reader(entries, CLUSTER_KEYS, where)
    transport = read.text("node.nic.transport", "")
    nic, usual_sources = None, dict[str, str]()
    if read.has("node.nic"):
        # What a description does not say of a NIC is its transport's.
        word = transport or USUAL_TRANSPORT
        if word not in transports:
            key = "node.nic.transport"
            problem = f"unknown transport {word!r}, expected one of {', '.join(transports)}"
            raise CatalogError(read.entries[key].where, key, problem)
        usual = transports[word]
        usual_values = {"latency": usual.latency_s, "efficiency": usual.efficiency}
        absent = [key for key in usual_values if not read.has(f"node.nic.{key}")]
        given = {"latency_s" if key == "latency" else key: usual_values[key] for key in absent}
        nic = read.build(Link, "node.nic.", **given)
        usual_sources = {f"node.nic.{key}": usual.source for key in absent}
    node = read.build(Node, "node.", gpu=gpu, nic=nic, transport=transport)
    communication = read.build(Communication, "communication.")
    topology = read.build(Topology, "network.")
    gpu_sources = {f"gpu.{key}": source for key, source in gpu.sources.items()}
    cluster = read.build(Cluster, "", name=name, node=node, topology=topology, communication=communication, other=other)
    return replace(cluster, sources=gpu_sources | read.sources() | usual_sources)
