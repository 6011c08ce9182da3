"""Topologies of nodes and networks as other tools write them, made small and with names of our own."""

H100_SWITCHES = "".join(
    f'<nvlink target="0000:0{place}:00.0" count="{count}" tclass="0x068000"/>'
    for place, count in ((5, 4), (6, 5), (7, 5), (8, 4))
)


def nccl_topo(
    gpus: int = 8,
    device: str = "0x2330",
    sm: str = "90",
    links: str = H100_SWITCHES,
    nics_per_gpu: int = 1,
    speed: int = 400000,
) -> str:
    """What NCCL_TOPO_DUMP_FILE writes for a host of two sockets."""
    sockets = []
    for socket in range(2):
        inside = ""
        for gpu in range(socket * gpus // 2, (socket + 1) * gpus // 2):
            nets = "".join(
                f'<pci busid="0000:{gpu}{nic}:01.0" class="0x020000" link_speed="32.0 GT/s PCIe" '
                f'link_width="16"><nic><net name="mlx5_{gpu * nics_per_gpu + nic}" dev="{gpu}" '
                f'speed="{speed}" port="1" latency="0.000000" guid="0x{gpu}{nic}" maxconn="131072" gdr="1"/>'
                "</nic></pci>"
                for nic in range(nics_per_gpu)
            )
            inside += (
                f'<pci busid="0000:{gpu}a:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" '
                f'link_width="16"><pci busid="0000:{gpu}b:00.0" class="0x030200" vendor="0x10de" '
                f'device="{device}" link_speed="32.0 GT/s PCIe" link_width="16">'
                f'<gpu dev="{gpu}" sm="{sm}" rank="{gpu}" gdr="1">{links}</gpu></pci>{nets}</pci>\n'
            )
        sockets.append(
            f'<cpu host_hash="0x1" numaid="{socket}" affinity="ffff" arch="x86_64" vendor="GenuineIntel" '
            f'familyid="6" modelid="143">\n{inside}'
            '<pci busid="0000:ff:00.0"><nic><net name="eth0" dev="9" speed="10000" port="1" gdr="0"/></nic></pci>'
            "</cpu>\n"
        )
    return f'<system version="1">\n{"".join(sockets)}</system>\n'


def gpu_matrix(gpus: int = 8, nvlinks: str = "NV18", nics: int = 8) -> str:
    """What ``nvidia-smi topo -m`` prints: a NIC beside each GPU, and one that is beside none."""
    devices = [*(f"GPU{gpu}" for gpu in range(gpus)), *(f"NIC{nic}" for nic in range(nics + 1))]

    def way(a: str, b: str) -> str:
        if a == b:
            return " X "
        first, second = int(a[3:]), int(b[3:])
        if a.startswith("GPU") and b.startswith("GPU") and nvlinks:
            return nvlinks
        if nics in (first, second) and "NIC" in a + b and not (a.startswith("GPU") and b.startswith("GPU")):
            return "SYS"
        if first == second:
            return "PIX"
        return "NODE" if first * 2 // gpus == second * 2 // gpus else "SYS"

    lines = ["\x1b[4m\t" + "\t".join([*devices, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\x1b[0m"]
    for device in devices:
        tail = ["0-47", "0", "N/A"] if device.startswith("GPU") else []
        lines.append("\t".join([device, *(way(device, other) for other in devices), *tail]))
    legend = ["", "Legend:", "", "  X    = Self", "  NV#  = Connection traversing a bonded set of # NVLinks"]
    names = ["", "NIC Legend:", "", *(f"  NIC{nic}: mlx5_{nic}" for nic in range(nics + 1)), ""]
    return "\n".join([*lines, *legend, *names])


SLURM_TWO_TIERS = """\
# topology.conf
SwitchName=s0 Nodes=dev[0-5] LinkSpeed=900
SwitchName=s1 nodes=dev[6-11]
switchname=s2 Nodes=dev[12-17]
SwitchName=top Switches=s[0-2]
"""

SLURM_THREE_TIERS = """\
SwitchName=leaf0 Nodes=gpu[001-004]
SwitchName=leaf1 Nodes=gpu[005-008]
SwitchName=leaf2 Nodes=gpu[009-012]
SwitchName=leaf3 Nodes=gpu013,gpu[014-016]
SwitchName=pod0 Switches=leaf[0-1]
SwitchName=pod1 \\
    Switches=leaf[2-3]
SwitchName=core Switches=pod[0-1]
"""

SLURM_BLOCKS = """\
BlockName=rack1 Nodes=node[01-18]
BlockName=rack2 Nodes=node[19-36]
BlockSizes=18
"""
