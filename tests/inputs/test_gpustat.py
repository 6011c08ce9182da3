"""Peak memory in gpustat logs."""

import pytest

from stepcast.inputs.optimus_log import PRINTS, read_gpustat
from stepcast.inputs.source import FormatError, Source
from stepcast.units import MIB
from tests.shared import DATA, needs_data

LOG = """===== 2025-12-24 11:19:55 =====
s8             Wed Dec 24 11:19:56 2025  560.35.05
[0] NVIDIA A40 | 48°C,   0 % |   120 / 46068 MB |
[1] NVIDIA A40 | 50°C,  99 % |  9000 / 46068 MB | user(8990M)

===== 2025-12-24 11:19:57 =====
[0] NVIDIA A40 | 46°C,   0 % |  8745 / 46068 MB |
[1] NVIDIA A40 | 49°C,   0 % |     0 / 46068 MB |
"""


def test_peak_of_each_gpu() -> None:
    assert PRINTS["gpustat"].search(LOG)
    assert read_gpustat(Source("log", LOG.encode())) == (8745 * MIB, 9000 * MIB)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "holds no GPU"),
        (LOG.replace("[0]", "[2]"), "GPU 0 is never shown"),
        (LOG.replace("8745 /", "98745 /"), "uses 98745 of 46068"),
    ],
)
def test_bad_logs_are_told(text: str, expected: str) -> None:
    with pytest.raises(FormatError, match=expected):
        read_gpustat(Source("log", text.encode()))


@needs_data("optimus-sweep")
def test_known_peaks_of_the_seeds_run() -> None:
    path = DATA / "optimus-sweep" / "20251224_105911_gpustat_TP1_DP1_PP8_MBS1_GBS32.log"
    peaks = [peak // MIB for peak in read_gpustat(Source(path))]
    assert peaks == [8745, 3711, 3983, 3921, 3883, 3823, 3779, 10071]
