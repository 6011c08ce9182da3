"""Mamba-2 without mamba-ssm: the PyTorch operations that transformers falls back to."""

from dataclasses import replace

import pytest

from stepcast.forecast.predict import compute_pricer
from stepcast.frameworks.catalog import load_profile, settle
from stepcast.generate.workload import generate
from stepcast.hardware.catalog import load_cluster
from stepcast.ir.framework import SsmKernels
from stepcast.ir.layers.mamba import eager_scan_saved, eager_scan_transient
from stepcast.ir.layout import Layout
from stepcast.ir.recurrent import Scan, scan_of
from stepcast.ir.strategy import Strategy
from stepcast.ir.workload import Phase, Role
from stepcast.models.catalog import load_model
from stepcast.units import MIB
from tests.cli.test_main import run, run_json

# One scan in bf16 inputs on an H200, PyTorch 2.x: batch, seq, heads, head_dim, state, groups, chunk ->
# milliseconds forward and backward, MiB saved (with the result) and at the peak of the backward.
MEASURED: dict[tuple[int, ...], tuple[float, float, int, int]] = {
    (1, 2048, 64, 64, 128, 1, 256): (37.239, 71.645, 742, 33569),
    (1, 2048, 24, 64, 128, 1, 256): (15.079, 28.074, 278, 12589),
    (2, 2048, 24, 64, 128, 1, 256): (29.368, 55.139, 556, 25177),
    (1, 2048, 32, 64, 128, 8, 128): (12.845, 24.379, 291, 8497),
    (1, 8192, 16, 64, 128, 1, 256): (39.278, 73.917, 739, 33569),
    (1, 1024, 64, 64, 64, 1, 256): (14.750, 24.796, 315, 8577),
}


@pytest.mark.parametrize("shape", MEASURED)
def test_scans_as_measured(shape: tuple[int, ...]) -> None:
    batch, seq, heads, head_dim, state, groups, chunk = shape
    base, cluster = load_model("mamba2-1.3b"), load_cluster("h200")
    assert base.hybrid is not None
    hybrid = replace(base.hybrid, mamba_heads=heads, mamba_head_dim=head_dim, state=state, groups=groups, chunk=chunk)
    model = replace(base, hybrid=hybrid, heads=heads, kv_heads=heads, head_dim=head_dim, hidden=heads * head_dim // 2)
    software = settle(load_profile("transformers"), model, "h200", Layout(), {}).framework
    eager = replace(software, ssm_kernels=SsmKernels.EAGER)
    workload = generate(model, Strategy(Layout(), batch, batch, seq), eager)
    price = compute_pricer(workload, cluster)
    scan = next(each for each in workload.stages[0].body_layers() if each.role is Role.MAMBA_SCAN)
    ops = [op for phase in Phase for op in scan.ops(phase) if "convolution" not in op.name]
    forward_ms, backward_ms, saved_mib, peak_mib = MEASURED[shape]
    seconds = [price(op.work).seconds for op in ops]  # type: ignore[arg-type]
    spent_ms = 1e3 * sum(seconds)
    assert 1.0 < spent_ms / (forward_ms + backward_ms) < 1.13
    sizes = scan_of(hybrid, batch, seq)
    saved = eager_scan_saved(sizes) + 4 * batch * seq * heads * head_dim
    assert saved / MIB == pytest.approx(saved_mib, rel=0.015)
    assert (saved + eager_scan_transient(sizes)) / MIB == pytest.approx(peak_mib, rel=0.015)


MAMBA = ("predict", "mamba2-1.3b", "--gpu", "h200", "--global-batch", "1", "--seq", "2048")


def test_the_answer_says_which_kernels_run_scans(capsys: pytest.CaptureFixture[str]) -> None:
    """48 layers of 108.9 ms, and 79 ms with fused kernels: about 70 times as long."""
    steps = []
    for kernels, said in (("fused", "fused kernels of mamba-ssm and causal-conv1d"), ("eager", "PyTorch operations")):
        words = (*MAMBA, "--framework", "transformers", "--ssm-kernels", kernels)
        found = run_json(capsys, *words)
        assert any(said in text for text in found["assumptions"])
        steps.append(found["step_s"])
    assert steps[0] < 0.1
    assert steps[1] == pytest.approx(48 * 0.1089 + steps[0], rel=0.13)
    found = run_json(capsys, *MAMBA, "--framework", "transformers")
    assert found["step_s"] == steps[0]
    assert any("falls back" in text and "--ssm-kernels eager" in text for text in found["assumptions"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (MAMBA, "is the PyTorch path of transformers"),
        ((*MAMBA, "--framework", "transformers", "--kernels", "compiled"), "is the PyTorch path of transformers"),
        (("predict", "llama-3.2-1b", "--gpu", "h200"), "has no Mamba-2 layers"),
    ],
)
def test_eager_scans_are_refused_where_no_code_has_them(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], reason: str
) -> None:
    status, out, err = run(capsys, *words, "--ssm-kernels", "eager")
    assert (status, out) == (2, "")
    assert reason in " ".join(err.split())


def test_the_largest_product_has_a_column_for_each_state_or_element_of_a_head() -> None:
    """Heads of 256 elements are wider than 64 states: 512 tokens of a chunk by 256 in fp32, for each of two factors."""
    scan = Scan(1, 1024, 4, head_dim=256, state=64, groups=1, chunk=512)
    assert eager_scan_transient(scan) == 2 * 4 * 1024 * 4 * 512 * 256
    assert eager_scan_transient(replace(scan, head_dim=64, state=256)) == 2 * 4 * 1024 * 4 * 512 * 256
