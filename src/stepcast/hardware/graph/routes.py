"""The links that messages between GPUs take, many messages at once."""

import numpy as np

from stepcast.hardware.graph.direct import along_torus, through_dragonfly
from stepcast.hardware.graph.network import Network
from stepcast.hardware.graph.switched import switched
from stepcast.hardware.graph.ways import RouteError, Ways, all_of, entries
from stepcast.hardware.node import FabricKind
from stepcast.hardware.topology import NetworkKind
from stepcast.ir.flows import Floats, Ints

__all__ = ["RouteError", "Ways", "check_working", "routes"]


def routes(network: Network, source: Ints, target: Ints, keys: Ints | None = None) -> Ways:
    """The way of each message from GPU *source* to GPU *target*; *keys* tell messages of a pair apart.

    Messages stay on the fabric within a scale-up domain. Between domains each GPU uses the NICs next to it.
    On rails a message first goes over the fabric to the GPU of its node that is on the target's rail, as
    NCCL does (PXN); elsewhere the switches join all NICs.
    """
    cluster = network.cluster
    keys = np.zeros(len(source), np.int64) if keys is None else keys
    domain = cluster.domain_gpus
    apart = source // domain != target // domain
    inside, outside = np.flatnonzero(~apart & (source != target)), np.flatnonzero(apart)
    parts = [within(network, inside, source[inside], target[inside])]
    if len(outside):
        if cluster.topology.kind is NetworkKind.TORUS:
            found = along_torus(network, source[outside] // domain, target[outside] // domain)
            parts.append(found._replace(row=outside[found.row]))
        else:
            parts.append(_between(network, outside, source[outside], target[outside], keys[outside]))
    ways = all_of(parts)
    check_working(network, ways)
    return ways


def within(network: Network, row: Ints, source: Ints, target: Ints) -> Ways:
    """Over the fabric of a node, or of a scale-up domain."""
    if not len(row):
        return all_of([])
    fabric, gpus = network.cluster.node.fabric, network.cluster.node.gpus
    node, start = np.divmod(source, gpus)
    end = target % gpus
    if fabric.kind is FabricKind.NVSWITCH:
        return over_ports(network, row, source, target)
    if fabric.kind is FabricKind.NVLINK_MESH:
        return entries(row, network["edge"].at(node, start, end))
    parts: list[Ways] = []
    hosted = np.ones(len(row), bool)
    if fabric.kind is FabricKind.NVLINK_PAIRS:
        hosted = start // 2 != end // 2
        parts.append(entries(row[~hosted], network["bridge"].at(node, start)[~hosted]))
    parts += [
        entries(row[hosted], network["slot up"].at(node, start)[hosted]),
        entries(row[hosted], network["slot down"].at(node, end)[hosted]),
    ]
    if "socket" in network.blocks:
        per_socket = max(1, gpus // fabric.sockets)
        left, right = (np.minimum(place // per_socket, fabric.sockets - 1) for place in (start, end))
        across = hosted & (left != right)
        parts.append(entries(row[across], network["socket"].at(node, left, right)[across]))
    return all_of(parts)


def over_ports(network: Network, row: Ints, sender: Ints, receiver: Ints) -> Ways:
    """From the ports of *sender* to those of *receiver*, evenly over all switches that both reach."""
    gpus = network.cluster.node.gpus
    up, down = network["port up"], network["port down"]
    planes = up.shape[2]
    at, plane = np.repeat(np.arange(len(row)), planes), np.tile(np.arange(planes), len(row))
    out = up.at(*np.divmod(sender[at], gpus), plane)
    into = down.at(*np.divmod(receiver[at], gpus), plane)
    share = np.full(len(at), 1 / planes)
    if network.alive is not None and planes > 1:
        works = network.alive[out] & network.alive[into]
        count = np.bincount(at, works, len(row))[at]
        kept = works | (count == 0)  # a port that failed everywhere is told by its name
        at, out, into = at[kept], out[kept], into[kept]
        share = 1 / np.maximum(count[kept], 1)
    return all_of([entries(row[at], out, share), entries(row[at], into, share)])


def _between(network: Network, row: Ints, source: Ints, target: Ints, keys: Ints) -> Ways:
    """Over the NICs: along the fabric to the right rail where there are rails, then through the switches."""
    gpus, nics = network.cluster.node.gpus, network.cluster.node.nics
    parts: list[Ways] = []
    if network.on_rails:
        first_nic = network.nic_slots[0][:, 0]
        off_rail = first_nic[source % gpus] != first_nic[target % gpus]
        if off_rail.any():
            handed = np.where(off_rail, source // gpus * gpus + target % gpus, source)
            parts.append(within(network, row[off_rail], source[off_rail], handed[off_rail]))
            source = handed
    if "slot up" in network.blocks:
        up, down = network["slot up"], network["slot down"]
        parts.append(entries(row, up.at(*np.divmod(source, gpus))))
        parts.append(entries(row, down.at(*np.divmod(target, gpus))))
    at, out, into, share = _nics(network, source, target)
    parts.append(entries(row[at], network["nic up"].at(*np.divmod(out, nics)), share))
    parts.append(entries(row[at], network["nic down"].at(*np.divmod(into, nics)), share))
    through = (through_dragonfly if network.topology.kind is NetworkKind.DRAGONFLY else switched)(
        network, out, into, keys[at]
    )
    parts.append(Ways(row[at][through.row], through.link, through.share * share[through.row]))
    return all_of(parts)


def _nics(network: Network, source: Ints, target: Ints) -> tuple[Ints, Ints, Ints, Floats]:
    """Message by message the NICs it leaves and arrives by, and the share that goes between the two.

    A GPU with several NICs has each talk to the same one of its peer.
    """
    nic, share = _working_slots(network)
    nics = network.cluster.node.nics
    slots = nic.shape[1]
    gpus = network.cluster.node.gpus
    if slots == 1:
        at = np.arange(len(source))
        return (
            at,
            source // gpus * nics + nic[source, 0],
            target // gpus * nics + nic[target, 0],
            np.ones(len(at)),
        )
    alike = (share[source] == share[target]).all(axis=1)
    at = np.repeat(np.arange(len(source)), slots * slots)
    left = np.tile(np.repeat(np.arange(slots), slots), len(source))
    right = np.tile(np.arange(slots), len(source) * slots)
    part = share[source[at], left] * share[target[at], right]
    part = np.where(alike[at], np.where(left == right, share[source[at], left], 0.0), part)
    used = part > 0
    reached = np.bincount(at[used], minlength=len(source)) > 0
    if not reached.all():
        lost = int(np.argmin(reached))
        ends = (f"node {gpu // gpus} GPU {gpu % gpus}" for gpu in (int(source[lost]), int(target[lost])))
        raise RouteError("no way is left from {} to {}: all NICs of one have failed".format(*ends))
    at, left, right = at[used], left[used], right[used]
    out = source[at] // gpus * nics + nic[source[at], left]
    into = target[at] // gpus * nics + nic[target[at], right]
    return at, out, into, part[used]


def _working_slots(network: Network) -> tuple[Ints, Floats]:
    """For every GPU its NICs and the share of each, those that failed left out."""
    nic, share = network.nic_slots
    nic, share = np.tile(nic, (network.nodes, 1)), np.tile(share, (network.nodes, 1))
    if network.alive is None:
        return nic, share
    node = np.arange(network.gpus)[:, None] // network.cluster.node.gpus
    works = network.alive[network["nic up"].at(node, nic)] & network.alive[network["nic down"].at(node, nic)]
    share = share * works
    left = share.sum(axis=1, keepdims=True)
    return nic, np.divide(share, left, out=np.zeros_like(share), where=left > 0)


def check_working(network: Network, ways: Ways) -> None:
    """Links without a way round must work."""
    if network.alive is None or not len(ways.link):
        return
    broken = np.flatnonzero(~network.alive[ways.link])
    if len(broken):
        raise RouteError(
            f"{network.links.name(int(ways.link[broken[0]]))} has failed, and messages have no other way"
        )
