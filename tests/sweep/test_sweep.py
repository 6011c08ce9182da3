"""Sweeps lose nothing: workers and drivers that die, stores that cannot be written, specs that change."""

import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stepcast.sweep.store import LOCK, NAME, RETRY, Store, rows_of, status_facts
from tests.shared import ROOT
from tests.sweep import questions
from tests.sweep.questions import table

KILLS = 12


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    questions.run(str(folder))
    return table(folder)


def test_every_point_is_answered_once(undisturbed: list[dict[str, Any]]) -> None:
    assert len(undisturbed) == questions.POINTS
    assert len({row["position"] for row in undisturbed}) == questions.POINTS
    assert all(row["step_s"] == row["tp"] * row["pp"] for row in undisturbed if row["error"] is None)
    assert [row["error"] for row in undisturbed if row["error"]] == ["no such point"] * 3


def test_a_second_run_asks_nothing(tmp_path: Path) -> None:
    questions.run(str(tmp_path))
    again = questions.run(str(tmp_path), questions.broken)
    assert (again.new, again.answered, again.points) == (0, questions.POINTS, questions.POINTS)


def test_a_changed_spec_keeps_what_is_still_asked(tmp_path: Path) -> None:
    questions.run(str(tmp_path))
    changed = questions.SPEC.replace('"c"]', '"d"]')
    assert questions.run(str(tmp_path), text=changed).new == questions.POINTS // 3
    assert {row["model"] for row in table(tmp_path)} == {"a", "b", "d"}
    assert questions.run(str(tmp_path)).new == 0, "what the first spec asked is there still"


def test_another_program_is_asked_anew(tmp_path: Path) -> None:
    questions.run(str(tmp_path))
    assert questions.run(str(tmp_path), program="another").new == questions.POINTS


def test_a_point_that_kills_its_workers_is_an_error_and_no_other_is(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    questions.run(str(tmp_path), questions.deadly, workers=2)
    killed = [row for row in table(tmp_path) if "workers died" in str(row["error"])]
    assert [(row["model"], row["tp"], row["pp"]) for row in killed] == [("b", 4, 16)]
    assert "SIGKILL" in killed[0]["error"]
    places = {row["position"] for row in killed}
    assert [row for row in table(tmp_path) if row["position"] not in places] == [
        row for row in undisturbed if row["position"] not in places
    ]


def test_what_no_point_is_to_blame_for_ends_the_sweep(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no space left"):
        questions.run(str(tmp_path), questions.broken)


def test_kills_of_drivers_and_workers_lose_nothing(tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    folder, chance, kills = tmp_path / "sweep", random.Random(7), 0
    folder.mkdir()
    for turn in range(4 * KILLS):
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.sweep.questions", str(folder)], cwd=ROOT, start_new_session=True
        )
        time.sleep(chance.uniform(0.05, 0.8))
        if turn % 2:
            killed = _kill_a_worker(folder, driver.pid)
            while not killed and driver.poll() is None:  # on a busy machine workers start late
                time.sleep(0.01)
                killed = _kill_a_worker(folder, driver.pid)
        else:
            driver.kill()
            killed = driver.wait() == -signal.SIGKILL
        kills += killed
        driver.kill()
        driver.wait()
        if kills >= KILLS:
            break
        if turn % 6 == 5:  # a whole run takes less than a second
            for path in folder.iterdir():
                path.unlink()
    assert kills >= KILLS
    questions.run(str(folder), workers=2)
    assert table(folder) == undisturbed


def _kill_a_worker(folder: Path, driver: int) -> bool:
    """Kill a worker of *driver*, which then goes on with another."""
    told = folder / "workers"
    numbers = told.read_text().split() if told.exists() else []
    for number in map(int, numbers):
        try:
            parent = Path(f"/proc/{number}/stat").read_text().rsplit(")")[1].split()[1]
            if int(parent) == driver:
                os.kill(number, signal.SIGKILL)
                time.sleep(0.1)
                return True
        except (OSError, IndexError):
            continue
    return False


# ---- what can be wrong with a folder --------------------------------------------------------------------


def test_two_drivers_of_one_folder(tmp_path: Path) -> None:
    with Store(str(tmp_path), writes=True), pytest.raises(ValueError, match="another sweep is writing there"):
        questions.run(str(tmp_path))
    questions.run(str(tmp_path))


def test_a_store_that_is_damaged_is_left_as_it_is(tmp_path: Path) -> None:
    questions.run(str(tmp_path))
    path = tmp_path / NAME
    data = bytearray(path.read_bytes())
    data[100:3000] = os.urandom(2900)
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged"):
        questions.run(str(tmp_path))
    assert path.read_bytes() == data
    path.write_bytes(b"no database at all, but text that is longer than a header\n" * 20)
    with pytest.raises(ValueError, match="is damaged"):
        Store(str(tmp_path))


@pytest.mark.parametrize("table_name", ["points", "answers"])
def test_a_damaged_row_is_noticed(tmp_path: Path, table_name: str) -> None:
    """Bytes of a value that changed on disk leave a database that is well-formed."""
    questions.run(str(tmp_path))
    path = tmp_path / NAME
    base = sqlite3.connect(path)
    column = "tp" if table_name == "points" else "step_s"
    base.execute(f"UPDATE {table_name} SET {column} = {column} + 1 WHERE rowid IN (SELECT rowid FROM points LIMIT 1)"
                 if table_name == "points" else "UPDATE answers SET step_s = 77.0 WHERE step_s = 64.0")  # fmt: skip
    base.commit()
    base.close()
    for writes in (False, True):
        with pytest.raises(ValueError, match=f"is damaged .*row of {table_name}"):
            Store(str(tmp_path), writes)


def test_a_sweep_that_was_killed_before_its_first_point(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"")
    with pytest.raises(ValueError, match="ended before its first point"):
        Store(str(tmp_path))
    questions.run(str(tmp_path))
    assert len(table(tmp_path)) == questions.POINTS


def test_an_error_that_may_pass_is_asked_again(tmp_path: Path) -> None:
    questions.run(str(tmp_path), questions.forgetful)
    assert {row["state"] for row in table(tmp_path) if row["model"] == "a"} == {RETRY}
    again = questions.run(str(tmp_path))
    assert (again.new, again.answered) == (questions.POINTS // 3, questions.POINTS)


def test_answers_of_another_program_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="runs another version of stepcast"):
        questions.run(str(tmp_path), identify=questions.other_program)
    assert table(tmp_path) == [], "none of them is stored"


def test_workers_that_cannot_start_blame_no_point(tmp_path: Path) -> None:
    script = "import sys; sys.path.insert(0, '.'); from tests.sweep import questions; questions.run(sys.argv[1])"
    ended = subprocess.run(
        [sys.executable, "-", str(tmp_path)], input=script, cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert "ended before it could start" in ended.stderr.splitlines()[-1]
    assert table(tmp_path) == []


def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    base = sqlite3.connect(tmp_path / NAME)
    base.execute("CREATE TABLE mine (x)")
    base.close()
    with pytest.raises(ValueError, match="is not the store of a sweep"):
        questions.run(str(tmp_path))


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    questions.run(str(tmp_path))
    base = sqlite3.connect(tmp_path / NAME)
    base.execute("PRAGMA user_version = 77")
    base.close()
    with pytest.raises(ValueError, match="another version of stepcast"):
        questions.run(str(tmp_path))


def test_no_sweep_in_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no sweep"):
        Store(str(tmp_path))


def test_a_full_disk_keeps_what_was_answered(tmp_path: Path) -> None:
    small = 'where = "pp < 3"\n' + questions.SPEC
    questions.run(str(tmp_path), text=small)
    before = table(tmp_path)
    script = "from tests.sweep import questions; import sys; questions.run(sys.argv[1])"

    def limited() -> None:
        size = (tmp_path / NAME).stat().st_size + 4096
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    many = questions.SPEC.replace('"1..1024"', str(list(range(1, 400))))
    ended = subprocess.run(
        [sys.executable, "-c", script.replace("sys.argv[1]", f"sys.argv[1], text={many!r}"), str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, preexec_fn=limited, check=False,
    )  # fmt: skip
    assert "ValueError" in ended.stderr
    assert "results.sqlite:" in ended.stderr.splitlines()[-1]
    assert "free some space" in ended.stderr.splitlines()[-1]
    assert table(tmp_path) == before, "the points of before are those of now"


@pytest.mark.skipif(os.geteuid() == 0, reason="needs a user other than root, who may write everywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="denied"):
        questions.run(str(tmp_path))


# ---- seeing ---------------------------------------------------------------------------------------------


def test_rows_by_condition_and_order(tmp_path: Path) -> None:
    questions.run(str(tmp_path))
    with Store(str(tmp_path)) as store:
        found = rows_of(store, "mfu > 0.4 AND model = 'a'", "step_s", 3, reverse=True)
        assert [row["step_s"] for row in found] == [2048.0, 1024.0, 1024.0]
        assert [row["error"] for row in rows_of(store, "error IS NOT NULL")] == ["no such point"] * 3
        status = status_facts(store)
    assert (status["points"], status["left"], status["errors"]) == (questions.POINTS, 0, 3)
    assert status["common_errors"] == [{"error": "no such point", "points": 3}]


@pytest.mark.parametrize(
    "where",
    ["nope > 1", "1) UNION SELECT * FROM points --", "1); DROP TABLE answers; --", "load_extension('x')", "", "(", "readfile('/etc/passwd') > 1"],
)  # fmt: skip
def test_a_condition_can_change_and_open_nothing(tmp_path: Path, where: str) -> None:
    questions.run(str(tmp_path))
    before = (tmp_path / NAME).read_bytes()
    with Store(str(tmp_path)) as store:
        if where:
            with pytest.raises(ValueError, match="--where"):
                rows_of(store, where)
        with pytest.raises(ValueError, match="--sort"):
            rows_of(store, sort="position; DROP TABLE answers")
    assert (tmp_path / NAME).read_bytes() == before
    assert (tmp_path / LOCK).exists()


def test_answers_are_on_the_disk_when_a_chunk_is_stored(tmp_path: Path) -> None:
    with Store(str(tmp_path), writes=True) as store:
        assert store.base.execute("PRAGMA synchronous").fetchone()[0] == 2
        assert store.base.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


@pytest.mark.parametrize("function", ["zeroblob(9)", "randomblob(9)", "load_extension('x')"])
def test_functions_that_make_or_open_things_are_denied(tmp_path: Path, function: str) -> None:
    questions.run(str(tmp_path))
    with Store(str(tmp_path)) as store, pytest.raises(ValueError, match="not authorized"):
        rows_of(store, f"length({function}) >= 0")
