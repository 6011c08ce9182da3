"""The pace of many GPUs that wait for one another: that of the slowest.

GPUs of one kind hold different clocks under the same power limit. Sinha et al., "Not All GPUs Are Created
Equal" (SC 2022, arXiv 2208.11035), ran the same work on 90 % of the GPUs of five clusters: on average their
times differ by 8 %, outliers left out. Whiskers of a box plot, beyond which values count as outliers, stand
5.4 standard deviations of normal values apart, so one is 1.5 % (V100 and MI60). "5 % and higher differences
on an 8-gpu node" (stas00/ml-engineering, compute/accelerator, of products) are those of 1.75 %: taken here.
MLPerf bounds it from above: the same run on eight GPUs in nodes of different makers differs by 1.2 % (one
standard deviation, six groups of rows), as the slowest of eight would if single ones differed by 2.0 %.
Published runs that differ in their number of GPUs alone bound it from below: 49 series grow by 2.3 % from
their smallest to their largest (median), by 1.0 % so predicted and by 0.1 % without.
"""

from functools import lru_cache

from stepcast.cost.price import Price
from stepcast.ir.layout import Layout
from stepcast.ir.work import Attention, Compute, GroupedMatmul, Matmul

# Standard deviation of a GPU's time for work that its clock decides, over that of the usual one.
VARIATION = 0.0175
CLOCKED = (Matmul, GroupedMatmul, Attention)


@lru_cache(maxsize=1024)
def slowest(gpus: int) -> float:
    """How much longer the slowest of *gpus* is expected to take than the usual one.

    The expected largest of n normal values: Blom, Statistical Estimates and Transformed Beta-Variables, 1958.
    """
    if gpus < 2:
        return 1.0
    from statistics import NormalDist

    return 1.0 + VARIATION * NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25))


def pace_of(layout: Layout, micro_batches: int) -> float:
    """What products take over the usual GPU's, on average over a step.

    The slowest GPU of all holds up its tensor ranks in every layer, its pipeline in every micro-batch and
    other replicas in every step. While a pipeline fills and drains, one stage after the other counts, each as
    slow as the slowest of its own that wait for one another.
    """
    turns, waits = micro_batches * layout.vpp, layout.pp - 1
    return (turns * slowest(layout.gpus) + waits * _stage(layout)) / (turns + waits)


def least_pace(layout: Layout, micro_batches: int) -> float:
    """No more than the pace of *layout* and others that cut the same layers on as many GPUs into more stages
    or fewer: micro-batches grow in number as stages do.
    """
    turns = micro_batches / layout.pp
    return (turns * slowest(layout.gpus) + _stage(layout)) / (turns + 1.0)


def _stage(layout: Layout) -> float:
    return slowest(max(layout.tp * layout.cp, layout.ep))


def paced(price: Price, work: Compute, pace: float) -> Price:
    """Work that waits for memory takes all GPUs equally long."""
    return price.times(pace) if isinstance(work, CLOCKED) else price


def paced_s(seconds: float, work: Compute, pace: float) -> float:
    """The seconds of ``paced`` alone."""
    return seconds * pace if isinstance(work, CLOCKED) else seconds
