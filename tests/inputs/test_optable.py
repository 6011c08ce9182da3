"""Operator tables: units, the layer that repeats, the missing backward, and clear errors."""

import pytest
from hypothesis import given

from stepcast.inputs.documents import workload_facts
from stepcast.inputs.optable import COLUMNS, LAYER_ROW, MOST_KNOWN, read
from stepcast.inputs.source import FormatError, Source
from stepcast.ir.layout import Group
from stepcast.ir.work import Collective, CollectiveKind, Recorded, Transfer
from stepcast.ir.workload import Workload, repeat_layers, scale_backward
from stepcast.outputs.optable import write
from stepcast.units import MS
from tests.inputs.fuzz import FUZZ, check_reader, mutations
from tests.shared import DATA, ROOT, needs_data

GPT2_LARGE = ROOT / "examples" / "optable-gpt2-large.tsv"
HEAD = "\t".join(COLUMNS)
ROW = "addmm\t1.5\tNone\t0\t2\tALLREDUCE_ASYNC\t10\t0\tALLREDUCE\t20\t0"


def read_text(text: str) -> Workload:
    return read(Source("t.tsv", text.encode()))


def test_gpt2_large_known_answers() -> None:
    workload = read(Source(GPT2_LARGE))
    found = workload_facts(workload)
    assert found["lines"] == 51
    assert found["communication_elements"] == 774_080_337
    assert found["communication_bytes"] == 4 * 774_080_337
    assert found["compute_s"] == pytest.approx(2.2793, abs=1e-4)
    assert [(len(block.layers), block.repeat) for block in workload.stages[0].body] == [(7, 1), (40, 36), (4, 1)]
    layer = workload.stages[0].body[1].layers
    assert (layer[0].name, layer[-1].name) == ("transformer_h_0_ln_1_grad", "add_15")


def test_missing_backward_and_guessed_repeat_are_said() -> None:
    missing, guessed = read(Source(GPT2_LARGE)).warnings
    assert "every backward time is 0" in missing
    assert "--backward-factor" in missing
    assert "36 times" in guessed
    assert "--repeat-layers" in guessed


@pytest.mark.parametrize(("layers", "elements"), [(1, 85_369_937), (12, 301_821_777), (36, 774_080_337)])
def test_repeat_layers(layers: int, elements: int) -> None:
    workload = repeat_layers(read(Source(GPT2_LARGE)), layers)
    assert workload_facts(workload)["communication_elements"] == elements


def test_backward_factor() -> None:
    workload = scale_backward(read(Source(GPT2_LARGE)), 2)
    phases = workload_facts(workload)["compute_by_phase_s"]
    assert phases["input-gradient"] + phases["weight-gradient"] == pytest.approx(2 * phases["forward"])
    assert workload_facts(workload)["communication_elements"] == 774_080_337


@needs_data("neusight")
def test_comma_twin_with_backward() -> None:
    workload = read(Source(DATA / "neusight" / "seed004_with_backward.csv"))
    phases = workload_facts(workload)["compute_by_phase_s"]
    assert phases["forward"] == pytest.approx(2.2793, abs=1e-4)
    assert phases["input-gradient"] + phases["weight-gradient"] == pytest.approx(4.5921, abs=1e-4)
    assert not any("backward time" in warning for warning in workload.warnings)


def test_units_and_groups() -> None:
    (layer,) = read_text(f"{HEAD}\n{ROW}\n").stages[0].body_layers()
    assert layer.forward[0].work == Recorded(1.5e-3)
    gradient = layer.input_gradient[1]
    assert gradient.work == Collective(CollectiveKind.ALL_REDUCE, 40, Group.DP)
    assert not gradient.blocking
    assert layer.weight_gradient[1].work == Collective(CollectiveKind.ALL_REDUCE, 80, Group.DP)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("ALLREDUCE", Collective(CollectiveKind.ALL_REDUCE, 40, Group.TP)),
        ("ALLGATHER", Collective(CollectiveKind.ALL_GATHER, 40, Group.TP)),
        ("REDUCESCATTER_DP_EP", Collective(CollectiveKind.REDUCE_SCATTER, 40, Group.EXPERT_DP)),
        ("ALLTOALL_EP", Collective(CollectiveKind.ALL_TO_ALL, 40, Group.EP)),
    ],
)
def test_words(word: str, expected: Collective) -> None:
    (layer,) = read_text(f"{HEAD}\n{ROW.replace('ALLREDUCE_ASYNC', word)}\n").stages[0].body_layers()
    assert layer.input_gradient[1].work == expected


def test_sendrecv_is_a_transfer() -> None:
    (layer,) = read_text(f"{HEAD}\n{ROW.replace('ALLREDUCE_ASYNC', 'SENDRECV')}\n").stages[0].body_layers()
    assert isinstance(layer.input_gradient[1].work, Transfer)


def test_written_and_read_again() -> None:
    workload = read(Source(GPT2_LARGE))
    again = read(Source("t.tsv", write(workload)))
    assert workload_facts(again)["compute_s"] == pytest.approx(workload_facts(workload)["compute_s"], rel=1e-12)
    assert again.stages[0].body[1].repeat == 36
    assert workload_facts(again)["collectives"] == workload_facts(workload)["collectives"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD.replace("process_time", "delay") + f"\n{ROW}\n", "t.tsv:1: header lacks process_time"),
        (f"{HEAD}\n", "t.tsv:1: table has a header but no rows"),
        (f"{HEAD}\n{ROW}\t1\n", "t.tsv:2: has 12 columns; expected 11"),
        (f"{HEAD}\n{ROW.replace('1.5', '-1.5')}\n", "t.tsv:2: forward_compute_time is -1.5; expected zero or more"),
        (f"{HEAD}\n{ROW.replace('1.5', 'inf')}\n", "t.tsv:2: forward_compute_time is inf; expected a finite number"),
        (f"{HEAD}\n{ROW.replace('ALLREDUCE_ASYNC', 'ALLROUND')}\n", "t.tsv:2: unknown communication 'ALLROUND'"),
        (f"{HEAD}\n{ROW.replace('10', '1.5')}\n", "t.tsv:2: backward_comm_size is '1.5'; expected a whole number"),
        (f"{HEAD}\tname\n{ROW}\tx\n", "t.tsv:1: header repeats 'name'"),
    ],
)
def test_errors_name_file_line_and_expectation(text: str, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        read_text(text)
    assert str(caught.value.in_file("t.tsv")).startswith(message)


FUZZ_SEED = b"".join(GPT2_LARGE.read_bytes().splitlines(keepends=True)[:16])


@FUZZ
@given(mutations(FUZZ_SEED))
def test_damaged_files_give_a_workload_or_a_format_error(data: bytes) -> None:
    check_reader(read, data, Workload)


@pytest.mark.parametrize(
    "names",
    [
        ["h_0_a", "h_0_b", "x"],
        ["x", "transformer_h_0_ln_1", "y", "transformer_h_0_b", "z", "transformer_ln_f", "lm_head"],
        ["a_layer_3_x", "a_layers_3_y", "b", "a_end"],
        ["a_layer_3_x", "a_layers_4_y"],
        ["h_0_layer_1_", "h_0_layer_2_", "lm_head_x", "y"],
        ["", "block_7_q", "_block_7_r", ""],
        ["tanh_0_x", "layer", "blocks_1"],
    ],
)
def test_the_one_layer_is_found(names: list[str]) -> None:
    rows = ["\t".join([name, *ROW.split("\t")[1:]]) for name in names]
    data = "\n".join([HEAD, *rows, ""]).encode()
    whole = read(Source("t.tsv", data))
    found = [(at, match) for at, name in enumerate(names) if (match := LAYER_ROW.search(name))]
    body = whole.stages[0].body
    if not found or len({match["index"] for _, match in found}) > 1:
        assert len(body) == 1
    else:
        marked = int(whole.note("layer_block") or 0)
        assert sum(len(block.layers) for block in body[:marked]) == found[0][0]


def test_rows_that_all_differ_are_read_beyond_what_is_remembered() -> None:
    rows = [f"op_{at},{at}.5,None,0,{at + 1},ALLREDUCE_ASYNC,{at},0,None,0,0" for at in range(MOST_KNOWN + 5)]
    workload = read_text("\n".join([",".join(COLUMNS), *rows]))
    layers = workload.stages[0].body[0].layers
    assert len(layers) == MOST_KNOWN + 5
    for at in (0, 1, MOST_KNOWN - 1, MOST_KNOWN, MOST_KNOWN + 4):
        forward, (computed, reduced) = layers[at].forward, layers[at].input_gradient
        assert forward[0].work == Recorded((at + 0.5) * MS)
        assert computed.work == Recorded((at + 1) * MS)
        assert reduced.work == Collective(CollectiveKind.ALL_REDUCE, 4 * at, Group.DP)
    assert not any("backward time" in warning for warning in workload.warnings)
