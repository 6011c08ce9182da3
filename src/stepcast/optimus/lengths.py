"""How long the samples of a shuffled step are padded, from the lengths of steps in the data's own order."""

import math
from collections.abc import Sequence
from statistics import fmean, pstdev


def shuffled_length(lengths: Sequence[float], in_order: int, rows_per_text: float, drawn: int) -> float:
    """The expected longest of *drawn* rows; *lengths* are the longest of *in_order* rows that follow each
    other, of which *rows_per_text* in a row have the same text.

    Maxima of many draws follow Gumbel's law: among k times as many they lie ln(k) times its scale higher
    (Gumbel 1958, Statistics of Extremes), and the scale is sqrt(6) / pi of their standard deviation.
    """
    texts = 1 + (in_order - 1) / rows_per_text
    scale = math.sqrt(6) / math.pi * pstdev(lengths)
    return max(1.0, float(round(fmean(lengths) + scale * math.log(drawn / texts))))
