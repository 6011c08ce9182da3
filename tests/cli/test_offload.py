"""``predict --offload`` from outside."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcast.ir.strategy import Offload, offload_of, offload_word
from tests.cli.test_main import run, run_json

LLAMA = ("predict", "--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "8")


def test_offload_moves_memory_to_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 8 billion parameters over 8 GPUs, 12 bytes each; the host has 4 more for gradients."""
    batch = ("--seq", "4096", "--global-batch", "16")
    usual = run_json(capsys, *LLAMA, *batch)["memory_bytes"]
    moved = run_json(capsys, *LLAMA, *batch, "--offload", "optimizer")["memory_bytes"]
    assert "host" not in usual
    assert usual["optimizer"] - moved["optimizer"] == pytest.approx(moved["host"]["gpu"] * 12 / 16)
    assert moved["host"]["node"] == 8 * moved["host"]["gpu"] < moved["host"]["capacity"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--offload", "moments"), "--offload 'moments': expected optimizer or activations"),
        (("--offload", "optimizer,optimizer"), "each once"),
        (("--offload", "optimizer=half"), "expected a share between 0 and 1, such as optimizer=0.5"),
        (("--offload", "activations=1.5"), "between 0 and 1, not 1.5"),
        (("--offload", "activations=nan"), "between 0 and 1, not nan"),
        (("--offload", "optimizer", "--cluster", "a40-pcie"), "a40-pcie does not describe its hosts"),
        (("--offload", "optimizer", "--to-workload", "x.txt"), "leave --offload out"),
    ],
)
def test_offload_that_cannot_be(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    status, _, err = run(capsys, *LLAMA, "--seq", "4096", *words)
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


shares = st.floats(0, 1, allow_subnormal=False)


@given(st.builds(Offload, shares, shares))
def test_what_is_written_is_read_back(offload: Offload) -> None:
    assert offload_of(offload_word(offload)) == offload


@given(st.text())
def test_no_text_gives_anything_but_an_offload_or_one_line(text: str) -> None:
    said = ""
    try:
        offload_of(text)
    except ValueError as error:
        said = str(error)
    assert len(said.splitlines()) <= 1
