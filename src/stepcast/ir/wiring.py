"""The wiring of a node, or of the network of a cluster, as files of other tools describe it."""

from stepcast.ir.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Wiring:
    """The statements of one file; None where it makes none. Rates are of one direction.

    ``fabric`` is what joins the GPUs of a node: nvswitch, nvlink-mesh, nvlink-pairs or pcie; ``fabric_links``
    are the NVLinks of a GPU's port on the switch, of an edge of the mesh, or of a bridge.
    """

    told_by: str  # the format that tells it
    gpu: str | None = None  # as the catalogue calls it
    gpus: int | None = None  # of a node
    fabric: str | None = None
    fabric_links: float | None = None
    fabric_bytes_per_s: float | None = None
    in_switch_reduction: bool | None = None
    sockets: int | None = None
    nics: int | None = None
    nic_bytes_per_s: float | None = None
    nodes: int | None = None
    leaf_nodes: int | None = None
    pod_nodes: int | None = None
    scale_up_nodes: int | None = None
    warnings: tuple[str, ...] = ()

    def facts(self) -> dict[str, object]:
        """Return the stated facts by name."""
        named = {name: getattr(self, name) for name in self.__slots__ if name not in ("warnings", "told_by")}
        return {"kind": "wiring", **{name: value for name, value in named.items() if value is not None}}


def find_fabric(links: dict[tuple[int, int], int], gpus: int) -> tuple[str, float, tuple[str, ...]]:
    """Return what joins *gpus* by the NVLinks between each two of them: its kind, the links of one of its parts, and
    what is not as it seems.

    A GPU has at most 18 NVLinks: where each two show more than an equal share of those, a switch joins them.
    """
    pairs = [links.get((a, b), 0) for a in range(gpus) for b in range(a + 1, gpus)]
    if not any(pairs):
        return "pcie", 0.0, ()
    fewest, most = min(pairs), max(pairs)
    if fewest == most:
        return ("nvlink-mesh" if most * (gpus - 1) <= MOST_LINKS else "nvswitch"), float(most), ()
    bridged = {pair for pair, count in links.items() if count}
    if all(a // 2 == b // 2 for a, b in bridged):
        return "nvlink-pairs", float(most), ()
    told = f"GPUs are joined by {fewest} to {most} NVLinks: taken as a mesh whose edges all have the average"
    return "nvlink-mesh", sum(pairs) / len(pairs), (told,)


MOST_LINKS = 18  # of a GPU: Hopper's and Blackwell's
