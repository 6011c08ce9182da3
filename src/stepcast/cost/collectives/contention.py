"""What computation loses to a collective that runs beside it.

A collective's kernel keeps one thread block per channel on a multiprocessor of its own, which large matrix
kernels cannot share. While it runs, computation has the other multiprocessors, so every second of it costs
blocks / multiprocessors seconds of computing. On an H200 a stand-in of 16 copying blocks (12 % of it) costs
a transformer layer 7 to 21 %, of 24 (18 %) 12 to 21 % (tools/measure_overlap.py); Lee et al., "Characterizing
Compute-Communication Overlap" (arXiv 2507.03114), found 18.9 % on average over A100, H100, MI210 and MI250.
"""

from stepcast.cost.collectives.route import Route
from stepcast.ir.work import Collective, CollectiveKind

# DeepSeek-V3 (2024), section 3.2.2, and DeepEP, which keep 20 for dispatch and combine.
EXPERT_BLOCKS = 20


def lost_share(work: Collective, route: Route, multiprocessors: int) -> float:
    """Seconds of computing lost for each second of *work* beside it."""
    if route.ranks == 1:
        return 0.0
    blocks = EXPERT_BLOCKS if work.kind is CollectiveKind.ALL_TO_ALL else route.open_channels
    return min(1.0, blocks / multiprocessors)
