"""Steps of a recorded job: what each rank's file must hold."""

import json
from pathlib import Path

import pytest

from stepcast.inputs.recorded import read_steps
from stepcast.inputs.source import FormatError

MESSAGE = {"start_s": 1.0, "end_s": 1.1, "name": "all_reduce", "bytes": 4096, "ranks": [0, 1]}


def write_steps(folder: Path, message: dict[str, object]) -> None:
    steps = {"rank": 0, "step_ends_s": [1.0, 2.0, 3.0, 4.0, 5.0], "window": [2, 2], "collectives": [message]}
    (folder / "rank0.json").write_text(json.dumps(steps))


def test_messages_are_counted(tmp_path: Path) -> None:
    write_steps(tmp_path, MESSAGE)
    (rank,) = read_steps(str(tmp_path))
    assert (rank["rank"], rank["steps"], rank["step_s"], rank["collectives"]) == (0, 5, 1.0, 1)


@pytest.mark.parametrize("changed", [{"bytes": "many"}, {"name": 3}, {"end_s": None}, {"ranks": "all"}])
def test_damaged_messages_are_refused(tmp_path: Path, changed: dict[str, object]) -> None:
    write_steps(tmp_path, {**MESSAGE, **changed})
    with pytest.raises(FormatError, match=r"no steps of a recorded job.*\$\.collectives\[0\]"):
        read_steps(str(tmp_path))
