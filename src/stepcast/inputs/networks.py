"""Networks as other simulators describe them: ASTRA-sim's YAML, SimAI's ns-3 topology, Calculon's system JSON."""

import re
from collections import Counter
from math import inf

import msgspec

from stepcast.inputs.source import FormatError, Source, prefix_errors
from stepcast.ir.limits import CONFIG, GPUS
from stepcast.ir.measured import Wiring

GB = 1e9

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
    nodes = 1
    for count in counts[1:]:
        nodes *= count
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
    up: Counter[float] = Counter()
    out: dict[int, list[float]] = {}
    for number, line in enumerate(lines, 2):
        match = SIMAI_LINK.match(line)
        if match is None:
            if number > 2 and line.strip():
                raise FormatError("expected a link: source, target, rate in Gbps, delay", source.path, number)
            continue
        source_node, target, rate = int(match[1]), int(match[2]), float(match[3]) * GB / 8
        gpu, other = min(source_node, target), max(source_node, target)
        if gpu < count <= other < count + nvswitches:
            up[rate] += 1
        elif gpu < count <= other:
            out.setdefault(gpu, []).append(rate)
    nics = sum(map(len, out.values())) / (count // gpus)
    rates = Counter(rate for each in out.values() for rate in each)
    return Wiring(
        "SimAI",
        gpu=SIMAI_GPUS.get(head[5].lower()),
        gpus=gpus,
        fabric="nvswitch" if up else None,
        fabric_bytes_per_s=up.most_common(1)[0][0] if up else None,
        nics=round(nics) or None,
        nic_bytes_per_s=rates.most_common(1)[0][0] if rates else None,
        nodes=count // gpus,
        warnings=()
        if len(up) < 2 and len(rates) < 2
        else ("links of one kind have several rates; the usual one counts",),
    )


# Calculon's system (calculon/system.py): networks from the innermost out; GB/s of one direction.


def read_calculon(source: Source) -> Wiring:
    with prefix_errors("is no system of Calculon", source.path, (msgspec.DecodeError, KeyError, TypeError, ValueError)):
        networks = [
            (int(network["size"]), float(network["bandwidth"]) * GB)
            for network in msgspec.json.decode(source.data(CONFIG))["networks"]
        ]
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
