"""The wiring of nodes and networks as described by NCCL, nvidia-smi and Slurm, and by other simulators:
ASTRA-sim's YAML, SimAI's ns-3 topology, Calculon's system JSON.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from math import inf, prod
from typing import NamedTuple
from xml.parsers import expat

import msgspec

from stepcast.inputs.source import DATA, FormatError, Source, expect, prefix_errors, read_toml
from stepcast.ir.limits import CONFIG, GPUS, LISTED, RESULT
from stepcast.ir.measured import Wiring, find_fabric
from stepcast.units import GB, MB

# NCCL's own view of a node, which NCCL_TOPO_DUMP_FILE writes: XML of CPUs, PCI devices, GPUs and NICs.
# NVIDIA/nccl, src/graph/xml.cc and topo.cc: ``speed`` of a net is in Mb/s, ``tclass`` 0x068000 of an nvlink is
# an NVSwitch, and the count of links is of that target.

SWITCH_CLASS = "0x068000"
MEGABIT = MB / 8
DEEPEST = 64
PCI_DEVICES: Mapping[str, str] = read_toml(DATA / "pci_devices.toml")
# Compute capability -> one NVLink, each way (NVIDIA's datasheets: 2.0 to 4.0 25 GB/s, 5.0 50 GB/s).
LINK_BYTES_PER_S = {"60": 20e9, "70": 25e9, "80": 25e9, "86": 14.0625e9, "90": 25e9, "100": 50e9, "103": 50e9}


def read_nccl(source: Source) -> Wiring:
    dump = _NcclDump()
    parser = expat.ParserCreate()
    parser.StartElementHandler = dump.start
    parser.EndElementHandler = lambda name: dump.open.pop()
    parser.StartDoctypeDeclHandler = dump.refuse_doctype
    try:
        parser.Parse(source.text(CONFIG), True)
    except expat.ExpatError as error:
        raise FormatError(f"is not XML: {expat.ErrorString(error.code)}", source.path, error.lineno) from None
    return dump.wiring()


class _NcclDump:
    """The elements read so far: GPUs, their NVLinks, and NICs."""

    def __init__(self) -> None:
        # For each open element the attributes of the nearest one of each name, itself or around it.
        self.open: list[dict[str, dict[str, str]]] = [{}]
        self.gpus: list[tuple[str, str, str]] = []  # bus id, device, compute capability
        self.links: list[tuple[int, str, str, int]] = []  # GPU, target, its class, count
        self.nets: dict[tuple[str, str, str], tuple[float, bool]] = {}  # host, name, port -> rate, direct
        self.hosts: Counter[str] = Counter()
        self.sockets: set[tuple[str, str]] = set()
        self.slot_bytes_per_s = 0.0

    def refuse_doctype(self, *_: object) -> None:
        raise FormatError("declares a document type; a topology that NCCL wrote has none")

    def start(self, name: str, attributes: dict[str, str]) -> None:
        expect(len(self.open) <= DEEPEST, f"has more than {DEEPEST} elements inside each other")
        nearest = {**self.open[-1], name: attributes}
        self.open.append(nearest)
        device, cpu = nearest.get("pci", {}), nearest.get("cpu", {})
        host = cpu.get("host_hash", "")
        match name:
            case "gpu":
                self.hosts[host] += 1
                self.sockets.add((host, cpu.get("numaid", "")))
                self.gpus.append((device.get("busid", ""), device.get("device", "").lower(), attributes.get("sm", "")))
                speed = re.match(r"([0-9.]{1,8}) GT/s", device.get("link_speed", ""))
                width = device.get("link_width", "0")
                if speed and width.isdigit() and _parse_number(speed[1]) >= 8:
                    # From PCIe 3.0 on 128 of 130 bits are data.
                    self.slot_bytes_per_s = _parse_number(speed[1]) * 1e9 / 8 * int(width[:3]) * 128 / 130
            case "nvlink" if self.gpus:
                count = attributes.get("count", "0")
                if not re.fullmatch(r"[0-9]{1,4}", count):
                    raise FormatError(f"count of an nvlink is {count[:20]!r}; expected a whole number")
                target, kind = attributes.get("target", ""), attributes.get("tclass", "")
                self.links.append((len(self.gpus) - 1, target, kind, int(count)))
            case "net":
                rate = _parse_number(attributes.get("speed", "0")) * MEGABIT
                if rate > 0:
                    key = (host, attributes.get("name", ""), attributes.get("port", ""))
                    self.nets[key] = (rate, attributes.get("gdr", "0") == "1")

    def wiring(self) -> Wiring:
        expect(self.gpus, "holds no GPU; expected a topology of NCCL_TOPO_DUMP_FILE")
        hosts, counts = len(self.hosts), self.hosts.values()
        expect(len(set(counts)) <= 1, f"its {hosts} hosts have {min(counts)} to {max(counts)} GPUs")
        warnings = []
        gpus = len(self.gpus) // hosts
        device = Counter(device for _, device, _ in self.gpus).most_common(1)[0][0]
        if device not in PCI_DEVICES:
            warnings.append(f"its GPUs (PCI device {device or 'not stated'}) are not in the catalogue")
        fabric, links, fabric_warnings = self._fabric(gpus)
        warnings += fabric_warnings
        link_bytes_per_s = LINK_BYTES_PER_S.get(self.gpus[0][2])
        rate = self.slot_bytes_per_s or None
        if fabric != "pcie":
            rate = links * link_bytes_per_s if link_bytes_per_s else None
        nets = [rate for rate, is_direct in self.nets.values() if is_direct]
        nets = nets or [rate for rate, _ in self.nets.values()]
        if len(set(nets)) > 1:
            warnings.append("its NICs differ in speed: taken as the one that most have")
        return Wiring(
            source_format="nccl-topo",
            gpu=PCI_DEVICES.get(device),
            gpus=gpus,
            fabric=fabric,
            fabric_links=links or None,
            fabric_bytes_per_s=rate,
            sockets=max(1, len(self.sockets) // hosts),
            nics=len(nets) // hosts,
            nic_bytes_per_s=Counter(nets).most_common(1)[0][0] if nets else None,
            scale_up_nodes=hosts if hosts > 1 and fabric == "nvswitch" else None,
            warnings=tuple(warnings),
        )

    def _fabric(self, gpus: int) -> tuple[str, float, tuple[str, ...]]:
        switched: Counter[int] = Counter()
        number = {bus: index for index, (bus, _, _) in enumerate(self.gpus)}
        links: dict[tuple[int, int], int] = {}
        for gpu, target, kind, count in self.links:
            if kind == SWITCH_CLASS:
                switched[gpu] += count
            elif target in number and number[target] < gpus and gpu < gpus:
                pair = (min(gpu, number[target]), max(gpu, number[target]))
                links[pair] = max(count, links.get(pair, 0))
        if not switched:
            return find_fabric(links, gpus)
        counts = [switched[gpu] for gpu in range(len(self.gpus))]
        fewest, most = min(counts), max(counts)
        worst = f"GPU {counts.index(fewest)} has {fewest} NVLinks to the switch, others {most}"
        return "nvswitch", float(most), (f"{worst}: taken as all having {most}",) if fewest < most else ()


def _parse_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 <= value < 1e12 else 0.0


# ``nvidia-smi topo -m``: the connection between each two GPUs and NICs of a host. NV# is so many NVLinks; PIX
# and PXB stay below a PCIe host bridge, PHB passes it, NODE passes between host bridges of a socket, SYS
# between sockets (the legend below the table explains them).

ESCAPE = re.compile(r"\x1b\[[0-9;]{0,8}m")
DEVICE = re.compile(r"(GPU|NIC)[0-9]{1,4}|mlx[0-9]_[0-9a-z_]{1,24}|(?:bnxt_re|rdmap|irdma|hfi)[0-9a-z_]{1,24}")
CONNECTION = re.compile(r"X|NV[0-9]{1,3}|PIX|PXB|PHB|NODE|SYS|SOC|PSB|C2C|DIS|N/A")
BELOW_ONE_BRIDGE = ("PIX", "PXB", "PHB")
BETWEEN_SOCKETS = ("SYS", "SOC")


def read_matrix(source: Source) -> Wiring:
    rows = _matrix_rows(source)
    gpus = [name for name in rows if name.startswith("GPU")]
    links = {
        (a, b): int(connection[2:])
        for a, first in enumerate(gpus)
        for b, second in enumerate(gpus)
        if a < b and (connection := rows[first].get(second, "")).startswith("NV")
    }
    fabric, count, fabric_warnings = find_fabric(links, len(gpus))
    nics = [name for name in rows[gpus[0]] if not name.startswith("GPU")]
    near = [nic for nic in nics if any(rows[gpu].get(nic) in BELOW_ONE_BRIDGE for gpu in gpus)]
    warnings = list(fabric_warnings)
    if near and len(near) < len(nics):
        warnings.append(f"{len(nics) - len(near)} of {len(nics)} NICs are near no GPU: not counted")
    return Wiring(
        source_format="nvidia-smi-topo",
        gpus=len(gpus),
        fabric=fabric,
        fabric_links=count or None,
        sockets=_count_sockets(gpus, nics, rows),
        nics=len(near or nics),
        warnings=tuple(warnings),
    )


def _matrix_rows(source: Source) -> dict[str, dict[str, str]]:
    """Return the table: device -> device -> the connection between them."""
    columns: list[str] = []
    rows: dict[str, dict[str, str]] = {}
    for number, line in enumerate(source.text(CONFIG, errors="replace").split("\n"), 1):
        words = ESCAPE.sub("", line).split()
        if not columns:
            if words and words[0] == "GPU0" and words[1:2] != ["X"]:
                columns = [word for word in words if DEVICE.fullmatch(word)]
            continue
        if not words or not DEVICE.fullmatch(words[0]):
            if rows:
                break
            continue
        cells = words[1 : 1 + len(columns)]
        wrong = next((cell for cell in cells if not CONNECTION.fullmatch(cell)), None)
        if wrong is not None or len(cells) < len(columns):
            fault = f"{wrong[:20]!r} is no way between devices" if wrong else f"{len(cells)} of {len(columns)} ways"
            raise FormatError(f"{words[0]}: {fault}; expected such as NV18, PIX or SYS", source.path, number)
        expect(words[0] not in rows, f"{words[0]} has a second row", source.path, number)
        rows[words[0]] = dict(zip(columns, cells, strict=True))
    gpus = [name for name in columns if name.startswith("GPU")]
    absent = next((name for name in gpus if name not in rows), None)
    if not gpus or absent:
        missing = f"the row of {absent}" if absent else "a table that begins with GPU0"
        raise FormatError(f"lacks {missing}; expected what nvidia-smi topo -m prints", source.path)
    return rows


def _count_sockets(gpus: list[str], nics: list[str], rows: dict[str, dict[str, str]]) -> int:
    """Count the sets of GPUs that reach each other without SYS; where NVLinks hide it, NICs may show it."""
    connections = {cell for gpu in gpus for name, cell in rows[gpu].items() if name in gpus and name != gpu}
    if nics and all(cell in BETWEEN_SOCKETS or cell.startswith("NV") for cell in connections):
        local_nics = {frozenset(nic for nic in nics if rows[gpu].get(nic) not in BETWEEN_SOCKETS) for gpu in gpus}
        return max(1, len(local_nics))
    firsts: list[str] = []  # one GPU of each socket
    for gpu in gpus:
        if all(rows[gpu].get(first) in BETWEEN_SOCKETS for first in firsts):
            firsts.append(gpu)
    return len(firsts)


# Slurm's ``topology.conf``: which nodes are under which switch (topology/tree), or in which block. Names are
# hostlist expressions, ``tux[0-3,12]``; words are ``Key=value``, whatever their letter case; a backslash at
# its end continues a line (https://slurm.schedmd.com/topology.conf.html).

WORD = re.compile(r"([A-Za-z]{1,32})\s*=\s*([^\s=]{1,1048576})")
HOSTS = re.compile(r"(?:[^,\[]+|\[[^\]]*\]?)+")  # between commas outside of brackets
RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


class _SlurmSwitch(NamedTuple):
    line: int
    nodes: list[str]
    switches: list[str]


def read_slurm(source: Source) -> Wiring:
    switches: dict[str, _SlurmSwitch] = {}
    blocks: dict[str, int] = {}
    sizes: list[int] = []
    for number, line in _slurm_lines(source):
        words = {key.lower(): value for key, value in WORD.findall(line)}
        if "switchname" in words:
            nodes, below = (expand_hostlist(words.get(key, ""), number) for key in ("nodes", "switches"))
            for name in expand_hostlist(words["switchname"], number):
                expect(name not in switches, f"switch {name} is described twice", line=number)
                switches[name] = _SlurmSwitch(number, nodes, below)
        elif "blockname" in words:
            blocks[words["blockname"]] = len(expand_hostlist(words.get("nodes", ""), number))
            expect(blocks[words["blockname"]], f"block {words['blockname']} has no nodes", line=number)
        elif "blocksizes" in words:
            sizes = [int(size) for size in words["blocksizes"].split(",") if re.fullmatch("[0-9]{1,6}", size)]
    expect(not (switches and blocks), "has switches and blocks; Slurm takes one or the other")
    LISTED.check(sum(len(switch.nodes) for switch in switches.values()) + sum(blocks.values()))
    if not blocks:
        return _tree_wiring(switches)
    # Each block is one NVLink domain.
    (size, count), warnings = Counter(blocks.values()).most_common(1)[0], []
    if count < len(blocks):
        warnings.append(f"blocks have {min(blocks.values())} to {max(blocks.values())} nodes: taken as {size}")
    if sizes and sizes[0] > size:
        warnings.append(f"BlockSizes begins with {sizes[0]}, more than a block's {size} nodes")
    block_nodes = sum(blocks.values())
    return Wiring(source_format="slurm-topology", nodes=block_nodes, scale_up_nodes=size, warnings=tuple(warnings))


def _slurm_lines(source: Source) -> Iterator[tuple[int, str]]:
    """Yield lines without comments, continued ones joined, with the number of their first."""
    lines = enumerate((line.partition("#")[0].rstrip() for line in source.text(RESULT).split("\n")), 1)
    for first, line in lines:
        parts = [line]
        while parts[-1].endswith("\\"):
            parts[-1] = parts[-1][:-1]
            parts.append(next(lines, (0, ""))[1])
        if text := " ".join(parts).strip():
            yield first, text


def expand_hostlist(expression: str, line: int | None = None) -> list[str]:
    """Return the names of a hostlist expression."""
    names: list[str] = []
    for part in HOSTS.findall(expression):
        heads = [""]
        for piece in re.split(r"(\[[^\[\]]*\])", part):
            if piece.startswith("["):
                numbers = list(_range_numbers(piece[1:-1], line))
                LISTED.check(len(heads) * len(numbers) + len(names))
                heads = [head + number for head in heads for number in numbers]
            elif "[" in piece or "]" in piece:
                raise FormatError(f"{part[:40]!r} has a bracket without its other", line=line)
            else:
                heads = [head + piece for head in heads]
        names += heads
    return names


def _range_numbers(ranges: str, line: int | None) -> Iterator[str]:
    for part in ranges.split(","):
        match = RANGE.fullmatch(part)
        if match is None:
            raise FormatError(f"{part[:40]!r} is no range; expected such as 0-3", line=line)
        first, last = match[1], match[2] or match[1]
        expect(int(first) <= int(last), f"{part} counts down", line=line)
        LISTED.check(int(last) - int(first))
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _tree_wiring(switches: Mapping[str, _SlurmSwitch]) -> Wiring:
    expect(switches, "names no switch; expected lines such as SwitchName=s0 Nodes=tux[0-3]")
    parents: dict[str, str] = {}
    for name, switch in switches.items():
        for below in switch.switches:
            expect(below in switches, f"switch {name} names {below}, which no line describes", line=switch.line)
            parents.setdefault(below, name)
    try:
        upwards = [*TopologicalSorter({name: switch.switches for name, switch in switches.items()}).static_order()]
    except CycleError as error:
        start = min(error.args[1], key=[*switches].index)
        raise FormatError(f"switch {start} is below itself", line=switches[start].line) from None
    roots = [name for name in switches if name not in parents]
    if len(roots) > 1:
        raise FormatError(
            f"no switch joins {roots[0]} and {roots[1]}: nodes under one cannot reach those under the other",
            line=switches[roots[1]].line,
        )
    leaves = {name: len(switch.nodes) for name, switch in switches.items() if switch.nodes}
    expect(leaves, "no switch has nodes; expected SwitchName=... Nodes=...")
    for name, switch in switches.items():
        expect(switch.nodes or switch.switches, f"switch {name} has neither nodes nor switches", line=switch.line)
    switches_of_node = Counter(node for switch in switches.values() for node in switch.nodes)
    warnings = []
    if repeated := sum(count > 1 for count in switches_of_node.values()):
        warnings.append(f"{repeated} nodes are on several switches: counted on each, as a leaf has them")
    size = max(leaves.values())
    if min(leaves.values()) < size:
        warnings.append(f"leaf switches have {min(leaves.values())} to {size} nodes: taken as {size}")
    above = {parents[leaf] for leaf in leaves if leaf in parents}
    pods = [sum(1 for below in switches[name].switches if below in leaves) for name in above if name in parents]
    depth: dict[str, int] = {}
    for name in reversed(upwards):
        depth[name] = depth[parents[name]] + 1 if name in parents else 0
    depths = {depth[leaf] for leaf in leaves}
    if len(depths) > 1:
        warnings.append("leaf switches lie at different depths: pods are those of the lowest")
    if max(depths) > 2:
        warnings.append("more than three tiers of switches: those above the third are left out")
    return Wiring(
        source_format="slurm-topology",
        nodes=len(switches_of_node),
        leaf_nodes=size if len(leaves) > 1 else None,
        pod_nodes=size * max(pods) if pods else None,
        warnings=tuple(warnings),
    )


# ASTRA-sim's analytical network (astra-network-analytical, common/NetworkParser): lists with one entry per dimension,
# the innermost first; GB/s of one direction, nanoseconds.
DIMENSIONS = re.compile(r"^\s*(topology|npus_count|bandwidth|latency)\s*:\s*\[([^\]\n]*)\]", re.MULTILINE)
FABRICS = {"switch": "nvswitch", "fullyconnected": "nvlink-mesh"}


def read_astra(source: Source) -> Wiring:
    lists = {match[1]: re.findall(r"[^\s,]+", match[2]) for match in DIMENSIONS.finditer(source.text(CONFIG))}
    with prefix_errors("npus_count and bandwidth must be numbers", source.path):
        counts = [int(word) for word in lists.get("npus_count", ())]
        rates = [float(word) * GB for word in lists.get("bandwidth", ())]
    kinds = [word.strip("\"'").lower() for word in lists.get("topology", ())]
    same = len(kinds) == len(counts) == len(rates)
    if not kinds or not same or min(counts) < 1 or not 0 < min(rates) <= max(rates) < inf:
        raise FormatError("needs a topology, a count and a bandwidth above zero for each dimension", source.path)
    warnings = []
    if kinds[0] not in FABRICS:
        warnings.append(
            f"the innermost dimension is a {kinds[0]}; taken for a switch of its bandwidth that reduces nothing"
        )
    if len(kinds) > 2:
        warnings.append("dimensions beyond the second are joined: the slowest of them counts")
    nodes = prod(counts[1:])
    GPUS.check(nodes * counts[0])
    return Wiring(
        "ASTRA-sim",
        gpus=counts[0],
        fabric=FABRICS.get(kinds[0], "nvswitch"),
        fabric_bytes_per_s=rates[0],
        in_switch_reduction=None if kinds[0] == "switch" else False,
        nics=counts[0] if len(rates) > 1 else None,
        nic_bytes_per_s=min(rates[1:]) if len(rates) > 1 else None,
        nodes=nodes,
        warnings=tuple(warnings),
    )


# SimAI's ns-3 topology (astra-sim-alibabacloud/inputs/topo/gen_Topo_Template.py): nodes, GPUs per server, NVSwitches,
# other switches, links and the GPU in the first line; the switches in the second; then a link per line.
SIMAI_LINK = re.compile(r"\s*(\d{1,9}) (\d{1,9}) (\d{1,9}(?:\.\d{1,9})?)Gbps\s")
SIMAI_GPUS = {"a100": "a100-sxm-80gb", "a800": "a800-sxm-80gb", "h100": "h100-sxm", "h800": "h800-sxm", "h20": "h20"}


def read_simai(source: Source) -> Wiring:
    lines = source.each_line()
    head = next(lines, "").split()
    if len(head) < 6 or not all(word.isdecimal() and len(word) < 10 for word in head[:5]):
        raise FormatError("expected nodes, GPUs per server, NVSwitches, switches, links and a GPU", source.path, 1)
    nodes, gpus, nvswitches, switches = (int(word) for word in head[:4])
    count = nodes - nvswitches - switches
    if gpus < 1 or count < gpus or count % gpus:
        raise FormatError(f"{count} GPUs are no multiple of {gpus} per server", source.path, 1)
    GPUS.check(count)
    up, out = Counter[float](), Counter[float]()  # links of GPUs to NVSwitches and to other switches, by rate
    for number, line in enumerate(lines, 2):
        match = SIMAI_LINK.match(line)
        if match is None:
            if number > 2 and line.strip():
                raise FormatError("expected a link: source, target, rate in Gbps, delay", source.path, number)
            continue
        source_node, target, rate = int(match[1]), int(match[2]), float(match[3]) * GB / 8
        gpu, neighbour = min(source_node, target), max(source_node, target)
        if gpu < count <= neighbour < count + nvswitches:
            up[rate] += 1
        elif gpu < count <= neighbour:
            out[rate] += 1
    several = ("links of one kind have several rates; the usual one counts",)
    return Wiring(
        "SimAI",
        gpu=SIMAI_GPUS.get(head[5].lower()),
        gpus=gpus,
        fabric="nvswitch" if up else None,
        fabric_bytes_per_s=up.most_common(1)[0][0] if up else None,
        nics=round(out.total() / (count // gpus)) or None,
        nic_bytes_per_s=out.most_common(1)[0][0] if out else None,
        nodes=count // gpus,
        warnings=several if len(up) > 1 or len(out) > 1 else (),
    )


# Calculon's system (calculon/system.py): networks from the innermost out; GB/s of one direction.
def read_calculon(source: Source) -> Wiring:
    with prefix_errors("is no system of Calculon", source.path, (msgspec.DecodeError, KeyError, TypeError, ValueError)):
        system = msgspec.json.decode(source.data(CONFIG))
        networks = [(int(network["size"]), float(network["bandwidth"]) * GB) for network in system["networks"]]
    if not networks or not all(0 < size < inf and 0 < rate < inf for size, rate in networks):
        raise FormatError("needs networks with a size and a bandwidth above zero", source.path)
    unused = "its rates of matrix products, memory and collectives are not used: ours are measured"
    return Wiring(
        "Calculon",
        gpus=networks[0][0],
        fabric="nvswitch",
        fabric_bytes_per_s=networks[0][1],
        nics=networks[0][0] if len(networks) > 1 else None,
        nic_bytes_per_s=networks[1][1] if len(networks) > 1 else None,
        warnings=(unused,),
    )
