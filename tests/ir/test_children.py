"""Several processes answer as one does, and say so when one of them is lost."""

import os
import signal
import sys

import pytest

from stepcast.cli.main import main
from stepcast.ir.children import WorkerPool, map_parallel

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: worker processes are forked")


def test_answers_come_in_the_order_of_the_items() -> None:
    items = list(range(500))
    assert map_parallel(str, items, 2) == [str(item) for item in items]


def test_a_process_that_is_killed_is_told_instead_of_waited_for() -> None:
    def lost(item: int) -> int:
        if item == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    with pytest.raises(ChildProcessError, match="--workers 1"), WorkerPool(lost, 2) as crew:
        list(crew.answers(range(100)))


def test_an_error_is_the_one_that_a_single_process_raises() -> None:
    def refused(item: int) -> int:
        raise ValueError(f"not {item}")

    with pytest.raises(ValueError, match="not 0"), WorkerPool(refused, 2) as crew:
        list(crew.answers(range(10)))


def test_candidates_with_too_many_micro_batches_for_their_schedule_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """DualPipe has no steady state to go by, so 300,000 micro-batches of it are refused; 1F1B has one."""
    words = ["search", "--model", "llama-3.2-1b", "--cluster", "dgx-h100", "--gpus", "2", "--workers", "1"]
    words += ["--global-batch", "300000", "--fix", "pp=2", "--fix", "micro-batch=1"]
    assert main([*words, "--allow", "schedule=1f1b,dualpipe"]) == 0
    told = capsys.readouterr().out
    assert "1f1b" in told
    assert main([*words, "--fix", "schedule=dualpipe"]) != 0
