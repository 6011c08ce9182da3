"""What ``nvidia-smi topo -m`` prints: how each two GPUs and NICs of a host reach each other.

NV# is so many NVLinks; PIX and PXB stay below a PCIe host bridge, PHB passes it, NODE passes between host
bridges of a socket, SYS between sockets (the legend below the table says so).
"""

import re

from stepcast.inputs.source import FormatError, Source
from stepcast.ir.limits import CONFIG
from stepcast.ir.wiring import Wiring, fabric_of

ESCAPE = re.compile(r"\x1b\[[0-9;]{0,8}m")
HEADER = re.compile(r"^(?:\x1b\[[0-9;]{0,8}m)?[ \t]*GPU0(?:[ \t]|$)", re.MULTILINE)
DEVICE = re.compile(r"(GPU|NIC)[0-9]{1,4}|mlx[0-9]_[0-9a-z_]{1,24}|(?:bnxt_re|rdmap|irdma|hfi)[0-9a-z_]{1,24}")
WAY = re.compile(r"X|NV[0-9]{1,3}|PIX|PXB|PHB|NODE|SYS|SOC|PSB|C2C|DIS|N/A")
NEAR = ("PIX", "PXB", "PHB")


def looks_like(head: str) -> bool:
    found = HEADER.search(head)
    return found is not None and re.search(r"^GPU0[ \t]+X\b", head, re.MULTILINE) is not None


def read(source: Source) -> Wiring:
    rows = _rows(source)
    gpus = [name for name in rows if name.startswith("GPU")]
    links = {
        (a, b): int(way[2:])
        for a, first in enumerate(gpus)
        for b, second in enumerate(gpus)
        if a < b and (way := rows[first].get(second, "")).startswith("NV")
    }
    fabric, count, told = fabric_of(links, len(gpus))
    nics = [name for name in rows[gpus[0]] if not name.startswith("GPU")]
    near = [nic for nic in nics if any(rows[gpu].get(nic) in NEAR for gpu in gpus)]
    warnings = list(told)
    if near and len(near) < len(nics):
        warnings.append(f"{len(nics) - len(near)} of {len(nics)} NICs are near no GPU: not counted")
    return Wiring(
        told_by="nvidia-smi-topo",
        gpus=len(gpus),
        fabric=fabric,
        fabric_links=count or None,
        sockets=_sockets(gpus, rows),
        nics=len(near or nics),
        warnings=tuple(warnings),
    )


def _rows(source: Source) -> dict[str, dict[str, str]]:
    """The table: device -> device -> the way between them."""
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
        ways = words[1 : 1 + len(columns)]
        wrong = next((way for way in ways if not WAY.fullmatch(way)), None)
        if wrong is not None or len(ways) < len(columns):
            told = f"{wrong[:20]!r} is no way between devices" if wrong else f"{len(ways)} of {len(columns)} ways"
            raise FormatError(f"{words[0]}: {told}; expected such as NV18, PIX or SYS", source.path, number)
        if words[0] in rows:
            raise FormatError(f"{words[0]} has a second row", source.path, number)
        rows[words[0]] = dict(zip(columns, ways, strict=True))
    gpus = [name for name in columns if name.startswith("GPU")]
    absent = next((name for name in gpus if name not in rows), None)
    if not gpus or absent:
        missing = f"the row of {absent}" if absent else "a table that begins with GPU0"
        raise FormatError(f"lacks {missing}; expected what nvidia-smi topo -m prints", source.path)
    return rows


def _sockets(gpus: list[str], rows: dict[str, dict[str, str]]) -> int | None:
    """Sets of GPUs that reach each other without SYS; NVLinks hide how, and NICs may tell."""
    others = [name for name in rows[gpus[0]] if not name.startswith("GPU")]
    beside: dict[str, frozenset[str]] = {
        gpu: frozenset(nic for nic in others if rows[gpu].get(nic) not in ("SYS", "SOC")) for gpu in gpus
    }
    seen = {way for gpu in gpus for name, way in rows[gpu].items() if name in gpus and name != gpu}
    if seen <= {"SYS", "SOC"} | {way for way in seen if way.startswith("NV")} and others:
        return max(1, len(set(beside.values())))
    sockets: list[set[str]] = []
    for gpu in gpus:
        home = next((home for home in sockets if rows[gpu].get(next(iter(home))) not in ("SYS", "SOC")), None)
        if home is None:
            sockets.append({gpu})
        else:
            home.add(gpu)
    return len(sockets)
