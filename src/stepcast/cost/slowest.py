"""The pace of many GPUs that wait for one another: that of the slowest.

GPUs of one kind hold different clocks under the same power limit. Sinha et al., "Not All GPUs Are Created
Equal" (SC 2022, arXiv 2208.11035), ran the same work on 90 % of the GPUs of five clusters: times differ by 8 %
on average between the slowest and the fastest that is no outlier. Whiskers of a box plot of normal values stand
5.4 standard deviations apart, so one is 1.5 %. MLPerf says much the same: times of the same run on nodes of
eight GPUs of several makers differ by 1.1 % (seven groups of 3 to 7 rows), which is the deviation of the slowest
of eight where a single GPU's is 1.8 %.
"""

from functools import lru_cache

# Standard deviation of a GPU's time for work that its clock decides, over that of the usual one.
VARIATION = 0.015


@lru_cache(maxsize=1024)
def slowest(gpus: int) -> float:
    """How much longer the slowest of *gpus* is expected to take than the usual one.

    The expected largest of n normal values: Blom, "Statistical Estimates and Transformed Beta-Variables" (1958).
    """
    if gpus < 2:
        return 1.0
    from statistics import NormalDist

    return round(1.0 + VARIATION * NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25)), 4)
