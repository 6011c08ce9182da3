"""What a GPU or cluster description may say, and the nouns it becomes.

A description is flat here: dotted key -> Entry. ``catalog.py`` reads files into that form.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from stepcast.hardware.cluster import USUAL_EXCHANGE_SHARE, USUAL_LAUNCH_S, Cluster, Communication
from stepcast.hardware.gpu import Gpu
from stepcast.hardware.keys import CLUSTER_KEYS, DTYPES, GPU_KEYS, LARGEST_COUNT, SMALLEST_RATIO, UNITS, Kind
from stepcast.hardware.node import Fabric, FabricKind, Host, Link, Node
from stepcast.hardware.quantity import Dimension, parse_quantity
from stepcast.hardware.topology import NetworkKind, Routing, Topology
from stepcast.hardware.transport import USUAL_TRANSPORT, Transports


class CatalogError(ValueError):
    """A description that is wrong; says where, under which key, and what was expected."""

    def __init__(self, where: str, key: str, problem: str) -> None:
        super().__init__(": ".join(part for part in (where, key, problem) if part))
        self.where, self.key, self.problem = where, key, problem


@dataclass(frozen=True, slots=True)
class Entry:
    """One value of a description, the ``file:line`` it stands at and where its author has it from."""

    value: object
    where: str
    source: str


Entries = Mapping[str, Entry]


def nearest(word: str, known: list[str]) -> str:
    """``; did you mean X?`` where something known is close, else nothing."""
    from difflib import get_close_matches  # wanted for mistakes alone

    close = get_close_matches(word, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def check_keys(entries: Entries, keys: Mapping[str, Kind]) -> None:
    for key, entry in entries.items():
        if key not in keys:
            raise CatalogError(entry.where, key, f"unknown key{nearest(key, list(keys))}")


class Reader:
    """Takes typed values out of the entries of one description; every error names file, line and key."""

    def __init__(self, entries: Entries, keys: Mapping[str, Kind], where: str) -> None:
        check_keys(entries, keys)
        self.entries, self.keys, self.where = entries, keys, where

    def has(self, prefix: str) -> bool:
        return any(key == prefix or key.startswith(f"{prefix}.") for key in self.entries)

    def get(self, key: str, default: object = None) -> object:
        """The value in SI, or *default*; without a default the key must be there."""
        entry = self.entries.get(key)
        if entry is None:
            if default is None:
                raise CatalogError(self.where, key, "is missing")
            return default
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
            expected = {
                int: "a whole number",
                float: "a number",
                str: "a text",
                bool: "true or false",
                list: "a list",
            }
            raise CatalogError(entry.where, key, f"{entry.value!r} is not {expected[kind]}")
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

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        assert isinstance(value, (int, float))
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        assert isinstance(value, int)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        return str(self.get(key, default))

    def listed(self, key: str) -> list[Any]:
        value = self.get(key, [])
        assert isinstance(value, list)
        return value

    def flag(self, key: str) -> bool:
        return bool(self.get(key, False))

    def choice(
        self,
        key: str,
        choices: type[FabricKind] | type[NetworkKind] | type[Routing],
        default: str | None = None,
    ) -> str:
        word = self.text(key, default)
        if word not in list(choices):
            known = ", ".join(choices)
            raise CatalogError(
                self.entries[key].where,
                key,
                f"unknown {key.rpartition('.')[2]} {word!r}, expected one of {known}",
            )
        return word

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
        unit: {dtype: read.number(f"{unit}.{dtype}") for dtype in DTYPES if f"{unit}.{dtype}" in entries}
        for unit in UNITS
    }
    for dtype, reached in flops["reached"].items():
        if reached > flops["matrix"].get(dtype, 0.0):
            key = f"reached.{dtype}"
            raise CatalogError(
                entries[key].where,
                key,
                f"a product cannot exceed the peak, matrix.{dtype}; correct one of them",
            )
    with read.section(""):
        return Gpu(
            name=name,
            vendor=read.text("vendor"),
            architecture=read.text("architecture"),
            matrix_flops=flops["matrix"],
            vector_flops=flops["vector"],
            memory_bytes=read.number("memory"),
            memory_bandwidth_bytes_per_s=read.number("memory_bandwidth"),
            l2_bytes=read.number("l2"),
            sms=read.count("sms"),
            clock_hz=read.number("clock"),
            shared_memory_per_sm_bytes=read.number("shared_memory_per_sm"),
            launch_overhead_s=read.number("launch_overhead"),
            power_w=read.number("power"),
            reached_flops=flops["reached"],
            sources=read.sources(),
        )


def build_cluster(
    name: str, entries: Entries, gpu: Gpu, where: str, transports: Transports, other: Cluster | None = None
) -> Cluster:
    """The cluster of *entries*, whose ``gpu.*`` keys have already become *gpu*, and ``other.*`` *other*."""
    read = Reader(entries, CLUSTER_KEYS, where)
    with read.section("node"):
        node = Node(
            gpu=gpu,
            gpus=read.count("node.gpus"),
            fabric=_fabric(read),
            nics=read.count("node.nics", 0),
            nic=_nic(read, transports) if read.has("node.nic") else None,
            transport=read.text("node.nic.transport", ""),
            host=_host(read) if read.has("node.host") else None,
        )
    with read.section("communication"):
        communication = Communication(
            launch_overhead_s=read.number("communication.launch_overhead", USUAL_LAUNCH_S),
            channel_overhead_s=read.number("communication.channel_overhead", 0.0),
            exchange_share=read.number("communication.exchange_share", USUAL_EXCHANGE_SHARE),
            expert_share=read.number("communication.expert_share", 0.0),
            library=read.text("communication.library", ""),
        )
    with read.section(""):
        cluster = Cluster(
            name=name,
            node=node,
            topology=_topology(read),
            communication=communication,
            nodes=read.count("nodes") if read.has("nodes") else None,
            description=read.text("description", ""),
            other=other,
        )
    gpu_sources = {f"gpu.{key}": source for key, source in gpu.sources.items()}
    usual_sources = _usual_sources(read, transports)
    return replace(cluster, sources=gpu_sources | read.sources() | usual_sources)


def _link(read: Reader, prefix: str) -> Link:
    with read.section(prefix):
        return Link(
            bandwidth_bytes_per_s=read.number(f"{prefix}.bandwidth"),
            latency_s=read.number(f"{prefix}.latency"),
            efficiency=read.number(f"{prefix}.efficiency", 1.0),
        )


def _nic(read: Reader, transports: Transports) -> Link:
    """What a description does not say of a NIC is its transport's."""
    prefix = "node.nic"
    word = read.text(f"{prefix}.transport", USUAL_TRANSPORT)
    if word not in transports:
        key = f"{prefix}.transport"
        known = ", ".join(transports)
        raise CatalogError(
            read.entries[key].where, key, f"unknown transport {word!r}, expected one of {known}"
        )
    usual = transports[word]
    with read.section(prefix):
        return Link(
            bandwidth_bytes_per_s=read.number(f"{prefix}.bandwidth"),
            latency_s=read.number(f"{prefix}.latency", usual.latency_s),
            efficiency=read.number(f"{prefix}.efficiency", usual.efficiency),
        )


def _usual_sources(read: Reader, transports: Transports) -> dict[str, str]:
    """Where a NIC's constants come from that its description leaves to its transport."""
    if not read.has("node.nic"):
        return {}
    source = transports[read.text("node.nic.transport", USUAL_TRANSPORT)].source
    return {key: source for key in ("node.nic.latency", "node.nic.efficiency") if not read.has(key)}


def _host(read: Reader) -> Host:
    prefix = "node.host"
    with read.section(prefix):
        return Host(
            memory_bytes=read.number(f"{prefix}.memory"),
            memory_bandwidth_bytes_per_s=read.number(f"{prefix}.memory_bandwidth"),
            link=_link(read, f"{prefix}.link"),
            links=read.count(f"{prefix}.links"),
        )


def _fabric(read: Reader) -> Fabric:
    prefix = "node.fabric"
    links = {
        key: _link(read, f"{prefix}.{key}")
        for key in ("host_link", "socket_link")
        if read.has(f"{prefix}.{key}")
    }
    with read.section(prefix):
        return Fabric(
            kind=FabricKind(read.choice(f"{prefix}.kind", FabricKind)),
            link=_link(read, f"{prefix}.link"),
            host_link=links.get("host_link"),
            socket_link=links.get("socket_link"),
            sockets=read.count(f"{prefix}.sockets", 1),
            in_switch_reduction=read.flag(f"{prefix}.in_switch_reduction"),
            reduction_share=read.number(f"{prefix}.reduction_share", 1.0),
            planes=read.count(f"{prefix}.planes", 1),
        )


def _topology(read: Reader) -> Topology:
    with read.section("network"):
        return Topology(
            kind=NetworkKind(read.choice("network.kind", NetworkKind)),
            switch_latency_s=read.number("network.switch_latency", 0.0),
            leaf_nodes=_some(read, "network.leaf_nodes"),
            oversubscription=read.number("network.oversubscription", 1.0),
            scale_up_nodes=read.count("network.scale_up_nodes", 1),
            shape=tuple(read.listed("network.shape")),
            in_network_reduction=read.flag("network.in_network_reduction"),
            pod_nodes=_some(read, "network.pod_nodes"),
            pod_oversubscription=read.number("network.pod_oversubscription", 1.0),
            spines=_some(read, "network.spines"),
            cores=_some(read, "network.cores"),
            routing=Routing(read.choice("network.routing", Routing, Routing.SPRAY)),
            queue_pairs=read.count("network.queue_pairs", 1),
            seed=read.count("network.seed", 0),
            failed=_names(read, "network.failed"),
            slow=_names(read, "network.slow"),
        )


def _some(read: Reader, key: str) -> int | None:
    return read.count(key) if read.has(key) else None


def _names(read: Reader, key: str) -> tuple[str, ...]:
    names = read.listed(key)
    for name in names:
        if not isinstance(name, str):
            raise CatalogError(read.entries[key].where, key, f"{name!r} is not a text, the name of a link")
    return tuple(str(name) for name in names)
