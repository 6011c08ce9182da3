"""NCCL's own view of a node, which NCCL_TOPO_DUMP_FILE writes: XML of CPUs, PCI devices, GPUs and NICs.

What its attributes mean stands in NVIDIA/nccl, src/graph/xml.cc and topo.cc: ``speed`` of a net is in Mb/s,
``tclass`` 0x068000 of an nvlink is an NVSwitch, and the count of links is of that target.
"""

import re
from collections import Counter
from xml.parsers import expat

from stepcast.inputs.source import FormatError, Source
from stepcast.ir.limits import CONFIG
from stepcast.ir.wiring import Wiring, fabric_of

SWITCH_CLASS = "0x068000"
MEGABIT = 1e6 / 8
DEEPEST = 64
# PCI device -> GPU of the catalogue (NVIDIA/open-gpu-kernel-modules, README.md; the PCI ID repository).
DEVICES = {
    "0x1db1": "v100-sxm-16gb",
    "0x1db4": "v100-pcie-16gb",
    "0x1db5": "v100-sxm-32gb",
    "0x1db6": "v100-pcie-32gb",
    "0x1eb8": "t4",
    "0x20b0": "a100-sxm-40gb",
    "0x20b2": "a100-sxm-80gb",
    "0x20b5": "a100-pcie-80gb",
    "0x20b7": "a30",
    "0x20f1": "a100-pcie-40gb",
    "0x20f3": "a800-sxm-80gb",
    "0x2204": "rtx-3090",
    "0x2230": "rtx-a6000",
    "0x2235": "a40",
    "0x2236": "a10",
    "0x2324": "h800-sxm",
    "0x2329": "h20",
    "0x2330": "h100-sxm",
    "0x2331": "h100-pcie",
    "0x2335": "h200",
    "0x2342": "gh200",
    "0x2348": "gh200-144gb",
    "0x2684": "rtx-4090",
    "0x26b1": "rtx-6000-ada",
    "0x26b5": "l40",
    "0x26b9": "l40s",
    "0x27b8": "l4",
    "0x2901": "b200",
    "0x2941": "gb200",
    "0x2b85": "rtx-5090",
    "0x3182": "b300",
    "0x31c2": "gb300",
    "0x74a1": "mi300x",
    "0x74a5": "mi325x",
}
# Compute capability -> one NVLink, each way (NVIDIA's datasheets: 2.0 to 4.0 25 GB/s, 5.0 50 GB/s).
LINK_BYTES_PER_S = {"60": 20e9, "70": 25e9, "80": 25e9, "86": 14.0625e9, "90": 25e9, "100": 50e9, "103": 50e9}


def looks_like(head: str) -> bool:
    return re.search(r"<system\b[^>]*\bversion=", head[:4096]) is not None and "<cpu" in head


def read(source: Source) -> Wiring:
    found = _Dump()
    parser = expat.ParserCreate()
    parser.StartElementHandler = found.start
    parser.EndElementHandler = found.end
    parser.StartDoctypeDeclHandler = _no_doctype
    try:
        parser.Parse(source.text(CONFIG), True)
    except expat.ExpatError as error:
        raise FormatError(f"is not XML: {expat.ErrorString(error.code)}", source.path, error.lineno) from None
    return found.wiring()


def _no_doctype(*_: object) -> None:
    raise FormatError("declares a document type; a topology that NCCL wrote has none")


class _Dump:
    """What has been read: GPUs, their NVLinks, and NICs."""

    def __init__(self) -> None:
        self.open: list[tuple[str, dict[str, str]]] = []
        self.gpus: list[tuple[str, str, str]] = []  # bus id, device, compute capability
        self.links: list[tuple[int, str, str, int]] = []  # GPU, target, its class, count
        self.nets: dict[tuple[str, str, str], tuple[float, bool]] = {}  # host, name, port -> rate, direct
        self.hosts: Counter[str] = Counter()
        self.sockets: set[tuple[str, str]] = set()
        self.slot_bytes_per_s = 0.0

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if len(self.open) == DEEPEST:
            raise FormatError(f"has more than {DEEPEST} elements inside each other")
        self.open.append((name, attributes))
        match name:
            case "gpu":
                self._gpu(attributes)
            case "nvlink" if self.gpus:
                count = _whole(attributes.get("count", "0"), "count of an nvlink")
                target = attributes.get("target", "")
                self.links.append((len(self.gpus) - 1, target, attributes.get("tclass", ""), count))
            case "net":
                self._net(attributes)

    def end(self, name: str) -> None:
        self.open.pop()

    def _inside(self, tag: str) -> dict[str, str]:
        """The attributes of the nearest open element called *tag*."""
        return next((attributes for name, attributes in reversed(self.open) if name == tag), {})

    def _gpu(self, attributes: dict[str, str]) -> None:
        device, cpu = self._inside("pci"), self._inside("cpu")
        host = cpu.get("host_hash", "")
        self.hosts[host] += 1
        self.sockets.add((host, cpu.get("numaid", "")))
        self.gpus.append((device.get("busid", ""), device.get("device", "").lower(), attributes.get("sm", "")))
        speed = re.match(r"([0-9.]{1,8}) GT/s", device.get("link_speed", ""))
        width = device.get("link_width", "0")
        if speed and width.isdigit() and _number(speed[1]) >= 8:
            # From PCIe 3.0 on 128 of 130 bits are data.
            self.slot_bytes_per_s = _number(speed[1]) * 1e9 / 8 * int(width[:3]) * 128 / 130

    def _net(self, attributes: dict[str, str]) -> None:
        rate = _number(attributes.get("speed", "0")) * MEGABIT
        host = self._inside("cpu").get("host_hash", "")
        key = (host, attributes.get("name", ""), attributes.get("port", ""))
        if rate > 0:
            self.nets[key] = (rate, attributes.get("gdr", "0") == "1")

    def wiring(self) -> Wiring:
        if not self.gpus:
            raise FormatError("holds no GPU; expected a topology of NCCL_TOPO_DUMP_FILE")
        hosts = len(self.hosts)
        warnings = []
        if len(set(self.hosts.values())) > 1:
            raise FormatError(f"its {hosts} hosts have {min(self.hosts.values())} to {max(self.hosts.values())} GPUs")
        gpus = len(self.gpus) // hosts
        device = Counter(device for _, device, _ in self.gpus).most_common(1)[0][0]
        if device not in DEVICES:
            warnings.append(f"its GPUs (PCI device {device or 'not told'}) are not in the catalogue")
        fabric, links, told = self._fabric(gpus)
        warnings += told
        link_bytes_per_s = LINK_BYTES_PER_S.get(self.gpus[0][2])
        rate = self.slot_bytes_per_s or None
        if fabric != "pcie":
            rate = links * link_bytes_per_s if link_bytes_per_s else None
        direct = {key: rate for key, (rate, direct) in self.nets.items() if direct}
        nets = direct or {key: rate for key, (rate, _) in self.nets.items()}
        nics = len(nets) // hosts
        if len(set(nets.values())) > 1:
            warnings.append("its NICs differ in speed: taken as the one that most have")
        return Wiring(
            told_by="nccl-topo",
            gpu=DEVICES.get(device),
            gpus=gpus,
            fabric=fabric,
            fabric_links=links or None,
            fabric_bytes_per_s=rate,
            sockets=max(1, len(self.sockets) // hosts),
            nics=nics,
            nic_bytes_per_s=Counter(nets.values()).most_common(1)[0][0] if nets else None,
            scale_up_nodes=hosts if hosts > 1 and fabric == "nvswitch" else None,
            warnings=tuple(warnings),
        )

    def _fabric(self, gpus: int) -> tuple[str, float, list[str]]:
        switched: Counter[int] = Counter()
        number = {bus: place for place, (bus, _, _) in enumerate(self.gpus)}
        between: dict[tuple[int, int], int] = {}
        for gpu, target, kind, count in self.links:
            if kind == SWITCH_CLASS:
                switched[gpu] += count
            elif target in number and number[target] < gpus and gpu < gpus:
                pair = (min(gpu, number[target]), max(gpu, number[target]))
                between[pair] = max(count, between.get(pair, 0))
        if not switched:
            fabric, links, told = fabric_of(between, gpus)
            return fabric, links, list(told)
        counts = [switched[gpu] for gpu in range(len(self.gpus))]
        if min(counts) == max(counts):
            return "nvswitch", float(counts[0]), []
        fewest, most = min(counts), max(counts)
        worst = f"GPU {counts.index(fewest)} has {fewest} NVLinks to the switch, others {most}"
        return "nvswitch", float(most), [f"{worst}: taken as all having {most}"]


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 <= value < 1e12 else 0.0


def _whole(text: str, what: str) -> int:
    if not re.fullmatch(r"[0-9]{1,4}", text):
        raise FormatError(f"{what} is {text[:20]!r}; expected a whole number")
    return int(text)
