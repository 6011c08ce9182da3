"""The memory that PyTorch's allocator reserves beyond the tensors, the interval of memory, and the verdict that follows from both."""

import csv
from dataclasses import replace
from importlib import resources
from pathlib import Path
from statistics import mean, median

import numpy as np
import pytest

from stepcast.cost.memory import StageMemory, Verdict, memory, verdict_of
from stepcast.cost.memory.stages import find_fragmentation, fragmented_bytes
from stepcast.frameworks.catalog import load_framework
from stepcast.hardware.catalog import load_fit, load_gpu
from stepcast.ir.framework import Overhead
from stepcast.ir.layout import Layout
from stepcast.ir.step import Band
from stepcast.ir.strategy import ContextKind, Sharding, Strategy
from stepcast.models.catalog import load_model
from stepcast.units import GIB
from stepcast.validate.transformers import Setting
from tools.fit_memory import TAIL, one_gpu_ratios

SHIPPED = Path(str(resources.files("stepcast"))) / "data" / "transformers"
EXPANDABLE = Path(__file__).parents[1] / "data" / "expandable-h200.csv"
"""Steps of the transformers set measured again by tools/measure_hf_steps.py on one H200 (PyTorch 2.11,
transformers 5.17) with PYTORCH_ALLOC_CONF=expandable_segments:True; default_reserved_bytes is the set's own.
"""


def settings(path: Path) -> list[tuple[dict[str, str], Setting]]:
    """Rows with reserved bytes that the model of steps covers."""
    found = []
    with path.open(newline="", encoding="utf-8") as file:
        for record in csv.DictReader(file):
            if record.get("reserved_bytes") and "experts-eager" not in record["setting"]:
                found.append((record, Setting(record, SHIPPED)))
    return found


def stage_of(setting: Setting, expandable: bool = False) -> StageMemory:
    framework = setting.framework
    if expandable:
        framework = replace(framework, overhead=replace(framework.overhead, expandable_segments=True))
    (stage,) = memory(setting.model, setting.strategy, load_gpu("h200"), framework)
    return stage


def test_the_gap_follows_what_comes_and_goes_and_the_moments() -> None:
    overhead = Overhead(fragmentation=0.05, displaced=0.2)
    assert fragmented_bytes(find_fragmentation(overhead, 0.0), 10.0, 4.0, 0.0) == pytest.approx(0.5 + 0.8)
    assert fragmented_bytes(find_fragmentation(overhead, 0.0), 10.0, 40.0, 0.0) == pytest.approx(0.5 + 2.0)
    assert fragmented_bytes(find_fragmentation(overhead, 0.0), 10.0, 4.0, 5.0) == pytest.approx(0.5 + 0.8 + 1.0)
    assert fragmented_bytes(find_fragmentation(overhead, 1.0), 10.0, 4.0, 0.0) == pytest.approx(2 * 1.3)
    grown = replace(overhead, expandable_segments=True)
    assert fragmented_bytes(find_fragmentation(grown, 0.0), 10.0, 4.0, 0.0) == pytest.approx(0.4 * 1.3)
    assert fragmented_bytes(find_fragmentation(grown, 1.0), 10.0, 4.0, 0.0) == pytest.approx(2 * 1.3)


def test_reserved_memory_is_what_was_reserved() -> None:
    """Also of recomputed steps, which reserve up to a quarter more than they allocate."""
    rows = [row for path in sorted(SHIPPED.glob("steps*.csv")) for row in settings(path)]
    assert len(rows) > 120
    recomputed: list[float] = []
    errors: list[float] = []
    inside = 0
    for record, setting in rows:
        stage, measured = stage_of(setting), float(record["reserved_bytes"])
        errors.append(abs(stage.reserved / measured - 1))
        inside += stage.band.low <= measured / stage.reserved <= stage.band.high
        if "checkpoint" in record["setting"]:
            recomputed.append(stage.reserved / measured)
    assert mean(errors) < 0.042  # 0.051 with 7 % of what comes and goes
    assert inside / len(rows) > 0.88
    assert 0.97 < median(recomputed) < 1.03  # 0.90 without recomputation in it


def test_expandable_segments_reserve_less_unless_layers_are_recomputed() -> None:
    errors: list[float] = []
    for record, setting in settings(EXPANDABLE):
        plain, grown = stage_of(setting), stage_of(setting, expandable=True)
        errors.append(abs(grown.reserved / float(record["reserved_bytes"]) - 1))
        if "checkpoint" in record["setting"]:
            assert grown.reserved == pytest.approx(plain.reserved)
        else:
            assert grown.reserved < plain.reserved
            assert float(record["reserved_bytes"]) < float(record["default_reserved_bytes"])
    assert len(errors) == 15
    assert mean(errors) < 0.06
    assert load_framework("torchtitan").overhead.expandable_segments


@pytest.mark.parametrize(
    ("capacity", "verdict", "fits"),
    [(79.0, Verdict.DOES_NOT_FIT, False), (84.0, Verdict.TIGHT, True), (90.0, Verdict.FITS, True)],
)
def test_a_step_is_tight_within_its_interval(capacity: float, verdict: Verdict, fits: bool) -> None:
    """80 GiB reserved of 81 in all: up to 8 % more of the 80 is 87.4."""
    band = Band(0.95, 1.08, "", 0)
    stage = StageMemory(0, 70 * GIB, 0, 0, 10 * GIB, 0, 0, 0, GIB, capacity * GIB, band=band)
    assert stage.low == pytest.approx(77 * GIB)
    assert stage.high == pytest.approx(87.4 * GIB)
    assert (stage.verdict, stage.fits) == (verdict, fits)
    assert replace(stage, capacity=stage.high).verdict is Verdict.FITS  # to the last byte
    roomy = replace(stage, capacity=200 * GIB)
    assert verdict_of([roomy, stage, roomy]) is verdict


def test_context_parallel_ranks_hold_what_they_exchange() -> None:
    """DeepSeek-V3 at 131,072 tokens: keys and values of 128 heads, 192 and 128 wide, in bf16 are 10 GiB a
    layer, results 4 GiB. Gathered, the backward holds them, sums of their gradients and those of two steps,
    33 of 32 slices; the ring's forward holds the blocks and results of all ranks and the sum in fp32.
    """
    model = load_model("deepseek-v3")
    gathered, results = 131_072 * 128 * (192 + 128) * 2.0, 131_072 * 128 * 128 * 2.0
    assert gathered == 10 * GIB
    layout = Layout(cp=16, ep=16, pp=16)
    held = {}
    for context in ContextKind:
        strategy = Strategy(layout, 1, 16, 131_072, sharding=Sharding.ZERO_1, context=context)
        held[context] = memory(model, strategy, load_gpu("h200"))[1]
    gradients = 2 * 131_072 / 16 * 128 * (192 + 192 + 128) * 2.0
    shared = held[ContextKind.ALL_GATHER].temporary - (gradients + (3 + 1 / 32) * gathered)
    ring = gathered + results + 2 * results / 16
    assert held[ContextKind.RING].temporary == pytest.approx(shared + ring)
    exchanged = 131_072 / 16 * 128 * (192 + 192 + 128 + 128) * 2.0
    assert held[ContextKind.ALL_TO_ALL].temporary == pytest.approx(shared + gradients + exchanged)
    # Gathered and exchanged results are saved besides those that the output projection reads.
    layers, flying = 4, 15
    saved = held[ContextKind.ALL_GATHER].activations - held[ContextKind.RING].activations
    assert saved == pytest.approx(layers * flying * results / 16)


def test_the_interval_on_one_gpu_is_that_of_all_shipped_steps() -> None:
    ratios = list(one_gpu_ratios())
    low, high = np.quantile(ratios, [TAIL, 1 - TAIL])
    stated = load_fit("memory")["kinds"]["one GPU"]
    assert stated == {"low": round(low, 3), "high": round(high, 3), "rows": len(ratios)}
