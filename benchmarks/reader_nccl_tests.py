"""A long nccl-tests log: one table with as many rows as fill the size asked for."""

from pathlib import Path

HEAD = """# nccl-tests version 2.17.6 nccl-headers=22501 nccl-library=22501
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 8 minBytes 8 maxBytes 1073741824 step: 8(bytes) warmup iters: 1 iters: 20 agg iters: 1
#
# Using devices
{devices}
#
#                                                       out-of-place                       in-place
#     size       count      type   redop    root  time   algbw   busbw  #wrong  time   algbw   busbw  #wrong
#      (B)  (elements)                            (us)  (GB/s)  (GB/s)          (us)  (GB/s)  (GB/s)
"""
RANKS = 8


def row(size_bytes: int) -> str:
    """A row of a made-up machine: 20 us and 200 GB/s of bus bandwidth."""
    time_us = 20 + size_bytes * 2 * (RANKS - 1) / RANKS / 200e3
    algorithm = size_bytes / time_us / 1e3
    bus = algorithm * 2 * (RANKS - 1) / RANKS
    side = f"{time_us:9.2f}  {algorithm:6.2f}  {bus:6.2f}       0"
    return f"{size_bytes:12d}  {size_bytes // 4:12d}     float     sum      -1{side}{side}\n"


def grow(target_bytes: int, path: Path) -> None:
    """Write a log of about *target_bytes* at *path*."""
    device = "#  Rank {0:2d} Group  0 Pid  10000 on node-0 device {0:2d} [0000:0f:00] NVIDIA H200"
    written = 0
    with path.open("w") as log:
        written += log.write(HEAD.format(devices="\n".join(device.format(rank) for rank in range(RANKS))))
        size_bytes = 8
        while written < target_bytes:
            block = "".join(row(size_bytes + 8 * index) for index in range(1000))
            size_bytes += 8000
            written += log.write(block)
        log.write("# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 100.0\n#\n")
