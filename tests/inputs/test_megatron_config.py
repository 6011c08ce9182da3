"""What is inferred of a Megatron-LM run from its ranks."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from stepcast.inputs.megatron.config import RankEvidence, file_name_hints, infer
from stepcast.inputs.megatron.reader import read_run
from stepcast.inputs.source import FormatError, Source
from stepcast.inputs.table import read
from stepcast.ir.types import DType
from tests.shared import DATA, ROOT, needs_data

TRACES = DATA / "megatron-traces"
SEED = (ROOT / "examples" / "megatron-rank7.txt").read_bytes()

# One rank of GPT-13B as in the seed; parameters of a middle stage are the document's.
RANK7 = RankEvidence(
    rank=7,
    stage=3,
    path="trace.txt",
    transfer=(2048, 2, 5120),
    tokens=(2, 2048),
    word_embedding=(25216, 5120),
    hidden=5120,
    dtype=DType.FP32,
    gradients=1_702_466_560,
    forward_reduces=20,
    micro_batches=1,
    has_loss=True,
)
MIDDLE = replace(RANK7, rank=2, stage=1, tokens=None, word_embedding=None, gradients=1_573_350_400, has_loss=False)
FIRST = replace(RANK7, rank=0, stage=0, gradients=1_712_942_080, has_loss=False)


def test_parameters_alone_tell_tensor_parallelism_and_layers() -> None:
    """Without counted all-reduces, the exact count still has one solution."""
    config = infer([replace(RANK7, forward_reduces=None)])
    assert (config.layout.tp, config.layout.pp, config.layout.dp) == (2, 4, 1)
    assert config.facts["layers"] == 40
    assert config.facts["vocab"] == 50432


@pytest.mark.parametrize("layers", [20, None])
def test_llama_with_biases_is_solved(layers: int | None) -> None:
    """Parameters of a Llama-13B stage (ffn 13824, vocabulary 32000 over tp 2) in one of the shared runs."""
    rank = replace(
        RANK7,
        rank=3,
        stage=1,
        transfer=(4096, 1, 5120),
        tokens=(1, 4096),
        word_embedding=(16000, 5120),
        gradients=3_254_707_200,
        forward_reduces=2 * layers if layers else None,
    )
    config = infer([rank])
    assert config.facts["ffn"] == 13824
    assert config.facts["gated_mlp"] is True
    assert config.facts["layers"] == 40
    assert config.facts["vocab"] == 32000


def test_gpt_175b_is_told_from_its_last_rank() -> None:
    """Rank 896 of 1,024 of a run profiled for Echo: TP 8, PP 8, DP 16, 96 layers.

    Counts from fwyc0573/Megatron-LM, SC26-AE/evidence/gpt175b/task1/workload_traces.
    """
    rank = replace(
        RANK7,
        rank=896,
        stage=7,
        transfer=None,
        tokens=(1, 2048),
        word_embedding=(6416, 12288),
        hidden=12288,
        gradients=2_797_787_136,
        forward_reduces=None,
    )
    config = infer([rank])
    assert (config.layout.tp, config.layout.pp, config.layout.dp) == (8, 8, 16)
    assert (config.facts["layers"], config.facts["ffn"], config.facts["vocab"]) == (96, 49152, 51328)
    assert "data parallelism may be 15 or 16; taken as 16" in config.warnings


def test_first_stage_alone_leaves_pipeline_and_data_open() -> None:
    config = infer([FIRST])
    assert config.layout.tp == 2
    assert config.facts["learnt_positions"] is True
    assert config.facts["layers_on"] == {0: 10}
    assert config.basis["pp"] == "assumed"
    assert any("no rank of the last stage" in text for text in config.warnings)
    assert any("data parallelism may be" in text for text in config.warnings)


def test_file_name_fills_gaps_and_is_checked() -> None:
    named = "runs/wd8_tp2_pp4_numl40_bs2_GPT2BPETokenizer_rank0_20240923205004.txt"
    config = infer([replace(FIRST, path=named)])
    assert (config.layout.pp, config.layout.dp, config.facts["layers"]) == (4, 1, 40)
    assert config.basis["pp"] == "file name"
    wrong = infer([replace(RANK7, path=named.replace("tp2", "tp4").replace("numl40", "numl48"))])
    assert wrong.layout.tp == 2
    assert {"the file name says tp 4, the content 2", "the file name says layers 48, the content 40"} <= set(
        wrong.warnings
    )


def test_file_name_of_the_expert_dialect() -> None:
    hints = file_name_hints("wd256_tp8_pp8_exp4_expNum128_numl48_bs1_rank248_20260722113005.txt")
    assert hints == {"world": 256, "tp": 8, "pp": 8, "ep": 4, "layers": 48, "micro_batch": 1}
    assert file_name_hints("trace.txt") == {}


@pytest.mark.parametrize(
    "name",
    [
        "wd8_tp1_pp2_exp4_expNum8_l8_bs1_rank3_20260722113005.txt",
        "wd8_tp1_pp2_ep4_expn8_nl8_mbs1_rank3.txt",
        "rank3_bs1_numl8_expNum8_exp4_pp2_tp1_wd8.txt",
        "pp2_tp1_exp4_expn8_dp4_nl8_hs1024_sl2048/trace_bs1_tp1_pp2.txt",
    ],
)
def test_file_names_are_read_field_by_field(name: str) -> None:
    wanted = {"world": 8, "tp": 1, "pp": 2, "ep": 4, "layers": 8, "micro_batch": 1}
    assert file_name_hints(name) == wanted
    assert file_name_hints("l8.txt") == {}


def test_whole_run_knows_every_stage() -> None:
    ranks = [
        replace(model, rank=2 * stage + tensor, stage=stage)
        for stage, model in enumerate((FIRST, MIDDLE, MIDDLE, RANK7))
        for tensor in (0, 1)
    ]
    config = infer(ranks)
    assert config.warnings == []
    assert config.layout.gpus == 8
    assert config.facts["parameters"] == {0: 1712942080, 1: 1573350400, 2: 1573350400, 3: 1702466560}
    assert config.basis["layers"] == "solved: parameters of every stage"


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (replace(MIDDLE, transfer=(4096, 1, 5120)), "tensors between stages"),
        (replace(FIRST, tokens=(1, 2048)), "batches"),
        (replace(MIDDLE, rank=8, stage=4), "is the last one"),
        (replace(MIDDLE, rank=6, stage=3), "of the same stage"),
        (replace(MIDDLE, rank=1, stage=2), "fit no layout"),
    ],
)
def test_ranks_of_different_runs_are_refused(other: RankEvidence, expected: str) -> None:
    with pytest.raises(FormatError, match=expected) as caught:
        infer([RANK7, replace(other, path="other.txt")])
    assert "expected ranks of one run" in str(caught.value)
    assert caught.value.path == "other.txt"


def test_gradients_of_experts_alone_are_not_taken_for_a_model() -> None:
    config = infer([replace(RANK7, gradients=24 * 5120 * 5120, forward_reduces=0)])
    assert "parameters" not in config.facts
    assert config.facts["expert_parameters"] == {3: 24 * 5120 * 5120}
    assert config.layout.tp == 1


@needs_data("megatron-traces")
def test_eight_ranks_read_as_one_timeline() -> None:
    timeline = read(TRACES / "20240923205004")
    assert timeline.ranks == tuple(range(8))
    assert timeline.span_s * 1e3 == pytest.approx(3855.5, abs=0.05)
    assert timeline.facts["parameters"] == {0: 1712942080, 1: 1573350400, 2: 1573350400, 3: 1702466560}
    assert timeline.stage_of_rank == {rank: rank // 2 for rank in range(8)}

    def forward_ms(rank: int) -> tuple[float, float]:
        """Time of a rank's forward, and of the layers' all-reduces in it."""
        forward = next(s for s in timeline.spans() if s.name == "forward_step" and s.lane.rank == rank)
        parts = [s for s in timeline.spans() if s.parent == forward.index and s.name == "linear_fwd"]
        return forward.duration_s * 1e3, sum(part.duration_s for part in parts) * 1e3

    assert forward_ms(5)[0] - forward_ms(5)[1] == pytest.approx(193, abs=1)
    assert forward_ms(6)[1] == pytest.approx(291, abs=1)


NAME = re.compile(r"wd(\d+)_tp(\d+)_pp(\d+)_numl(\d+)_bs(\d+)")


def all_runs() -> list[Path]:
    return sorted(TRACES.iterdir()) if TRACES.is_dir() else []


@needs_data("megatron-traces")
def test_all_shared_runs_are_there() -> None:
    assert len(all_runs()) == 12


@needs_data("megatron-traces")
@pytest.mark.parametrize("folder", all_runs(), ids=lambda folder: folder.name)
def test_layout_of_every_shared_run_from_content_alone(folder: Path) -> None:
    """Files are read under names that say nothing; layers of expert runs cannot be told that way."""
    paths = sorted(folder.iterdir())
    match = NAME.match(paths[0].name)
    assert match is not None
    world, tp, pp, layers, micro_batch = map(int, match.groups())
    timeline = read_run([Source(f"{number}.txt", path.read_bytes()) for number, path in enumerate(paths)])
    layout = timeline.layout
    assert layout is not None
    assert (layout.gpus, layout.tp, layout.pp) == (world, tp, pp)
    assert timeline.facts["world"] == world
    assert timeline.facts["micro_batch"] == micro_batch
    if "parameters" in timeline.facts:
        assert timeline.facts["layers"] == layers
        assert timeline.warnings == ()
    else:
        assert "expert_parameters" in timeline.facts
        assert read(folder).facts["layers"] == layers
    assert len(timeline.ranks) == world


@needs_data("megatron-traces")
def test_ranks_of_two_real_runs_are_refused() -> None:
    other = next(iter(sorted((TRACES / "20250320144110").iterdir())))
    with pytest.raises(FormatError, match="expected ranks of one run"):
        read_run([Source("rank7.txt", SEED), Source(other)])
