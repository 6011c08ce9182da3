"""The pace of many GPUs that wait for one another: that of the slowest.

GPUs of one kind hold different clocks under the same power limit. Sinha et al., "Not All GPUs Are Created
Equal" (SC 2022, arXiv 2208.11035), ran the same work on 90 % of the GPUs of five clusters: on average their
times differ by 8 %, outliers left out. Whiskers of a box plot, beyond which values count as outliers, stand
5.4 standard deviations of normal values apart, so one is 1.5 %. MLPerf bounds it from above: the same
run on eight GPUs in nodes of different makers differs by 1.2 % (standard deviation, six groups of rows),
which the slowest of eight would do if single ones differed by 2.0 %; and "5 % and higher differences on an
8-gpu node" (stas00/ml-engineering, compute/accelerator) are those of 1.75 %.
"""

from functools import lru_cache

# Standard deviation of a GPU's time for work that its clock decides, over that of the usual one.
VARIATION = 0.015


@lru_cache(maxsize=1024)
def slowest(gpus: int) -> float:
    """How much longer the slowest of *gpus* is expected to take than the usual one.

    The expected largest of n normal values: Blom, Statistical Estimates and Transformed Beta-Variables, 1958.
    """
    if gpus < 2:
        return 1.0
    from statistics import NormalDist

    return round(1.0 + VARIATION * NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25)), 4)
