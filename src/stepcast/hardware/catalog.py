"""The catalogue of GPUs and clusters, and users' own descriptions, read from TOML.

A file may build on another with ``base``; what it says itself wins. ``[sources]`` names where its numbers
come from: a number's source is the entry of its key or of the closest table around it, else the file itself.
"""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from stepcast.hardware.cluster import Cluster
from stepcast.hardware.described import CatalogError, Description, flat, nearest
from stepcast.hardware.gpu import Gpu
from stepcast.hardware.schema import (
    CLUSTER_KEYS,
    GPU_KEYS,
    Entries,
    Entry,
    Transport,
    Transports,
    build_cluster,
    build_gpu,
    check_keys,
)
from stepcast.inputs.source import FormatError, Source, parse_toml
from stepcast.ir.limits import BASES, DESCRIPTION
from stepcast.units import US

DATA = Path(__file__).parents[1] / "data"
NOT_INHERITED = ("base", "aliases", "description")
TRANSPORT = "node.nic.transport"
OF_TRANSPORT = ("node.nic.latency", "node.nic.efficiency")
MAKERS = re.compile(r"^(nvidia|amd|tesla|instinct|geforce|quadro)-")
# Names of platforms as their makers sell them, before those of who rents them out.
PLAIN_STARTS = ("dgx-", "hgx-", "gb200-", "gb300-", "a800-", "h800-", "mi3")
# The node of a GPU of which the catalogue has no cluster.
BARE_NODE = "pcie-node"
# Those whose boards are built as another's.
BUILT_AS = {"h20": "dgx-h100", "v100-sxm-16gb": "dgx-2", "gh200-144gb": "gh200-node"}
# Chips that are no GPUs, some of which have files.
NOT_DESCRIBED = re.compile(r"^(tpu|trainium|trn[12]|inferentia|gaudi|v5p|v6e|v5e|cerebras|wse)")


def gpu_names() -> tuple[str, ...]:
    return _names("gpus")


def cluster_names() -> tuple[str, ...]:
    return _names("clusters")


def load_gpu(name_or_path: str) -> Gpu:
    """A GPU of the catalogue, by name or alias in any letter case, or one described in a TOML file."""
    entries = _described("gpus", name_or_path, ())
    return build_gpu(_own_name("gpus", name_or_path), _without(entries, NOT_INHERITED), name_or_path)


def load_cluster(name_or_path: str, overrides: Iterable[str] = ()) -> Cluster:
    """A cluster of the catalogue or of a TOML file, changed by *overrides* such as ``node.nics=4``.

    A name may carry its own: ``generic:gpu=h200,node.gpus=4``. The name of a GPU is one node of it.
    """
    changed = tuple(overrides)
    # A file may change between two calls, and what builds on one; the catalogue does not.
    from_files = any(".toml" in text for text in (name_or_path, *changed))
    return _cluster(name_or_path, changed) if from_files else _catalogued_cluster(name_or_path, changed)


@lru_cache(maxsize=256)
def _catalogued_cluster(name: str, overrides: tuple[str, ...]) -> Cluster:
    return _cluster(name, overrides)


def _cluster(name_or_path: str, overrides: tuple[str, ...]) -> Cluster:
    name, _, parameters = name_or_path.partition(":")
    own = re.split(r",(?=\s*[a-z_.0-9]+\s*=)", parameters) if parameters else []
    gpu_alone = _gpu_named(name)
    entries = dict(_node_of(gpu_alone) if gpu_alone else _described("clusters", name, ()))
    for text in (*own, *overrides):
        _set(entries, text)
    gpu_entries = {key.removeprefix("gpu."): entry for key, entry in entries.items() if key.startswith("gpu.")}
    if not gpu_entries:
        raise CatalogError(name, "gpu", "is missing; name one of the catalogue or describe it in a [gpu] table")
    gpu_name = "custom"
    if "base" in gpu_entries:
        base = gpu_entries["base"]
        gpu_name = _own_name("gpus", str(base.value), base.where)
        inherited = _described("gpus", str(base.value), (), base.where)
        gpu_entries = _inherited(inherited, gpu_entries) | gpu_entries
    try:
        gpu = build_gpu(gpu_name, _without(gpu_entries, NOT_INHERITED), name)
    except CatalogError as error:
        raise CatalogError(error.where, f"gpu.{error.key}", error.problem) from None
    own_name = gpu_alone or _own_name("clusters", name)
    other = _other(entries, name)
    return build_cluster(own_name, entries, gpu, name, known_transports(), other)


def _other(entries: Entries, where: str) -> Cluster | None:
    """The nodes of a second kind: so many as in another description."""
    said = {key: entries[key] for key in ("other.cluster", "other.nodes") if key in entries}
    if not said:
        return None
    for key in ("other.cluster", "other.nodes"):
        if key not in said:
            raise CatalogError(where, key, "is missing; a second kind needs other.cluster and other.nodes")
    named = str(said["other.cluster"].value)
    found = load_cluster(named, [f"nodes={said['other.nodes'].value}"])
    if found.other is not None:
        raise CatalogError(said["other.cluster"].where, "other.cluster", f"{named} has a second kind itself")
    return found


def clusters_of(gpu: str) -> list[str]:
    """The clusters of the catalogue that have *gpu*, the plainest first."""
    having = [name for name in cluster_names() if _gpu_of(name) == gpu]
    return sorted(having, key=lambda name: (not name.startswith(PLAIN_STARTS), name))


def load_fit(name: str) -> dict[str, Any]:
    """The parsed file of learnt constants *name* (``compute``), for the cost model that knows its keys."""
    text = (DATA / "fits" / f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@lru_cache(maxsize=1)
def known_transports() -> Transports:
    """What carries messages between nodes, by name."""
    text = (DATA / "transports.toml").read_text(encoding="utf-8")
    return {
        name: Transport(entry["latency_us"] * US, entry["efficiency"], entry["source"])
        for name, entry in tomllib.loads(text).items()
    }


@lru_cache(maxsize=1)
def _aliases() -> dict[str, dict[str, str]]:
    """For GPUs and clusters: every spelling, normalised -> the name in the catalogue."""
    found: dict[str, dict[str, str]] = {}
    for kind in ("gpus", "clusters"):
        table = {name: name for name in _names(kind)}
        for name in _names(kind):
            alias = _described(kind, name, ()).get("aliases")
            table |= {_normal(str(word)): name for word in (alias.value if alias else ())}  # type: ignore[attr-defined]
        found[kind] = table
    return found


@lru_cache(maxsize=2)
def _names(kind: str) -> tuple[str, ...]:
    folder = DATA / kind
    return tuple(sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml")))


def _normal(name: str) -> str:
    word = re.sub(r"[\s_]+", "-", name.strip().lower())
    while MAKERS.match(word):
        word = MAKERS.sub("", word)
    return word


def _is_file(name: str) -> bool:
    return name.endswith(".toml")


def _own_name(kind: str, name: str, where: str = "") -> str:
    return Path(name).stem if _is_file(name) else _known(kind, name, where)


def _known(kind: str, name: str, where: str = "") -> str:
    """The catalogue's spelling of *name*."""
    word = _normal(name)
    if word in _names(kind):
        return word
    table = _aliases()[kind]
    if word not in table:
        what = kind.removesuffix("s")
        if NOT_DESCRIBED.match(word):
            raise CatalogError(
                where,
                "",
                f"{name} is not described: besides GPUs, tpu-v5p, tpu-v6e and trainium2 are, by what their "
                "makers state; describe another in a file NAME.toml",
            )
        hint = nearest(word, table) or f"; known are {', '.join(_names(kind))}, or a file NAME.toml"
        raise CatalogError(where, "", f"unknown {what} {name!r}{hint}")
    return table[word]


def _gpu_named(name: str) -> str | None:
    """The GPU that *name* means where no cluster has it."""
    word = _normal(name)
    if _is_file(name) or word in _names("clusters") or word in _aliases()["clusters"]:
        return None
    return _aliases()["gpus"].get(word)


def _gpu_of(cluster: str) -> str | None:
    base = _described("clusters", cluster, ()).get("gpu.base")
    return _known("gpus", str(base.value)) if base else None


def _node_of(gpu: str) -> dict[str, Entry]:
    """One node with *gpu*: of the plainest cluster that has it, else cards on PCIe."""
    having = clusters_of(gpu)
    other = BUILT_AS.get(gpu, BARE_NODE)
    entries = dict(_described("clusters", having[0] if having else other, ()))
    if not having:
        _set(entries, f"gpu={gpu}")
    told = f"one node of {having[0] if having else f'{gpu}, built as {other}'}"
    entries["description"] = Entry(told, gpu, gpu)
    whole = ("network.scale_up_nodes", "network.shape")  # racks that are one domain, and a torus, stay whole
    if not any(key in entries for key in whole):
        entries["nodes"] = Entry(1, gpu, f"{gpu} alone names one node")
    return entries


def _described(kind: str, name: str, chain: tuple[str, ...], where: str = "") -> Entries:
    """The entries of a description with those of its bases under them. *chain*: the files that led here."""
    if not _is_file(name):
        return _catalogued(kind, _known(kind, name, where))
    path = Path(name)
    if str(path.resolve()) in chain:
        files = [Path(file).name for file in (*chain[chain.index(str(path.resolve())) :], name)]
        raise CatalogError(where, "base", f"cyclic include: {' -> '.join(files)}")
    if len(chain) == BASES.most:
        raise CatalogError(where, "base", BASES.said)
    try:
        text = Source(path).text(DESCRIPTION)
    except FormatError as error:
        raise CatalogError(where or name, "", f"{name} {error.message}" if where else error.message) from None
    own = _parse(kind, text, name)
    for key in ("base", "gpu.base", "other.cluster"):  # a path is relative to the file that names it
        if key in own and _is_file(str(own[key].value)):
            own[key] = replace(own[key], value=str(path.parent / str(own[key].value)))
    return _with_base(kind, own, (*chain, str(path.resolve())))


@lru_cache(maxsize=256)
def _catalogued(kind: str, name: str) -> Entries:
    file = DATA / kind / f"{name}.toml"
    return _with_base(kind, _parse(kind, file.read_text(encoding="utf-8"), f"{name}.toml"), ())


def _with_base(kind: str, own: dict[str, Entry], chain: tuple[str, ...]) -> Entries:
    if "base" not in own:
        return own
    base = own["base"]
    inherited = _without(_described(kind, str(base.value), chain, base.where), NOT_INHERITED)
    if "gpu.base" in own:  # another GPU: what was said of the old one no longer holds
        inherited = {key: entry for key, entry in inherited.items() if not key.startswith("gpu.")}
    return _inherited(inherited, own) | own


def _inherited(base: Entries, own: Entries) -> dict[str, Entry]:
    """What *own* takes over from *base*: with other peaks, products that were published no longer hold, and
    with another transport what the old one reached.
    """
    other_peaks = any(key.startswith("matrix.") for key in own)
    kept = base if TRANSPORT not in own else _without(base, OF_TRANSPORT)
    return {key: entry for key, entry in kept.items() if not (other_peaks and key.startswith("reached."))}


def _without(entries: Entries, keys: tuple[str, ...]) -> dict[str, Entry]:
    return {key: entry for key, entry in entries.items() if key not in keys}


def _parse(kind: str, text: str, file: str) -> dict[str, Entry]:
    described = Description.parse(text, file)
    table = described.table
    if isinstance(table.get("gpu"), str):
        table["gpu"] = {"base": table["gpu"]}
    values, keys = flat(table), GPU_KEYS if kind == "gpus" else CLUSTER_KEYS
    described.check_keys(values, keys)
    described.check_sources(keys, "description")
    return {key: Entry(value, described.where(key), described.source(key)) for key, value in values.items()}


def _set(entries: dict[str, Entry], text: str) -> None:
    """Apply one ``key=value``; the value is TOML, or text where it is not."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (key and equals and value):
        raise CatalogError("--set", "", f"{text!r} is not of the form key=value, such as node.nics=4")
    try:
        parsed: object = parse_toml(f"value = {value}")["value"]
    except FormatError:
        parsed = value
    if key in ("gpu", "gpu.base"):
        for old in [name for name in entries if name.startswith("gpu.")]:
            del entries[old]
        key = "gpu.base"
    if key == TRANSPORT:
        for old in OF_TRANSPORT:
            entries.pop(old, None)
    entry = Entry(parsed, "--set", f"--set {key}")
    check_keys({key: entry}, CLUSTER_KEYS)
    entries[key] = entry
