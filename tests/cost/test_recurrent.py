"""The delta rule and Mamba's selective scan compared with an H200: times, and bytes that stay between the passes."""

import csv
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

import stepcast
from stepcast.cost.compute import compute_price
from stepcast.cost.fits import default_fit
from stepcast.cost.price import Bound, Price, PriceSource, matrix_rates, vector_rates
from stepcast.cost.scan_and_convolution import SCAN_KINDS, chunk_steps, scan_s
from stepcast.hardware import load_gpu
from stepcast.ir.layers.delta import rule_saved
from stepcast.ir.layers.selective import scan_saved
from stepcast.ir.recurrent import DeltaRule, RecurrentCells, SelectiveScan
from stepcast.ir.types import DType
from stepcast.ir.work import Recorded

ROWS = Path(stepcast.__file__).parent / "data" / "h200" / "linear.csv"
H200 = load_gpu("h200")
PEAK = matrix_rates(H200, DType.BF16).peak_flops


def work_of(row: dict[str, str]) -> DeltaRule | SelectiveScan:
    names = ("heads", "key_dim", "value_dim", "chunk", "batch", "seq")
    heads, key, value, chunk, batch, seq = (int(row[name]) for name in names)
    backward = row["phase"] == "backward"
    if row["mixer"] == "delta":
        return DeltaRule(batch, seq, heads, key, value, chunk, backward)
    return SelectiveScan(batch, seq, heads, key, backward)


def measured() -> list[dict[str, str]]:
    with ROWS.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("mixer", "phase", "average", "worst"),
    [
        ("delta", "forward", 0.065, 0.07),
        ("delta", "backward", 0.01, 0.01),
        ("selective", "forward", 0.09, 0.22),
        ("selective", "backward", 0.05, 0.14),
    ],
)
def test_times_are_those_of_the_h200(mixer: str, phase: str, average: float, worst: float) -> None:
    """Launches left out: what was measured was the kernels alone."""
    off = []
    for row in measured():
        if (row["mixer"], row["phase"]) == (mixer, phase):
            work = work_of(row)
            assert compute_price(work, H200, default_fit()).source is PriceSource.FITTED
            own = default_fit().scan(SCAN_KINDS[type(work)], work.backward)
            seconds = float(scan_s(work, PEAK, vector_rates(H200), own))
            off.append(abs(seconds / (float(row["us"]) * 1e-6) - 1))
    assert off
    assert mean(off) < average
    assert max(off) < worst


@pytest.mark.parametrize("row", [row for row in measured() if row["phase"] == "forward"])
def test_what_stays_between_the_passes_is_what_pytorch_reports(row: dict[str, str]) -> None:
    work = work_of(row)
    kept = rule_saved(work, 2) if isinstance(work, DeltaRule) else scan_saved(work, 2)
    assert kept == int(row["saved_bytes"])


def test_few_heads_wait_for_their_states_and_many_for_the_memory() -> None:
    def seconds(heads: int, seq: int) -> float:
        return compute_price(DeltaRule(1, seq, heads, 128, 128, 64), H200, default_fit()).seconds

    assert seconds(8, 8192) / seconds(4, 8192) < 1.3
    assert seconds(8, 16384) / seconds(8, 8192) == pytest.approx(2, rel=0.1)
    assert seconds(1024, 8192) / seconds(512, 8192) == pytest.approx(2, rel=0.05)


def test_a_slower_clock_and_memory_take_longer() -> None:
    for work in (DeltaRule(1, 4096, 32, 128, 128, 64), SelectiveScan(1, 4096, 8192, 16)):
        other = compute_price(work, load_gpu("a100-sxm-80gb"), default_fit())
        assert other.seconds > compute_price(work, H200, default_fit()).seconds
        assert other.source is PriceSource.SCALED


def test_cells_with_weights_on_chip_are_one_kernel() -> None:
    """A step of an LSTM of 128 took 2.4 to 2.7 us in fp32, and 3.9 in bf16, for which cuDNN has no such kernel."""

    def price(
        hidden: int, gates: int = 4, batch: int = 8, width: int | None = None, dtype: DType = DType.TF32
    ) -> Price:
        return compute_price(
            RecurrentCells(100, batch, hidden, width or hidden, gates, dtype=dtype), H200, default_fit()
        )

    assert price(128).seconds == pytest.approx(100 * 2.7e-6, rel=0.1)
    assert price(64).seconds < price(128).seconds / 4  # which fit into one multiprocessor
    assert price(128, batch=2048).seconds > 20 * price(128).seconds
    assert price(256, gates=1).seconds < price(256).seconds
    assert min(price(256).seconds, price(128, width=256).seconds) > 2 * price(128).seconds
    assert price(128, dtype=DType.BF16).seconds > price(128).seconds
    large = price(4096, batch=4096)
    assert large.seconds > 10 * 100 * 26e-6
    assert large.bound is not Bound.LAUNCH


def test_a_recorded_time_moves_no_bytes() -> None:
    assert Recorded(1.0).moved_bytes == 0


def test_bytes_of_a_selective_scan() -> None:
    """Five tensors as large as the input forward and eight backward, in bf16; B and C are read once, or twice."""
    work = SelectiveScan(2, 128, 64, 16, False)
    assert work.moved_bytes == 2 * (5 * work.inputs + 2 * work.shared)
    assert replace(work, backward=True).moved_bytes == 2 * (8 * work.inputs + 4 * work.shared)


def test_cells_move_their_weights_once_and_gates_and_states_each_step() -> None:
    """Each step reads and writes four gates and a state of 8 sequences in fp32."""
    one, two = (RecurrentCells(steps, 8, 256, 128, 4) for steps in (1, 2))
    step_bytes = two.moved_bytes - one.moved_bytes
    assert step_bytes == 2 * (4 + 1) * 8 * 256 * 4
    assert one.moved_bytes - step_bytes == 4 * 256 * 128 * 4


def test_states_of_a_delta_net_pass_its_chunks_one_by_one() -> None:
    """Two blocks of 64 columns run on a multiprocessor at once: 4 heads of 128 columns are 8 blocks."""
    work = DeltaRule(1, 1000, 4, 128, 128, 64, backward=False)
    assert [chunk_steps(work, sms) for sms in (132, 4, 2)] == [16, 16, 32]
    assert chunk_steps(replace(work, value_dim=32), 1) == 32
    assert chunk_steps(SelectiveScan(1, 1000, 4, 128, backward=False), 4) == 0


def test_products_with_the_states_of_a_delta_net() -> None:
    """Forward a state is read by keys, written, and read by queries. Backward it is made again (two), has gradients
    (three) and gives those of queries, keys and what was read (three). The squares of chunks vanish beside wide heads.
    """
    rule = DeltaRule(1, 4, 1, 10_000, 10_000, 1)
    assert rule.flops / (4 * 2 * 1e8) == pytest.approx(3, rel=1e-3)
    assert replace(rule, backward=True).flops / (4 * 2 * 1e8) == pytest.approx(8, rel=2e-3)


def test_solved_systems_are_written_and_read_backward() -> None:
    """Beside heads of a single element, the systems of 64 x 64 tokens in bf16: one forward, two backward."""
    rule = DeltaRule(1, 6400, 1, 1, 1, 6400)
    assert rule.moved_bytes / (6400 * 6400 * 2) == pytest.approx(1, rel=0.01)
    assert replace(rule, backward=True).moved_bytes / (6400 * 6400 * 2) == pytest.approx(2, rel=0.01)
    wide = DeltaRule(1, 1, 1, 10_000, 10_000, 1)
    assert [replace(wide, backward=way).moved_bytes / 2e8 for way in (False, True)] == pytest.approx([2, 4], rel=0.01)


def test_a_selective_scan_runs_its_forward_again_and_twice_as_much() -> None:
    scan = SelectiveScan(1, 100, 8, 16)
    assert (scan.flops, replace(scan, backward=True).flops) == (7 * 100 * 8 * 16, 21 * 100 * 8 * 16)


@pytest.mark.parametrize(
    ("gates", "hidden", "forward", "backward"),
    [(1, 384, True, False), (1, 256, True, True), (1, 385, False, False), (4, 192, True, False), (4, 128, True, True)],
)
def test_cudnn_keeps_small_weights_on_chip(gates: int, hidden: int, forward: bool, backward: bool) -> None:
    """PyTorch's use_rnn_persist_small_h: up to 384 forward and 256 backward for an RNN, half of that with gates."""
    cells = RecurrentCells(10, 8, hidden, hidden, gates)
    assert (cells.is_persistent, replace(cells, backward=True).is_persistent) == (forward, backward)


def test_projected_cells_multiply_what_they_hand_on() -> None:
    """An LSTM of 1,024 with a projection to 256 hands on 256 values: each of its four gates has 1,024 x 256 weights."""
    assert RecurrentCells(10, 8, 1024, 256, 4).flops == 2 * 10 * 8 * 4 * 1024 * 256
