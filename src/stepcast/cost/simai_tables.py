"""SimAI's efficiency tables: the share of the bandwidth that a collective reaches, by size and nodes.

Source: aliyun/SimAI (MIT), astra-sim-alibabacloud/inputs/ratio: nic_ratio.csv, nvlink_ratio.csv and
ata_ratio.csv. Kept as constants, since they describe one program as it is and are not for users to change.
"""

from stepcast.units import MIB

# Rows of every column: 16 MiB, doubling up to 16 GiB.
SIZES_BYTES: tuple[int, ...] = tuple(16 * MIB * 2**row for row in range(11))

Column = tuple[float, ...]

UNMEASURED: Column = (1.0,) * len(SIZES_BYTES)
# A node count without a column takes that of 16 nodes.
DEFAULT_NODES = 16

NETWORK: dict[int, Column] = {
    1: (0.45, 0.55, 0.65, 0.69, 0.73, 0.76, 0.77, 0.78, 0.79, 0.8, 0.81),
    2: (0.32, 0.47, 0.5, 0.67, 0.85, 0.89, 0.92, 0.94, 0.95, 0.95, 0.96),
    4: (0.24, 0.38, 0.53, 0.67, 0.77, 0.85, 0.93, 0.94, 0.95, 0.96, 0.96),
    8: (0.13, 0.24, 0.39, 0.54, 0.69, 0.78, 0.9, 0.94, 0.95, 0.96, 0.96),
    16: (0.05, 0.11, 0.21, 0.38, 0.57, 0.73, 0.76, 0.92, 0.95, 0.96, 0.96),
    32: (0.044, 0.052, 0.106, 0.205, 0.387, 0.562, 0.74, 0.758, 0.923, 0.953, 0.957),
    64: (0.021, 0.042, 0.051, 0.107, 0.209, 0.384, 0.563, 0.745, 0.755, 0.914, 0.958),
    128: (0.0087, 0.021225, 0.04405, 0.0533, 0.1027, 0.1902, 0.314575, 0.553525, 0.740175, 0.7648, 0.919175),
}

NVLINK: dict[int, Column] = {
    1: (0.45, 0.55, 0.65, 0.69, 0.73, 0.76, 0.77, 0.78, 0.79, 0.8, 0.81),
    2: (0.55, 0.68, 0.74, 0.8, 0.84, 0.86, 0.87, 0.87, 0.88, 0.88, 0.88),
    4: (0.34, 0.6, 0.71, 0.74, 0.79, 0.86, 0.87, 0.87, 0.88, 0.88, 0.88),
    8: (0.16, 0.34, 0.62, 0.7, 0.78, 0.82, 0.86, 0.87, 0.88, 0.88, 0.88),
    16: (0.08, 0.16, 0.33, 0.65, 0.72, 0.75, 0.83, 0.86, 0.87, 0.88, 0.88),
    32: UNMEASURED,
    64: UNMEASURED,
    128: UNMEASURED,
}

ALL_TO_ALL: dict[int, Column] = {
    1: (0.44, 0.51, 0.6, 0.65, 0.7, 0.71, 0.74, 0.76, 0.77, 0.78, 0.78),
    2: (0.52, 0.63, 0.72, 0.76, 0.79, 0.8, 0.81, 0.81, 0.8, 0.8, 0.8),
    4: (0.67, 0.68, 0.83, 0.9, 0.92, 0.94, 0.94, 0.95, 0.95, 0.95, 0.95),
    8: (0.64, 0.67, 0.82, 0.85, 0.87, 0.89, 0.92, 0.93, 0.94, 0.94, 0.94),
    16: (0.62, 0.66, 0.66, 0.72, 0.75, 0.81, 0.85, 0.88, 0.89, 0.9, 0.9),
    32: UNMEASURED,
    64: UNMEASURED,
    128: UNMEASURED,
}

# All-to-all of groups whose tensor-parallel ranks fill a server: the column headed "Multi 16".
ALL_TO_ALL_WHOLE_SERVERS: Column = (0.86, 0.92, 0.94, 0.94, 0.94, 0.95, 0.96, 0.96, 0.96, 0.96, 0.96)


def relative_efficiency(column: Column, size_bytes: int) -> float:
    """Efficiency at *size_bytes* over that at 16 GiB: linear between rows, constant outside them."""
    if size_bytes <= SIZES_BYTES[0]:
        return column[0] / column[-1]
    for row in range(1, len(SIZES_BYTES)):
        low, high = SIZES_BYTES[row - 1], SIZES_BYTES[row]
        if size_bytes <= high:
            part = (size_bytes - low) / (high - low)
            return (column[row - 1] + part * (column[row] - column[row - 1])) / column[-1]
    return 1.0


def by_nodes(table: dict[int, Column], nodes: int) -> Column:
    return table.get(nodes, table[DEFAULT_NODES])
