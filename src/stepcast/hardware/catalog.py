"""The catalogue of GPUs and clusters, and users' own descriptions, read from TOML; and the facts of each for reports.

A file may build on another with ``base``; its own keys win. ``[sources]`` names where its numbers
come from: a number's source is the entry of its key or of the closest table around it, else the file itself.

A description becomes dotted key -> Entry, and then a Gpu or a Cluster, whose types msgspec checks. The key of a field
is its name without the unit: ``memory = "80 GB"`` sets ``memory_bytes``. Other fields have their defaults.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from types import NoneType
from typing import NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from stepcast.hardware.cluster import Cluster, Gpu, NetworkRouting, Topology
from stepcast.inputs.source import DATA, FormatError, Source, parse_toml
from stepcast.ir.limits import BASES, DESCRIPTION
from stepcast.ir.tables import TableError, convert_table, parse_tables
from stepcast.ir.types import FactDict, Facts, dataclass, pick
from stepcast.units import GB, NS, US, Dimension, nearest, parse_quantity


class CatalogError(ValueError):
    """A description that is wrong; says where, under which key, and what was expected."""

    def __init__(self, where: str, key: str, problem: str) -> None:
        super().__init__(": ".join(part for part in (where, key, problem) if part))
        self.where, self.key, self.problem = where, key, problem


def flat(table: object, prefix: str = "") -> dict[str, object]:
    """Return nested tables as one level of dotted keys."""
    if not isinstance(table, Mapping):
        return {prefix: table}
    keys: dict[str, object] = {}
    for key, value in table.items():
        keys |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return keys


def read_chained(name: str, chain: tuple[str, ...], where: str, key: str) -> tuple[str, tuple[str, ...]]:
    """Return the text of a file that *key* named at *where*, and the files that led here with it at their end."""
    resolved = str(Path(name).resolve())
    if resolved in chain:
        files = [Path(file).name for file in (*chain[chain.index(resolved) :], name)]
        raise CatalogError(where, key, f"cyclic include: {' -> '.join(files)}")
    if len(chain) == BASES.most:
        raise CatalogError(where, key, BASES.message)
    try:
        return Source(name).text(DESCRIPTION), (*chain, resolved)
    except FormatError as error:
        raise CatalogError(where or name, "", f"{name} {error.message}" if where else error.message) from None


@dataclass(frozen=True, slots=True)
class Description:
    """A TOML file: its tables, less ``[sources]``, and what those say of its keys."""

    text: str
    file: str
    table: FactDict
    sources: Mapping[str, object]

    @classmethod
    def parse(cls, text: str, file: str) -> "Description":
        try:
            table = parse_toml(text)
        except FormatError as error:
            raise CatalogError(file, "", error.message) from None
        return cls(text, file, table, flat(table.pop("sources", {})))

    def source(self, key: str) -> str:
        """Return the source of *key*, or of the closest table around it, else the file."""
        while key not in self.sources and "." in key:
            key = key.rpartition(".")[0]
        return str(self.sources.get(key, self.file))

    def where(self, key: str) -> str:
        """Return ``file:line`` of a dotted key, found in the text: the TOML parser keeps no positions."""
        places = _key_lines(self.text)
        lines = [places[prefix] for prefix in accumulate(key.split("."), "{}.{}".format) if prefix in places]
        return f"{self.file}:{min(lines)}" if lines else self.file

    def error(self, key: str, problem: str) -> CatalogError:
        return CatalogError(self.where(key), key, problem)

    def check_keys(self, keys: Iterable[str], known: Collection[str]) -> None:
        for key in keys:
            if key not in known:
                raise self.error(key, f"unknown key{nearest(key, known)}")

    def check_sources(self, known: Collection[str], what: str) -> None:
        for key in self.sources:
            if not any(name == key or name.startswith(f"{key}.") for name in known):
                raise self.error(f"sources.{key}", f"names no key of a {what}")


@lru_cache(maxsize=4)
def _key_lines(text: str) -> dict[str, int]:
    """Return the line of each dotted key that *text* sets, the first where it is set twice."""
    section, lines = "", dict[str, int]()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            section = header[1].strip() + "."
        elif match := re.match(r"\s*([\w.\"'-]+)\s*=", line):
            lines.setdefault(section + re.sub(r"[\"']", "", match[1]), number)
    return lines


NOT_INHERITED = ("base", "aliases", "description")
VENDORS = re.compile(r"^(nvidia|amd|tesla|instinct|geforce|quadro)-")
# Names of platforms as their vendors sell them, before those of cloud providers.
PLAIN_STARTS = ("dgx-", "hgx-", "gb200-", "gb300-", "a800-", "h800-", "mi3")
# The node of a GPU of which the catalogue has no cluster, and GPUs whose boards are built as another's.
BARE_NODE = "pcie-node"
BUILT_AS = {"h20": "dgx-h100", "v100-sxm-16gb": "dgx-2", "gh200-144gb": "gh200-node"}
# Chips that no file describes, though others like them have one.
NOT_DESCRIBED = {
    r"apple|mps$|mac|m[1-6](-|$)": ": Apple silicon is not modelled: its software (MLX, PyTorch's mps) was never "
    "measured here; forecast the GPU that you would rent instead, such as rtx-4090 or l4",
    r"tpu|trainium|trn[12]|inferentia|gaudi|v5p|v6e|v5e|cerebras|wse": " is not described: besides GPUs, tpu-v5p, "
    "tpu-v6e and trainium2 are, by what their makers state; describe another in a file NAME.toml",
}

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "fp4", "nvfp4", "int8")
UNITS = ("matrix", "vector", "reached")  # reached: the fastest matrix multiply that was published
DIMENSION_OF_SUFFIX = {"_bytes_per_s": Dimension.RATE, "_bytes": Dimension.SIZE, "_s": Dimension.TIME,
                       "_hz": Dimension.FREQUENCY, "_w": Dimension.POWER}  # fmt: skip
# Units at the end of keys in files of fitted constants.
FIT_UNITS = {"_us": ("_s", US), "_ns": ("_s", NS), "_gb_per_s": ("_bytes_per_s", GB)}
TRANSPORT, DEFAULT_TRANSPORT = "node.nic.transport", "infiniband"
OF_TRANSPORT = ("node.nic.latency", "node.nic.efficiency")
OF_OTHER = ("other.cluster", "other.nodes")
SECTION_NAMES = {"topology": "network"}  # fields whose table in a description has another name

Built = TypeVar("Built")


class Transport(NamedTuple):
    """A network protocol between nodes: the time of an empty message, and the share of the line rate that data get."""

    latency_s: float
    efficiency: float
    source: str
    protocols: tuple[str, ...] = ("LL", "LL128", "Simple")  # of the collective library


class Entry(NamedTuple):
    """One value of a description, its ``file:line`` and the source that its author names."""

    value: object
    where: str
    source: str


Entries = Mapping[str, Entry]


class DescriptionKey(NamedTuple):
    """The fields that lead to the one that a key sets (none: it is treated apart), and its dimension, if it has one."""

    path: tuple[str, ...] = ()
    dimension: Dimension | None = None
    is_number: bool = False


def _list_keys(kind: type, prefix: str = "", path: tuple[str, ...] = ()) -> dict[str, DescriptionKey]:
    """Return the keys that set the fields of *kind* and of the types below it."""
    hints = get_type_hints(kind)
    keys: dict[str, DescriptionKey] = {}
    for field in fields(kind):
        name, hint = field.name, hints[field.name]
        if name in ("name", "gpu", "transport", "other") or get_origin(hint) is Mapping:
            continue
        inner = next((part for part in get_args(hint) if part is not NoneType), hint)
        own_path = (*path, name)
        if is_dataclass(inner):
            keys |= _list_keys(inner, f"{prefix}{SECTION_NAMES.get(name, name)}.", own_path)  # type: ignore[arg-type]
            continue
        suffix = next((end for end in DIMENSION_OF_SUFFIX if name.endswith(end)), "")
        is_number = inner in (int, float, bool) and get_origin(hint) is not tuple
        keys[prefix + name.removesuffix(suffix)] = DescriptionKey(own_path, DIMENSION_OF_SUFFIX.get(suffix), is_number)
    return keys


GPU_KEYS: dict[str, DescriptionKey] = {
    **dict.fromkeys(("base", "aliases"), DescriptionKey()),
    **_list_keys(Gpu),
    **{f"{unit}.{dtype}": DescriptionKey((f"{unit}_flops", dtype), Dimension.FLOPS, True)
       for unit in UNITS for dtype in DTYPES},
}  # fmt: skip
CLUSTER_KEYS: dict[str, DescriptionKey] = {
    **dict.fromkeys(("base", "aliases", "other.cluster"), DescriptionKey()),
    "other.nodes": DescriptionKey(is_number=True),
    TRANSPORT: DescriptionKey(("node", "transport")),
    **_list_keys(Cluster),
    **{f"gpu.{key}": description for key, description in GPU_KEYS.items()},
}


@lru_cache(maxsize=16)
def data_names(folder: str) -> tuple[str, ...]:
    """Return the names of the descriptions in a *folder* of the package's data, such as ``engines``."""
    return tuple(sorted(file.stem for file in (DATA / folder).glob("*.toml")))


def load_gpu(name_or_path: str) -> Gpu:
    """Return a GPU of the catalogue, by name or alias in any letter case, or one described in a TOML file."""
    return _build_gpu(_find_name("gpus", name_or_path), _read_entries("gpus", name_or_path), name_or_path)


def load_cluster(name_or_path: str, overrides: Iterable[str] = ()) -> Cluster:
    """Return a cluster of the catalogue or of a TOML file, changed by *overrides* such as ``node.nics=4``.

    A name may carry its own: ``generic:gpu=h200,node.gpus=4``. The name of a GPU is one node of it.
    """
    changes = tuple(overrides)
    # A file may change between two calls, and what builds on one; the catalogue does not.
    from_files = any(".toml" in text for text in (name_or_path, *changes))
    return (_read_cluster.__wrapped__ if from_files else _read_cluster)(name_or_path, changes)


def clusters_of(gpu: str) -> list[str]:
    """Return the clusters of the catalogue that have *gpu*, the plainest first."""
    names = []
    for name in data_names("clusters"):
        base = _read_entries("clusters", name).get("gpu.base")
        if base and _find_name("gpus", str(base.value)) == gpu:
            names.append(name)
    return sorted(names, key=lambda name: (not name.startswith(PLAIN_STARTS), name))


def check_gpu_count(cluster: Cluster, gpus: int) -> None:
    """Raise a ValueError if *cluster* has fewer GPUs, of its first kind if it has two."""
    if cluster.gpus is not None and gpus > cluster.gpus:
        more = "; only search uses both of its kinds" if cluster.other else suggest_larger(cluster)
        raise ValueError(f"{gpus:,} GPUs are more than the {cluster.gpus:,} of {cluster.name}{more}")


def suggest_larger(cluster: Cluster) -> str:
    """Return the end of a message about too many GPUs: clusters with the same GPU and any number of nodes."""
    others = [name for name in clusters_of(cluster.gpu.name) if name not in (cluster.name, "pcie-node")]
    described = f", which is {cluster.description}" if cluster.name == cluster.gpu.name else ""
    return f"{described}; clusters of any size: --cluster {' or '.join(others[:2])}" if others else described


def load_fit(name: str, starts: tuple[str, ...] = ()) -> FactDict:
    """Return the parsed file of fitted constants *name* (``compute``), for the cost model that knows its keys; of a
    large one only tables whose headers begin with one of *starts*.
    """
    return load_data(f"fits/{name}", starts)


def load_data(name: str, starts: tuple[str, ...] = ()) -> FactDict:
    """Return the parsed file *name* of the package's data, such as ``analysis``."""
    text = (DATA / f"{name}.toml").read_text(encoding="utf-8")
    if starts:
        text = "\n[".join(table for table in text.split("\n[") if f"[{table}".startswith(starts))
        text = f"[{text}"
    return parse_tables(text)


def convert_units(table: Facts) -> FactDict:
    """Return *table* in SI: keys that end in a unit, such as start_us, have numbers, lists or tables of it."""
    values = {}
    for key, value in table.items():
        suffix = next((suffix for suffix in FIT_UNITS if key.endswith(suffix)), "")
        si_suffix, unit = FIT_UNITS.get(suffix, ("", 1))
        match value:
            case dict():
                value = {name: number * unit for name, number in value.items()}
            case list():
                value = [number * unit for number in value]
            case int() | float():
                value = value * unit
        values[key.removesuffix(suffix) + si_suffix] = value
    return values


@lru_cache(maxsize=1)
def known_transports() -> dict[str, Transport]:
    """Return the network protocols between nodes, by name."""
    return {name: Transport(**convert_units(entry)) for name, entry in load_data("transports").items()}


def network_protocols(cluster: Cluster) -> tuple[str, ...]:
    """Return the protocols of the collective library that the transport of the cluster's NICs allows."""
    return known_transports()[cluster.node.transport or DEFAULT_TRANSPORT].protocols


# From entries to a GPU or a cluster.


def _build_gpu(name: str, entries: Entries, where: str) -> Gpu:
    entries = _drop_keys(entries, NOT_INHERITED)
    values = _nest(entries, GPU_KEYS)
    for unit in UNITS:
        values.setdefault(f"{unit}_flops", {})
    return _build(Gpu, values | {"name": name, "sources": _sources(entries, GPU_KEYS)}, entries, GPU_KEYS, where)


@lru_cache(maxsize=256)
def _read_cluster(name_or_path: str, overrides: tuple[str, ...]) -> Cluster:
    name, _, parameters = name_or_path.partition(":")
    name_overrides = re.split(r",(?=\s*[a-z_.0-9]+\s*=)", parameters) if parameters else []
    word = _normalise(name)
    # Other spellings are read from all files, which takes longer than a prediction.
    described = name.endswith(".toml") or word in data_names("clusters") or word in _spellings("clusters")
    gpu_alone = None if described else _spellings("gpus").get(word)  # a GPU that no cluster is named after
    entries = dict(_node_entries(gpu_alone) if gpu_alone else _read_entries("clusters", name))
    for text in (*name_overrides, *overrides):
        _override(entries, text)
    gpu_entries = {key.removeprefix("gpu."): entry for key, entry in entries.items() if key.startswith("gpu.")}
    if not gpu_entries:
        raise CatalogError(name, "gpu", "is missing; name one of the catalogue or describe it in a [gpu] table")
    gpu_name = "custom"
    if "base" in gpu_entries:
        base = gpu_entries["base"]
        gpu_name = _find_name("gpus", str(base.value), base.where)
        gpu_entries = _inherit(_read_entries("gpus", str(base.value), (), base.where), gpu_entries)
    try:
        gpu = _build_gpu(gpu_name, gpu_entries, name)
    except CatalogError as error:
        raise CatalogError(error.where, f"gpu.{error.key}".rstrip("."), error.problem) from None
    return _build_cluster(gpu_alone or _find_name("clusters", name), entries, gpu, name)


def _build_cluster(name: str, entries: Entries, gpu: Gpu, where: str) -> Cluster:
    cluster_entries = {key: entry for key, entry in entries.items() if not key.startswith("gpu.")}
    values: FactDict = {"node": {}, "topology": {}, "communication": {}} | _nest(cluster_entries, CLUSTER_KEYS)
    values["node"]["gpu"] = gpu
    sources = {f"gpu.{key}": source for key, source in gpu.sources.items()} | _sources(entries, CLUSTER_KEYS)
    if any(key.startswith("node.nic.") for key in cluster_entries):
        # A NIC without latency or efficiency of its own has those of its transport.
        word, transports = values["node"].get("transport") or DEFAULT_TRANSPORT, known_transports()
        if word not in transports:
            problem = f"unknown transport {word!r}, expected one of {', '.join(transports)}"
            raise CatalogError(cluster_entries[TRANSPORT].where, TRANSPORT, problem)
        nic = values["node"].setdefault("nic", {})
        for key in (key for key in OF_TRANSPORT if key not in cluster_entries):
            field = CLUSTER_KEYS[key].path[-1]
            nic[field] = getattr(transports[word], field)
            sources[key] = transports[word].source
    if values["node"].get("nics") == 0:  # the NIC of the base is not there
        values["node"].pop("nic", None)
    other = None
    if any(key in cluster_entries for key in OF_OTHER):  # nodes of a second kind: as many as given
        for key in OF_OTHER:
            if key not in cluster_entries:
                raise CatalogError(where, key, f"is missing; a second kind needs {' and '.join(OF_OTHER)}")
        described, nodes = (cluster_entries[key] for key in OF_OTHER)
        try:
            other = load_cluster(str(described.value), [f"nodes={nodes.value}"])
        except CatalogError as error:
            if error.where == "--set":  # its nodes are those of this file
                raise CatalogError(nodes.where, OF_OTHER[1], error.problem) from None
            raise
        if other.other is not None:
            raise CatalogError(described.where, OF_OTHER[0], f"{described.value} has a second kind itself")
    values |= {"name": name, "other": other, "sources": sources}
    return _build(Cluster, values, cluster_entries, CLUSTER_KEYS, where)


def _nest(entries: Entries, keys: Mapping[str, DescriptionKey]) -> FactDict:
    """Return the values in SI as nested tables of fields."""
    nested: FactDict = {}
    for key, entry in entries.items():
        path, dimension, _ = keys[key]
        if not path:
            continue
        value = entry.value
        if dimension is not None:
            try:
                value = parse_quantity(value, dimension)
            except ValueError as error:
                raise CatalogError(entry.where, key, str(error)) from None
        table = nested
        for part in path[:-1]:
            table = table.setdefault(part, {})
        table[path[-1]] = value
    return nested


def _build(
    kind: type[Built], values: FactDict, entries: Entries, keys: Mapping[str, DescriptionKey], where: str
) -> Built:
    """Return a *kind* of *values*; a CatalogError names the file, line and key of what does not fit."""
    try:
        return convert_table(values, kind)
    except TableError as error:
        key = _blamed_key(error, entries, keys)
        raise CatalogError(entries[key].where if key in entries else where, key, error.problem) from None


def _blamed_key(error: TableError, entries: Entries, keys: Mapping[str, DescriptionKey]) -> str:
    """Return the key that *error* is about: of its path, or below it the one whose field its first word names."""
    for key, (path, _, _) in keys.items():
        if path and path == error.path[: len(path)]:
            return key
    section = ".".join(SECTION_NAMES.get(part, part) for part in error.path)
    word = error.problem.split()[0]
    for key in entries:
        last = key.rpartition(".")[2]
        if key.startswith(section) and (word in (key, last) or word.startswith(f"{last}_")):
            return key
    return section


def _sources(entries: Entries, keys: Mapping[str, DescriptionKey]) -> dict[str, str]:
    """Return key -> source, of everything that is a number."""
    return {key: entry.source for key, entry in entries.items() if keys[key].is_number}


# Names.


@lru_cache(maxsize=2)
def _spellings(kind: str) -> dict[str, str]:
    """Return, for ``gpus`` or ``clusters``, every normalised spelling -> the name in the catalogue."""
    table = {name: name for name in data_names(kind)}
    for name in data_names(kind):
        aliases = _read_entries(kind, name).get("aliases")
        words = aliases.value if aliases and isinstance(aliases.value, list) else []
        table |= {_normalise(str(word)): name for word in words}
    return table


def _normalise(name: str) -> str:
    word = re.sub(r"[\s_]+", "-", name.strip().lower())
    while VENDORS.match(word):
        word = VENDORS.sub("", word)
    return word


def _find_name(kind: str, name: str, where: str = "") -> str:
    """Return the catalogue's spelling of *name*, or the name of a file."""
    word = _normalise(name)
    if name.endswith(".toml") or word in data_names(kind):
        return Path(name).stem if name.endswith(".toml") else word
    table = _spellings(kind)
    if word in table:
        return table[word]
    for pattern, problem in NOT_DESCRIBED.items():
        if re.match(pattern, word):
            raise CatalogError(where, "", f"{name}{problem}")
    known = {**table, **_spellings("gpus")} if kind == "clusters" else table  # a GPU is one node of it
    hint = nearest(word, known) or f"; known are {', '.join(data_names(kind))}, or a file NAME.toml"
    raise CatalogError(where, "", f"unknown {kind.removesuffix('s')} {name!r}{hint}")


def _node_entries(gpu: str) -> dict[str, Entry]:
    """Return the entries of one node with *gpu*: of the plainest cluster that has it, else cards on PCIe."""
    clusters = clusters_of(gpu)
    cluster = clusters[0] if clusters else BUILT_AS.get(gpu, BARE_NODE)
    entries = dict(_read_entries("clusters", cluster))
    if not clusters:
        _override(entries, f"gpu={gpu}")
    entries["description"] = Entry(f"one node of {cluster if clusters else f'{gpu}, built as {cluster}'}", gpu, gpu)
    # Racks that are one domain, and a torus, remain complete.
    if not any(key in entries for key in ("network.scale_up_nodes", "network.shape")):
        entries["nodes"] = Entry(1, gpu, f"{gpu} alone names one node")
    return entries


# From files to entries.


def _read_entries(kind: str, name: str, chain: tuple[str, ...] = (), where: str = "") -> Entries:
    """Return the entries of a description and of its bases. *chain*: the files that led here."""
    if not name.endswith(".toml"):
        return _catalogued_entries(kind, _find_name(kind, name, where))
    text, chain = read_chained(name, chain, where, "base")
    entries = _parse(kind, text, name)
    for key in ("base", "gpu.base", "other.cluster"):  # a path is relative to the file that names it
        if key in entries and (file := str(entries[key].value)).endswith(".toml"):
            entries[key] = entries[key]._replace(value=str(Path(name).parent / file))
    return _with_base(kind, entries, chain)


@lru_cache(maxsize=256)
def _catalogued_entries(kind: str, name: str) -> Entries:
    text = (DATA / kind / f"{name}.toml").read_text(encoding="utf-8")
    return _with_base(kind, _parse(kind, text, f"{name}.toml"), ())


def _parse(kind: str, text: str, file: str) -> dict[str, Entry]:
    description = Description.parse(text, file)
    table = description.table
    if isinstance(table.get("gpu"), str):
        table["gpu"] = {"base": table["gpu"]}
    values, keys = flat(table), GPU_KEYS if kind == "gpus" else CLUSTER_KEYS
    description.check_keys(values, keys)
    description.check_sources(keys, "description")
    return {key: Entry(value, description.where(key), description.source(key)) for key, value in values.items()}


def _with_base(kind: str, entries: dict[str, Entry], chain: tuple[str, ...]) -> Entries:
    if "base" not in entries:
        return entries
    base = entries["base"]
    inherited = _drop_keys(_read_entries(kind, str(base.value), chain, base.where), NOT_INHERITED)
    if "gpu.base" in entries:  # what was given of the old GPU does not hold for another
        inherited = {key: entry for key, entry in inherited.items() if not key.startswith("gpu.")}
    return _inherit(inherited, entries)


def _inherit(base: Entries, own: Entries) -> dict[str, Entry]:
    """Return *own* with what it inherits from *base*: with other peaks published products no longer hold, and
    with another transport neither do latency and efficiency of the old one.
    """
    has_peaks = any(key.startswith("matrix.") for key in own)
    inherited = base if TRANSPORT not in own else _drop_keys(base, OF_TRANSPORT)
    entries = {key: entry for key, entry in inherited.items() if not (has_peaks and key.startswith("reached."))}
    return entries | dict(own)


def _drop_keys(entries: Entries, keys: tuple[str, ...]) -> dict[str, Entry]:
    return {key: entry for key, entry in entries.items() if key not in keys}


def _override(entries: dict[str, Entry], text: str) -> None:
    """Apply one ``key=value``; the value is TOML, or text where it is not."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (key and equals and value):
        raise CatalogError("--set", "", f"{text!r} is not of the form key=value, such as node.nics=4")
    try:
        parsed: object = parse_toml(f"value = {value}")["value"]
    except FormatError:
        parsed = value
    if key in ("gpu", "gpu.base"):
        key = "gpu.base"
    replaced = {"gpu.base": [name for name in entries if name.startswith("gpu.")], TRANSPORT: OF_TRANSPORT}
    for old in replaced.get(key, ()):
        entries.pop(old, None)
    if key not in CLUSTER_KEYS:
        raise CatalogError("--set", key, f"unknown key{nearest(key, CLUSTER_KEYS)}")
    entries[key] = Entry(parsed, "--set", f"--set {key}")


CLUSTER_TABLES = {"base", "node", "gpu", "network", "communication"}


def looks_like_cluster(head: str) -> bool:
    """Return whether a file that begins so is a TOML description of a cluster."""
    try:
        return bool(CLUSTER_TABLES & set(parse_toml(head)))
    except FormatError:
        # A mistake in the file is reported when it is loaded; here only its look counts.
        return any(line.strip().startswith(("[node", "[gpu", "[network", 'base = "')) for line in head.splitlines())


def cluster_facts(cluster: Cluster) -> FactDict:
    node, topology = cluster.node, cluster.topology
    return {
        "kind": "cluster",
        **pick(cluster, "name description gpus nodes gpus_per_node=node.gpus"),
        "other": cluster.other and pick(cluster.other, "name gpus nodes gpu=gpu.name"),
        "gpu": gpu_facts(cluster.gpu),
        "fabric": {"kind": str(node.fabric.kind), **asdict(node.fabric.link)},
        **pick(node, "in_switch_reduction=fabric.in_switch_reduction nics_per_node=nics"),
        "nic": asdict(node.nic) if node.nic else {},
        "transport": node.transport or None,
        "host": asdict(node.host) if node.host else {},
        "network": str(topology.kind),
        "routes": _describe_routes(topology),
        "scale_up_gpus": cluster.domain_gpus,
        "communication": pick(cluster.communication, "launch_overhead_s channel_overhead_s"),
        "sources": dict(cluster.sources),
    }


def _describe_routes(topology: Topology) -> list[str]:
    """Return tiers, routing and faults that differ from the defaults."""
    has_leaves = topology.leaf_nodes is not None and topology.oversubscription > 1
    texts = {
        f"{topology.oversubscription:g}:1 above leaves of {topology.leaf_nodes} nodes": has_leaves,
        f"{topology.pod_oversubscription:g}:1 above pods of {topology.pod_nodes} nodes": topology.pod_nodes is not None,
        f"{topology.routing} over {topology.queue_pairs} queue pairs": topology.routing is not NetworkRouting.SPRAY,
        f"{len(topology.failed)} named as failed": topology.failed,
        f"{len(topology.slow)} named as slow": topology.slow,
    }
    return [text for text, applies in texts.items() if applies]


def gpu_facts(gpu: Gpu) -> FactDict:
    peaks = "name vendor architecture matrix_flops vector_flops memory_bytes memory_bandwidth_bytes_per_s"
    return pick(gpu, f"{peaks} l2_bytes sms clock_hz launch_overhead_s power_w sources")


def all_clusters() -> list[FactDict]:
    return [{"cluster": name, **cluster_facts(load_cluster(name))} for name in data_names("clusters")]
