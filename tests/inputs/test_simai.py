"""SimAI workload text: known answers, every header generation, and clear errors."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcast.inputs.documents import workload_facts
from stepcast.inputs.simai import POLICIES, parse_header, read
from stepcast.inputs.source import FormatError, Source
from stepcast.ir.layout import Group
from stepcast.ir.work import Collective, CollectiveKind
from stepcast.ir.workload import Workload
from stepcast.outputs.simai import write
from tests.inputs.fuzz import FUZZ, check_reader, mutations
from tests.shared import DATA, ROOT, needs_data

GPT_13B = ROOT / "examples" / "simai-gpt-13b.txt"
LLAMA_405B = ROOT / "examples" / "simai-llama-405b.txt"
LINE = "mlp\t-1\t10\tALLGATHER\t4096\t20\tNONE\t0\t30\tREDUCESCATTER\t8192\t100"
HEADER = "HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 2 ep: 1 pp: 2 vpp: 1 ga: 1 all_gpus: 8"


def read_text(text: str | bytes) -> Workload:
    return read(Source("w.txt", text.encode() if isinstance(text, str) else text))


def small(*lines: str, header: str = HEADER) -> str:
    return "\n".join([header, str(len(lines)), *lines, ""])


def test_a_header_without_degrees_is_one_way_each() -> None:
    one = parse_header("HYBRID_TRANSFORMER_FWD_IN_BCKWD all_gpus: 1")
    assert (one.tp, one.pp, one.gpus) == (None, None, 1)
    with pytest.raises(FormatError, match="all_gpus is 3, fewer than tp x pp = 4"):
        parse_header("HYBRID_TRANSFORMER_FWD_IN_BCKWD pp: 4 all_gpus: 3")
    for text in ("pp: 0 all_gpus: 1", "pp: 99999999999 all_gpus: 1", "pp:", "= 4", "pp_comm: x"):
        with pytest.raises(FormatError) as refused:
            parse_header(f"HYBRID_TRANSFORMER_FWD_IN_BCKWD {text}")
        assert refused.value.line == 1, text


def test_gpt_13b_known_answers() -> None:
    workload = read(Source(GPT_13B))
    found = workload_facts(workload)
    assert {key: found[key] for key in ("tp", "pp", "vpp", "dp", "gpus", "lines")} == {
        "tp": 8,
        "pp": 8,
        "vpp": 8,
        "dp": 8,
        "gpus": 512,
        "lines": 172,
    }
    assert found["compute_s"] * 1e6 == pytest.approx(951_592, abs=1)
    assert workload.boundary_bytes == 20_971_520
    broadcast = [row for row in found["collectives"] if row["kind"] == "broadcast"]
    assert [(row["count"], row["total_bytes"]) for row in broadcast] == [(1, 65_536)]
    assert [(len(block.layers), block.repeat) for block in workload.stages[0].body] == [(1, 1), (4, 40)]


def test_llama_405b_known_answers() -> None:
    workload = read(Source(LLAMA_405B))
    found = workload_facts(workload)
    assert (found["tp"], found["pp"], found["dp"], found["lines"]) == (8, 16, 8, 557)
    assert found["compute_s"] * 1e6 == pytest.approx(7_213_232, abs=1)
    assert workload.micro_batches == 16
    assert [(len(block.layers), block.repeat) for block in workload.stages[0].body] == [(1, 1), (4, 8), (1, 1)]
    # AICB gives the first micro-batch's embedding another weight-gradient time.
    stage = workload.stages[0]
    differs = [one != two for one, two in zip(stage.body_layers(0), stage.body_layers(), strict=True)]
    assert ([which for which, _ in stage.varied], differs.index(True), sum(differs)) == ([0], 0, 1)


@pytest.mark.parametrize("path", [GPT_13B, LLAMA_405B], ids=lambda path: path.stem)
def test_written_back_byte_for_byte(path: Path) -> None:
    assert write(read(Source(path))) == path.read_bytes()


@needs_data("simai")
def test_moe_example_of_9216_gpus() -> None:
    path = DATA / "simai" / "moe_9216gpus.txt"
    workload = read(Source(path))
    assert (workload.layout.tp, workload.layout.ep, workload.layout.pp, workload.layout.dp) == (2, 16, 12, 384)
    assert workload.boundary_bytes == 50_331_648
    assert workload.micro_batches == 24
    groups = {(row["kind"], row["group"]) for row in workload_facts(workload)["collectives"]}
    assert {("all-to-all", "ep"), ("all-to-all", "tp"), ("all-gather", "expert-dp")} <= groups
    assert write(workload) == path.read_bytes()


def test_groups_follow_the_column() -> None:
    workload = read_text(
        small("x -1 0 ALLREDUCE 1 0 ALLTOALL_EP 2 0 ALLGATHER 3 0", "y -1 0 NONE 0 0 NONE 0 0 REDUCESCATTER_DP_EP 4 0")
    )
    first, second = workload.stages[0].body_layers()
    assert first.forward[1].work == Collective(CollectiveKind.ALL_REDUCE, 1, Group.TP)
    assert first.input_gradient[1].work == Collective(CollectiveKind.ALL_TO_ALL, 2, Group.EP)
    assert first.weight_gradient[1].work == Collective(CollectiveKind.ALL_GATHER, 3, Group.DP)
    assert second.weight_gradient[1].work == Collective(CollectiveKind.REDUCE_SCATTER, 4, Group.EXPERT_DP)


@pytest.mark.parametrize(
    ("header", "degrees"),
    [
        ("DATA", (1, 1, 1, 1, 1)),
        ("HYBRID_TRANSFORMER model_parallel_NPU_group: 4 checkpoints: 1 0 checkpoint_initiates: 1 0", (4, 1, 1, 1, 1)),
        ("HYBRID_TRANSFORMER model_parallel_NPU_group: 2 ep: 4 pp: 2 ga: 1 all_gpus: 32", (2, 4, 2, 1, 8)),
        (HEADER.replace("vpp: 1", "vpp: 2") + " pp_comm 16777216.0", (2, 1, 2, 2, 2)),
        (HEADER + " pp_comm: 7 pp: 4", (2, 1, 4, 1, 1)),
    ],
)
def test_header_generations(header: str, degrees: tuple[int, ...]) -> None:
    layout = read_text(small(LINE, header=header)).layout
    assert (layout.tp, layout.ep, layout.pp, layout.vpp, layout.dp) == degrees


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_is_read(policy: str) -> None:
    line = LINE + "\tDATA" if policy == "HYBRID_CUSTOMIZED" else LINE
    text = small(line, header=f"{policy} model_parallel_NPU_group: 2")
    assert write(read_text(text)).decode() == text


def test_boundary_bytes_as_a_fraction_are_rounded() -> None:
    assert parse_header(HEADER + " pp_comm: 16777216.0").boundary_bytes == 16_777_216


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (small(LINE + " 7"), "w.txt:3: has 13 columns; expected 12"),
        (small(LINE).replace("\n1\n", "\n2\n"), "w.txt:2: declares 2 layer lines but holds 1"),
        (small(LINE, LINE).replace("\n2\n", "\n1\n"), "w.txt:2: declares 1 layer lines but holds 2"),
        (small(LINE).replace("HYBRID_TRANSFORMER_FWD_IN_BCKWD", "HYBRID_X"), "w.txt:1: unknown policy 'HYBRID_X'"),
        (small(LINE.replace("ALLGATHER", "ALLGATHERING")), "w.txt:3: unknown collective 'ALLGATHERING'"),
        (small(LINE.replace("ALLGATHER", "ALLGATHER_XX")), "w.txt:3: unknown collective 'ALLGATHER_XX'"),
        (small(LINE.replace("4096", "-4096")), "w.txt:3: forward size is -4096; expected zero or more"),
        (small(LINE.replace("\t20\t", "\tnan\t")), "w.txt:3: input gradient compute time is nan; expected a finite"),
        (small(LINE.replace("8192", "9" * 25)), "w.txt:3: weight gradient size is 9999999999999999999999999; expected less"),
        (small(LINE.replace("8192", "0.5")), "w.txt:3: weight gradient size is '0.5'; expected a whole number"),
        (small(LINE.replace("8192", "8_192")), "w.txt:3: weight gradient size is '8_192'; expected a number"),
        (HEADER, "w.txt:1: file ends after its header"),
        (small(LINE, header=HEADER.replace("all_gpus: 8", "all_gpus: 2")), "w.txt:1: all_gpus is 2, fewer than tp x pp = 4"),
        (small(LINE, header=HEADER + " checkpoints: 3 1 2"), "w.txt:1: checkpoints announces 3 layers but lists 2"),
        (small(LINE, header=HEADER + " checkpoints: 1 9"), "w.txt:1: checkpoint names layer 9, but the file has 1"),
        (small(LINE, header=HEADER + " pp:"), "w.txt:1: header ends after 'pp'"),
        (small(LINE, header=HEADER + " 17"), "w.txt:1: '17' where a header key such as 'pp:' was expected"),
        (small(LINE + " X", header=HEADER.replace("HYBRID_TRANSFORMER_FWD_IN_BCKWD", "HYBRID_CUSTOMIZED")), "w.txt:3: unknown layer policy 'X'"),
    ],
)  # fmt: skip
def test_errors_name_file_line_and_expectation(text: str, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        read_text(text)
    assert str(caught.value.in_file("w.txt")).startswith(message)


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: text.encode("utf-16"),
        lambda text: text.encode("utf-16-le"),
        lambda text: text.replace("\t", "     \t ").encode(),
    ],
    ids=["crlf", "bom", "utf-16", "utf-16 without mark", "padded"],
)
def test_other_encodings_and_spacings_say_the_same(encode) -> None:  # type: ignore[no-untyped-def]
    text = small(LINE, LINE)
    assert read_text(encode(text)).stages == read_text(text).stages


def test_differing_micro_batch_counts_are_reported() -> None:
    lines = ["embedding_layer" + LINE[3:], LINE] * 3
    workload = read_text(small(*lines, header=HEADER.replace("ga: 1", "ga: 2")))
    assert workload.micro_batches == 3
    assert "ga: 2 but 3 micro-batches are written out" in workload.warnings[0]


def test_one_written_micro_batch_stands_for_all() -> None:
    text = small("embedding_layer" + LINE[3:], LINE, header=HEADER.replace("ga: 1", "ga: 4"))
    workload = read_text(text)
    assert workload.micro_batches == 4
    assert write(workload).decode() == text
    assert "represents all 4 of the header's ga" in workload.warnings[0]
    assert "represents all 2" in read_text(text.replace("ga: 4", "ga: 2")).warnings[0]
    assert not read_text(text.replace("ga: 4", "ga: 1")).warnings


def test_what_a_layer_depends_on_is_kept() -> None:
    text = small(LINE, LINE.replace("-1", "0", 1))
    layers = [layer for block in read_text(text).stages[0].body for layer in block.layers]
    first, second = (dict(layer.notes) for layer in layers)
    assert ("depends" in first, second["depends"]) == (False, "0")
    assert write(read_text(text)).decode() == text


TIMES = st.integers(0, 10**12)
SIZES = st.integers(0, 2**40)
WORDS = st.sampled_from(["NONE", "ALLREDUCE", "ALLGATHER_DP_EP", "ALLTOALL_EP", "BROADCAST", "REDUCESCATTER"])


@st.composite
def layer_lines(draw: st.DrawFn) -> str:
    cells = [draw(st.sampled_from(["embedding_layer", "attention", "mlp", "optimizer1", "grad_gather"])), "-1"]
    for _ in range(3):
        word = draw(WORDS)
        cells += [str(draw(TIMES)), word, "0" if word == "NONE" else str(draw(SIZES))]
    return "\t".join([*cells, str(draw(TIMES))])


@given(st.lists(layer_lines(), min_size=1, max_size=6), st.integers(1, 5), st.integers(1, 4))
def test_any_workload_is_written_back_byte_for_byte(lines: list[str], repeats: int, ga: int) -> None:
    text = small(*lines * repeats, header=HEADER.replace("ga: 1", f"ga: {ga}"))
    assert write(read_text(text)).decode() == text


LINES = GPT_13B.read_bytes().splitlines()
FUZZ_SEED = b"\n".join([LINES[0], b"14", *LINES[2:16], b""])


@FUZZ
@given(mutations(FUZZ_SEED))
def test_damaged_files_give_a_workload_or_a_format_error(data: bytes) -> None:
    check_reader(read, data, Workload)
