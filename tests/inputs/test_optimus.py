"""OptimusPrime logs: known answers of the seed and the sweep, glued prints, damage."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from stepcast.inputs.optimus_log import read
from stepcast.inputs.source import FormatError, Source
from stepcast.inputs.table import format_named, recognise
from stepcast.ir.measured import RunLog
from tests.inputs.fuzz import FUZZ, mutations
from tests.shared import DATA, ROOT, needs_data

SEED_PATH = ROOT / "examples" / "optimus-llama-1b.txt"
SEED = SEED_PATH.read_text()
SWEEP = DATA / "optimus-sweep"

# Median ms per micro-batch of stages 0..7 over steps 2..20, and of a batch for i = 2..20: the format's description.
STAGE_MS = (2.261, 2.748, 2.538, 2.511, 2.415, 2.420, 2.391, 6.853)
BATCH_MS = 1613.3
# Median ms per batch of the other runs of the sweep, by (TP, PP, micro-batch): as above.
SWEEP_BATCH_MS = {
    (2, 4, 1): 2531,
    (2, 4, 4): 927,
    (2, 4, 8): 814,
    (2, 4, 32): 1107,
    (4, 2, 2): 1870,
    (4, 2, 8): 938,
    (4, 2, 16): 853,
    (1, 8, 1): 1613,
}


def read_text(text: str) -> RunLog:
    return read(Source("log.txt", text.encode()))


def header(rank: int, stage: int, step: int) -> str:
    return f"[rank:{rank} stage:{stage}] transformer-block(module) forward time (no send/recv) - step {step}"


def record(layer: str, total_ms: float, ops: int = 4) -> str:
    return f"  layer[{layer}]: total={total_ms:.3f}ms, ops={ops}, avg/op={total_ms / ops:.3f}ms"


SETTINGS = """> Total parameters in model: 1,000
> World size: 2
> GAS: 4
> GBS: 8
> MBS: 2
> TP: 1
> DP: 1
> PP: 2
"""


@pytest.fixture(scope="module")
def seed() -> RunLog:
    return read_text(SEED)


def test_seed_is_recognised() -> None:
    assert recognise(Source(SEED_PATH)).name == "optimus"


def test_warnings_may_come_first() -> None:
    noise = "W1224 10:59:12.284000 96784 site-packages/torch/distributed/run.py:793] ****\n" * 200
    matches = format_named("optimus").matches
    assert matches(Source("file", (noise + SEED).encode()))
    assert matches(Source("file", (noise + "| epoch   1 |     1/  323 batches | lr 0.00 |").encode()))
    assert not matches(Source("file", noise.encode()))


def test_seed_is_complete(seed: RunLog) -> None:
    assert (seed.blocks, len(seed.layer_times), len(seed.batches)) == (160, 500, 20)
    assert seed.warnings == ()
    layout = seed.layout
    assert (layout.tp, layout.dp, layout.pp) == (1, 1, 8)
    assert (seed.micro_batch, seed.micro_batches, seed.global_batch) == (1, 32, 32)
    assert seed.parameters == 1_235_814_400
    assert seed.steps == tuple(range(1, 21))
    assert seed.stage_ends[0] == "model_layers_1_mlp_up_proj"
    assert len(seed.stage_ends) == 8
    facts = {"world": 8, "data_size": 10334, "batches_per_epoch": 323, "finished_ranks": 8, "elapsed_s": 37.576}
    assert facts.items() <= seed.facts.items()


def test_seed_medians(seed: RunLog) -> None:
    stages = seed.stage_forward()
    assert list(stages) == list(range(8))
    assert [median.seconds * 1e3 for median in stages.values()] == pytest.approx(STAGE_MS, abs=5e-4)
    assert {(median.first, median.last, median.count) for median in stages.values()} == {(2, 20, 19)}
    assert seed.layer_forward("lm_head")[7].seconds * 1e3 == pytest.approx(4.174, abs=5e-4)
    batch = seed.batch_time()
    assert batch is not None
    assert batch.seconds * 1e3 == pytest.approx(BATCH_MS, abs=0.05)
    assert (batch.first, batch.last, batch.count) == (2, 20, 19)


def times_of_step_2(log: RunLog) -> dict[tuple[int, str], float]:
    """Return the milliseconds of each rank and layer in step 2."""
    times = log.layer_times
    return {
        (int(times.rank_of[row]), times.layers[times.layer_of[row]]): round(float(times.total_s[row]) * 1e3, 3)
        for row in np.flatnonzero(times.step_of == 2)
    }


def test_glued_reports_of_the_seed_are_attributed(seed: RunLog) -> None:
    """Step 2 of ranks 0 and 3 is printed as one."""
    assert {key: value for key, value in times_of_step_2(seed).items() if key[0] in (0, 3)} == {
        (0, "embed"): 0.739,
        (3, "5"): 10.070,
        (0, "0"): 40.903,
        (3, "6"): 41.273,
        (0, "1"): 30.691,
        (3, "7"): 29.263,
    }


def test_every_report_has_the_layers_of_its_stage(seed: RunLog) -> None:
    times = seed.layer_times
    for stage in range(8):
        rows = np.flatnonzero(times.stage_of == stage)
        layers = [times.layers[number] for number in times.layer_of[rows]]
        per_report = len(rows) // 20
        assert len(rows) == per_report * 20
        assert layers == layers[:per_report] * 20


def test_any_gluing_gives_the_same() -> None:
    """Two stages' reports, mixed in every order that keeps each one's own order."""
    first = [header(0, 0, 2), record("embed", 1.0), record("0", 2.0), record("1", 3.0, 2)]
    second = [header(1, 1, 2), record("1", 4.0), record("lm_head", 5.0)]
    clean = "\n".join([header(0, 0, 1), *first[1:], header(1, 1, 1), *second[1:], ""])
    expected = {(0, "embed"): 1.0, (0, "0"): 2.0, (0, "1"): 3.0, (1, "1"): 4.0, (1, "lm_head"): 5.0}
    mixed = 0
    for pattern in range(2 ** (len(first) + len(second))):
        if pattern.bit_count() != len(second):
            continue
        mine, its = iter(first), iter(second)
        order = [next(its) if pattern >> bit & 1 else next(mine) for bit in range(len(first) + len(second))]
        log = read_text(SETTINGS + clean + "".join(order) + "\n\n")
        assert times_of_step_2(log) == expected
        assert log.warnings == ()
        mixed += 1
    assert mixed == 35


def test_ranks_of_one_stage_are_taken_in_order() -> None:
    """With data parallelism two ranks report the same layers; glued, only their order tells them apart."""
    clean = "\n".join(
        [header(0, 0, 1), record("0", 9.0), record("1", 9.0), header(1, 0, 1), record("0", 9.0), record("1", 9.0)]
    )
    glued = "".join(
        [header(0, 0, 2), header(1, 0, 2), record("0", 1.0), record("0", 2.0), record("1", 3.0), record("1", 4.0)]
    )
    log = read_text(f"{SETTINGS}{clean}\n{glued}\n")
    assert times_of_step_2(log) == {(0, "0"): 1.0, (1, "0"): 2.0, (0, "1"): 3.0, (1, "1"): 4.0}
    assert any("several ranks of one stage" in warning for warning in log.warnings)


def test_damage_is_told_and_the_rest_is_kept() -> None:
    text = SEED.replace("layer[13]: total=9.994ms, ops=32,", "layer[13]: total=9.9", 1)
    log = read_text(text)
    assert len(log.layer_times) == 499
    assert "1 damaged layer records left out" in log.warnings
    assert "1 of 160 reports lack a layer record" in log.warnings
    assert log.stage_forward()[0].seconds * 1e3 == pytest.approx(STAGE_MS[0], abs=5e-4)


def test_lost_header_is_told() -> None:
    log = read_text(SEED.replace(header(4, 4, 2), "", 1))
    assert log.blocks == 159
    assert any("belong to no report" in warning for warning in log.warnings)
    assert any("1 of 160 reports (rank and step) are missing" in warning for warning in log.warnings)


def test_cut_off_log_gives_what_is_there() -> None:
    log = read_text(SEED[: len(SEED) // 2])
    assert 0 < log.blocks < 160
    assert log.facts["finished_ranks"] == 0


def test_settings_may_be_missing() -> None:
    log = read_text(SEED[SEED.index("data_size") :])
    assert log.layout.pp == 8
    assert any("not printed" in warning and "GAS" in warning for warning in log.warnings)
    assert any("parameters is not printed" in warning for warning in log.warnings)


def test_settings_that_disagree_are_told() -> None:
    warnings = read_text(SEED.replace("> TP: 1", "> TP: 2").replace("> GBS: 32", "> GBS: 64")).warnings
    assert any("world size 8 is not TP 2 x DP 1 x PP 8" in warning for warning in warnings)
    assert any("GBS 64 is not MBS 1 x GAS 32 x DP 1" in warning for warning in warnings)


EPOCH = "data_size=10334\nnbatches={}\n"
COUNTED = "[step:0] effective_global_batch_used_by_stage0(sum over stage0 ranks)={}\n"
BATCH_LINE = "| epoch   1 |     2/   81 batches | lr 0.00 | ms/batch 1920.20 | loss  6.36 | ppl   580.37\n"


def data_parallel(*prints: str, batch: int = 32, micro_batch: int = 4) -> RunLog:
    settings = f"""> Total parameters in model: 1,235,814,400
> World size: 8
> GAS: {batch // micro_batch // 4}
> GBS: {batch}
> MBS: {micro_batch}
> TP: 1
> DP: 4
> PP: 2
"""
    return read_text(settings + "".join(prints) + BATCH_LINE)


@pytest.mark.parametrize("prints", [(EPOCH.format(81),), (COUNTED.format(128),)], ids=["epoch", "counted"])
def test_a_batch_that_was_not_run_is_told_and_replaced(prints: tuple[str, ...]) -> None:
    """81 batches of an epoch of 2,584 samples for each of 4 ranks hold 32 each, not the 8 that GBS 32 says."""
    log = data_parallel(*prints)
    assert (log.micro_batch, log.micro_batches, log.global_batch) == (16, 2, 128)
    told = [warning for warning in log.warnings if "128 samples" in warning]
    assert len(told) == 1
    assert "GBS 32 and MBS 4 are printed" in told[0]
    assert "2 micro-batches of 16" in told[0]


def test_a_batch_that_was_run_is_not_doubted() -> None:
    for prints in ((), (EPOCH.format(323),), (COUNTED.format(32), EPOCH.format(323))):
        log = data_parallel(*prints)
        assert (log.micro_batch, log.micro_batches, log.global_batch) == (4, 2, 32)
        assert not any("samples" in warning for warning in log.warnings)


def test_binary_junk_in_between_is_skipped() -> None:
    data = SEED.encode().replace(b"GPU mode is used.", b"\xff\xfe\x00\x01", 3)
    assert len(read(Source("log", data)).layer_times) == 500


@pytest.mark.parametrize("text", ["", "GPU mode is used.\n", SETTINGS, record("1", 2.0)])
def test_nothing_usable_is_an_error(text: str) -> None:
    with pytest.raises(FormatError, match="no usable record") as caught:
        read_text(text)
    assert caught.value.path == "log.txt"


def all_logs() -> list[Path]:
    return sorted(SWEEP.glob("*_log.txt"))


@needs_data("optimus-sweep")
def test_all_shared_logs_are_there() -> None:
    assert len(all_logs()) == 8


@needs_data("optimus-sweep")
@pytest.mark.parametrize("path", all_logs(), ids=lambda path: path.name)
def test_every_shared_log_is_complete(path: Path) -> None:
    """The first rank of each stage reports 20 steps; every rank of the last stage prints each batch."""
    match = re.search(r"TP(\d+)_DP(\d+)_PP(\d+)_MBS(\d+)_GBS(\d+)", path.name)
    assert match is not None
    tp, dp, pp, micro_batch, global_batch = map(int, match.groups())
    log = read(Source(path))
    assert (log.layout.tp, log.layout.dp, log.layout.pp) == (tp, dp, pp)
    assert (log.micro_batch, log.global_batch) == (micro_batch, global_batch)
    assert log.micro_batches == global_batch // micro_batch
    assert log.warnings == ()
    assert log.blocks == 20 * pp
    # 16 layers, embedding and head; at TP 1 the cuts fall inside 7 layers, which two stages report.
    assert len(log.layer_times) == 20 * (25 if tp == 1 else 18)
    assert len(log.batches) == 20 * tp
    batch = log.batch_time()
    assert batch is not None
    assert batch.seconds * 1e3 == pytest.approx(SWEEP_BATCH_MS[tp, pp, micro_batch], abs=0.51)
    assert sorted(np.unique(log.layer_times.rank_of).tolist()) == [stage * tp for stage in range(pp)]


START = SEED.index(header(7, 7, 1))
SHORT = SEED[SEED.index("> Total") : SEED.index("Available")] + SEED[START : START + 3500] + SEED[-2600:-1900]


@given(mutations(SHORT.encode()))
@FUZZ
def test_damaged_logs_give_a_run_log_or_a_format_error(data: bytes) -> None:
    try:
        log = read(Source("fuzz", data))
    except FormatError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert log.blocks or log.batches
        assert len(log.layer_times) >= sum(median.count for median in log.stage_forward().values())
        log.batch_time()
