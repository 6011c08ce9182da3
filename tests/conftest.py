"""Set up hypothesis, the markers of slow tests and the list of skipped tests at the end of a run.

Hypothesis tries the same examples in every run, on a developer's machine as in continuous integration, so that a
change that passes in one passes in the other. All settings that hypothesis would choose by the variable ``CI``
are therefore fixed here. ``pytest --hypothesis-profile explore`` looks for new examples instead. No profile has
a deadline, and slow data generation is no error: either would fail on a busy machine.
"""

import gc
import os
from collections import Counter
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "repeat",
    max_examples=50,
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeat")

TESTS = Path(__file__).parent
# Markers of all tests of a folder or a file; pyproject.toml describes them, and 'make quick' leaves them out.
MARKED = {
    "browser": ("browser",),
    "exhaustion": ("fuzz/test_bombs.py",),
    "fuzz": ("fuzz",),
    "subprocess": (
        "cli/test_colour.py",
        "cli/test_streams.py",
        "cli/test_sweep.py",
        "faults",
        "serve",
        "sweep/test_engines.py",
        "sweep/test_sweep.py",
    ),
    "slow": (
        "analyze/test_megatron_analysis.py",
        "analyze/test_megatron_experts.py",
        "analyze/test_megatron_replay.py",
        "analyze/test_stragglers.py",
        "analyze/test_sweeps_measured.py",
        "cli/test_analyze_verbs.py",
        "cli/test_applicable.py",
        "cli/test_calibrate.py",
        "cli/test_calibrate_collectives.py",
        "cli/test_captured.py",
        "cli/test_chakra_sets.py",
        "cli/test_frameworks.py",
        "cli/test_grammar.py",
        "cli/test_help.py",
        "cli/test_mistakes.py",
        "cli/test_network.py",
        "cli/test_profile.py",
        "cli/test_search.py",
        "cli/test_simulate.py",
        "cli/test_validate.py",
        "cost/test_compute_measured.py",
        "cost/test_expert_exchange.py",
        "cost/test_flows.py",
        "cost/test_memory_measured.py",
        "cost/test_power.py",
        "forecast/test_fluid.py",
        "forecast/test_long_steps.py",
        "forecast/test_predict_experts.py",
        "forecast/test_predict_many.py",
        "generate/test_plain.py",
        "goodput/test_process.py",
        "hardware/test_hardware_placement.py",
        "inputs/test_configs.py",
        "optimus",
        "outputs/test_perfetto.py",
        "pages/test_notebook.py",
        "pages/test_pages.py",
        "pages/test_slices.py",
        "pytorch",
        "questions/test_changes.py",
        "questions/test_search_axes.py",
        "searching",
        "simulation/fluid",
        "sweep/test_spec.py",
        "test_documented.py",
        "test_notebooks.py",
        "test_site.py",
        "test_tasks.py",
        "validate",
    ),
}
MARKERS = {place: marker for marker, places in MARKED.items() for place in places}
CHANGE_OUTPUT = ("COLUMNS", "LINES", "NO_COLOR", "RANK", "LOCAL_RANK", "WORLD_SIZE")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep garbage collection away from the collected tests: looking through them takes a tenth of the whole run.

    They move to the oldest generation. They do not stay frozen, because a prediction asks how many objects are, which
    counts them one by one: with all tests frozen, that took a third of the whole run.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.unfreeze()
        gc.set_threshold(50_000, 20, 20)
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the places in MARKED, and property tests as slow: each runs many examples."""
    markers = cache(_markers)
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("slow")
        for marker in markers(item.path):
            item.add_marker(marker)


def _markers(path: Path) -> list[str]:
    """Return the markers of a file and of its parent folders."""
    if not path.is_relative_to(TESTS):
        return []
    inside = path.relative_to(TESTS)
    return [MARKERS[place.as_posix()] for place in (inside, *inside.parents) if place.as_posix() in MARKERS]


@pytest.fixture(scope="session", autouse=True)
def _neutral_environment() -> Iterator[None]:
    """Remove variables of a developer's shell or job that change what the command prints or does.

    Searches and sweeps in the process of the tests use one worker unless they ask for more, as on a machine with one
    core: the tests themselves run on all cores. Those that a test starts as a process use as many as there are.
    """
    for name in list(os.environ):
        if name in CHANGE_OUTPUT or name.startswith("STEPCAST_RECORD"):
            del os.environ[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print each reason for skipping once, with the number of tests (or of files skipped on import)."""
    reasons: Counter[tuple[str, str]] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        if isinstance(report.longrepr, tuple):
            unit = "file" if isinstance(report, pytest.CollectReport) else "test"
            reasons[report.longrepr[2].removeprefix("Skipped: "), unit] += 1
    if reasons:
        terminalreporter.section("skipped")
    for (reason, unit), count in sorted(reasons.items()):
        terminalreporter.line(f"{count} {unit}{'s' if count > 1 else ''}: {reason}")
