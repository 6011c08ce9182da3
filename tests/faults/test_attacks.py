"""Small hostile files are refused in one line, within 5 s and 1 GB."""

from pathlib import Path

import pytest

from stepcast.sweep.store import Store, rows_of
from tests.faults.attacks import CONDITIONS, attacks
from tests.fuzz.worker import run_command
from tests.sweep import questions

ATTACKS = {name: (file, data, words) for name, file, data, words in attacks()}
MOST_BYTES, MOST_CPU_S = 10**9, 5.0


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_in_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file, data, words = ATTACKS[name]
    Path(file).write_bytes(data() if callable(data) else data)
    outcome = run_command(words, most_bytes=MOST_BYTES, seconds=MOST_CPU_S)
    assert not outcome.fault, outcome.err[:500]
    assert outcome.status == 2, outcome.out[:500]


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_condition_on_a_sweep_is_bounded(name: str, tmp_path: Path) -> None:
    questions.run(str(tmp_path))
    with Store(str(tmp_path)) as store:
        with pytest.raises(ValueError, match=r"--where.*(too long|not authorized|too big|MiB)"):
            rows_of(store, CONDITIONS[name])
        assert len(rows_of(store, "tp = 8")) == questions.POINTS // 4, "it can be asked again"
