"""Plant small bugs at random in the rules that matter and see whether the tests of their area notice.

``python tools/mutants.py --count 200 --seed 1``: each mutant changes one expression of one file (an operator, a
comparison, a constant, a condition). First the tests of all areas run once and note which functions each one calls.
Then every mutant meets the tests that call its function, the quickest first, until one fails. A mutant that no test
notices survives; survivors are listed with their line. ``--only FILE:LINE`` runs all mutants of one line.

All of it happens in copies of the checkout, one for each worker, which are thrown away; each mutant runs in a fork of
a process that has loaded pytest and numpy already.
"""

import argparse
import ast
import importlib.util
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import CodeType, FrameType

import hypothesis  # noqa: F401  # loaded once, for all forks
import msgspec  # noqa: F401
import numpy  # noqa: F401
import pytest
import yaml  # noqa: F401

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "stepcast"
ANSWERS = "tests/test_recorded_answers.py"
# Area -> its files, and the tests that hold its rules.
AREAS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cost": (
        tuple(f"cost/{name}.py" for name in (
            "attention", "compute", "host", "matmul", "memory_bound", "pace", "power", "price", "pricing",
            "scan_and_convolution", "collectives/algorithms", "collectives/choose", "collectives/flows",
            "collectives/route",
        )),
        (ANSWERS, "tests/cost"),
    ),
    "memory": (
        tuple(f"cost/memory/{name}.py" for name in ("allocator", "piece", "stages", "states")),
        (ANSWERS, "tests/cost"),
    ),
    "legality": (
        ("ir/legality.py", "ir/layout.py"),
        (ANSWERS, "tests/ir", "tests/questions", "tests/cli/test_mistakes.py", "tests/cli/test_applicable.py"),
    ),
    "goodput": (
        tuple(f"goodput/{name}.py" for name in ("plan", "process")),
        (ANSWERS, "tests/goodput", "tests/cli/test_plan.py"),
    ),
    "readers": (
        ("inputs/recorded.py", "inputs/plain_pickle.py", "inputs/source.py", "inputs/simai.py",
         "inputs/op_times.py", "inputs/nccl_tests.py", "inputs/spans.py", "inputs/topologies.py",
         "inputs/stragglers.py"),
        ("tests/inputs", "tests/analyze/test_stragglers.py", "tests/faults/test_attacks.py"),
    ),
    "configs": (
        tuple(f"inputs/{name}.py" for name in (
            "configs/keys", "configs/megatron", "configs/nemo", "configs/peers", "configs/reader", "configs/rl",
            "configs/shell", "configs/torchtitan", "configs/tuning", "expression",
        )),
        ("tests/inputs/test_configs.py", "tests/inputs/test_tuning_configs.py", "tests/inputs/test_peers.py",
         "tests/inputs/test_config_rules.py",
         "tests/cli/test_configured.py", "tests/generation/test_rl.py", "tests/sweep/test_spec.py"),
    ),
    "measured": (
        tuple(f"inputs/kineto/{name}.py" for name in ("ops", "reader", "stream"))
        + tuple(f"analyze/{name}.py" for name in (
            "changes", "compare", "intervals", "kineto/analysis", "kineto/kernels", "kineto/rank", "kineto/whatif",
            "logs", "megatron/analysis", "replay", "stragglers", "sweeps", "watch",
        )) + ("outputs/gate.py",),
        ("tests/analyze", "tests/inputs/test_kineto.py", "tests/inputs/test_job_logs.py", "tests/inputs/test_spans.py"),
    ),
    "searching": (
        tuple(f"searching/{name}.py" for name in ("best", "bounds", "layers", "mixed", "result", "search", "space")),
        (ANSWERS, "tests/searching", "tests/cli/test_search.py", "tests/questions"),
    ),
    "generation": (
        tuple(f"{name}.py" for name in (
            "generation/engine", "generation/forecast", "generation/lengths", "rl/question", "rl/step", "cost/serving",
        )),
        (ANSWERS, "tests/generation", "tests/cost/test_serving.py", "tests/validate/test_serving_rows.py"),
    ),
    "simulation": (
        tuple(f"simulation/{name}.py" for name in (
            "breakdown", "chunks", "costs", "engine", "lanes", "lowering", "messages", "pipeline", "program",
            "schedule", "schedules", "seconds", "segments", "steady", "step", "timeline", "unfolded",
        )),
        (ANSWERS, "tests/simulation"),
    ),
    "guard": (("serve/app.py", "serve/fields.py"), ("tests/serve/test_guard.py", "tests/serve/test_fields.py")),
    "store": (("sweep/store.py", "sweep/spec.py"), ("tests/sweep/test_spec.py", "tests/sweep/test_sweep.py")),
    "files": (("outputs/files.py",), ("tests/outputs/test_files.py", "tests/faults/test_writing.py")),
}  # fmt: skip
BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip


PLAIN = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)
WAITS = 20  # seconds by the clock for each second of processor time, on a machine that others use too
QUIET = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning")
ENOUGH_TESTS = 8  # that call the function itself
MOST_TESTS_S = 30.0  # of the tests that one mutant meets, the quickest first
MESSAGES = ("FormatError", "Limit", "TypeVar", "cast", "RefusedError")


@dataclass(frozen=True)
class Mutant:
    """One changed expression of a file."""

    area: str
    file: str
    line: int
    before: str
    after: str
    text: str  # of the whole file
    function: int = 0  # the first line of the function around it, with its decorators; 0 outside of functions


def mutants_of(area: str, file: str, only_line: int | None = None) -> Iterator[Mutant]:
    """Yield every mutant of *file*."""
    source = (PACKAGE / file).read_text()
    tree = ast.parse(source)
    skipped = _unimportant(tree)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in ast.walk(tree):
        if id(node) in skipped or not hasattr(node, "lineno"):
            continue
        if only_line is not None and node.lineno != only_line:
            continue
        around = [one for one in functions if one.body[0].lineno <= node.lineno <= (one.end_lineno or 0)]
        starts = [min([one.lineno, *(decorator.lineno for decorator in one.decorator_list)]) for one in around]
        for changed in _changes(node):
            yield replace(_written(area, file, source, node, changed), function=max(starts, default=0))


def _unimportant(tree: ast.AST) -> set[int]:
    """Return the nodes that no behaviour depends on: docstrings, annotations, messages of errors, type checking."""
    skipped: set[int] = set()

    def skip(node: ast.AST | None) -> None:
        if node is not None:
            skipped.update(id(inner) for inner in ast.walk(node))

    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        is_message = isinstance(node, ast.Call) and getattr(node.func, "id", "") in MESSAGES
        if (
            is_text
            or is_typing
            or is_message
            or isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr)
        ):
            skip(node)
        elif isinstance(node, ast.AnnAssign | ast.arg):
            skip(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            skip(getattr(node, "returns", None))
            for decorator in node.decorator_list:
                skip(decorator)
    return skipped


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield changed copies of *node*."""
    if (
        isinstance(node, ast.BinOp)
        and type(node.op) in BINARY
        and not isinstance(node.left, ast.Constant | ast.JoinedStr)
    ):
        yield ast.BinOp(node.left, BINARY[type(node.op)](), node.right)
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield ast.Compare(node.left, [COMPARISONS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        elif isinstance(node.value, int):
            yield ast.Constant(node.value + 1)
        elif isinstance(node.value, float):
            yield ast.Constant(node.value * 2 if node.value else 1.0)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("max", "min"):
        other = "min" if node.func.id == "max" else "max"
        yield ast.Call(ast.Name(other, ast.Load()), node.args, node.keywords)


def _written(area: str, file: str, source: str, node: ast.AST, changed: ast.AST) -> Mutant:
    """Return the mutant with the changed node in the place of the old one, and all else as it was."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    data = source.encode()
    first = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
    last = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
    before, after = data[first:last].decode(), f"({ast.unparse(changed)})"
    return Mutant(area, file, node.lineno, before, after, (data[:first] + after.encode() + data[last:]).decode())  # type: ignore[attr-defined]


@dataclass
class KnownTest:
    """A test that passes without any mutant: its seconds, and the functions it calls as ``file:first line``."""

    name: str
    seconds: float
    calls: set[str] = field(default_factory=set)


class Noting:
    """A pytest plugin that notes what each test calls, and how long it takes."""

    def __init__(self, package: str) -> None:
        self.package, self.known, self.failed = package, list[KnownTest](), list[str]()
        self.called: set[CodeType] = set()

    def trace(self, frame: FrameType, event: str, argument: object) -> None:
        self.called.add(frame.f_code)

    def pytest_runtest_logstart(self) -> None:
        self.called = set()
        self.began = time.process_time()
        sys.settrace(self.trace)

    def pytest_runtest_logreport(self, report: "pytest.TestReport") -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.settrace(None)
        ours = [code for code in self.called if code.co_filename.startswith(self.package)]
        calls = {f"{code.co_filename[len(self.package) + 1 :]}:{code.co_firstlineno}" for code in ours}
        self.known.append(KnownTest(nodeid, time.process_time() - self.began, calls))


class Choosing:
    """A pytest plugin that runs the tests of a list, in its order."""

    def __init__(self, names: Sequence[str]) -> None:
        self.place = {name: place for place, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: "list[pytest.Item]") -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.place), key=lambda item: self.place[item.nodeid]
        )


def enter(copy: Path) -> None:
    """Make this process, a fork, work in *copy*, and say nothing."""
    os.setsid()
    os.chdir(copy)
    sys.path[:0] = [str(copy / "src"), str(copy)]
    os.environ |= {"PYTHONPATH": os.pathsep.join(sys.path[:2]), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    said = os.open(copy.parent / "said.txt", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    for number in range(3):
        os.dup2(said, number)


def note_tests(copy: Path, tests: Iterable[str], to: Path) -> None:
    """Run *tests*, in a fork, and write what they call to a file."""
    enter(copy)
    noting = Noting(str(copy / "src" / "stepcast"))
    pytest.main([*QUIET, *tests], [noting])
    failed = set(noting.failed)
    rows = [[test.name, test.seconds, sorted(test.calls)] for test in noting.known if test.name not in failed]
    to.write_text(json.dumps({"failed": sorted(failed), "tests": rows}))


def try_mutant(copy: Path, mutant: Mutant, names: Sequence[str], seconds: float) -> None:
    """Run tests with the mutant in place, in a fork whose status is that of pytest."""
    (copy / "src" / "stepcast" / mutant.file).write_text(mutant.text)
    enter(copy)
    sys.dont_write_bytecode = True
    most = int(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    files = dict.fromkeys(name.partition("::")[0] for name in names)
    os._exit(int(pytest.main(["-x", *QUIET, *files], [Choosing(names)])))


def chosen_tests(mutant: Mutant, known: Sequence[KnownTest]) -> list[KnownTest]:
    """Return the tests that call the mutant's function, the quickest first, then those that call others of its file."""
    place = f"{mutant.file}:{mutant.function}"
    direct = [test for test in known if place in test.calls] if mutant.function else []
    near = [test for test in known if any(call.startswith(f"{mutant.file}:") for call in test.calls)]
    if len(direct) >= ENOUGH_TESTS:
        near = []
    ordered = [*sorted(direct, key=lambda test: test.seconds), *sorted(near, key=lambda test: test.seconds)]
    taken: dict[str, KnownTest] = {}
    seconds = 0.0
    for test in ordered or sorted(known, key=lambda test: test.seconds):
        if test.name not in taken and seconds + test.seconds <= MOST_TESTS_S:
            taken[test.name] = test
            seconds += test.seconds
    return list(taken.values())


def fork(work: Callable[[], None]) -> int:
    """Return the number of a child that does *work*."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(3)
    return child


def chosen(args: argparse.Namespace) -> list[Mutant]:
    """Return the mutants to run: those of a line, or as many as asked for, drawn at random over all areas."""
    if args.only:
        file, _, line = args.only.partition(":")
        area = next(area for area, (files, _) in AREAS.items() if file in files)
        return list(mutants_of(area, file, int(line) if line else None))
    every = [
        mutant
        for area, (files, _) in AREAS.items()
        if args.area in (None, area)
        for file in files
        for mutant in mutants_of(area, file)
    ]
    return random.Random(args.seed).sample(every, min(args.count, len(every)))


def make_copy(folder: Path) -> Path:
    """Return a copy of the checkout, whose compiled files are compared with the text they were made of."""
    copy = folder / "stepcast"
    ignored = (".git", ".venv*", "__pycache__", ".*_cache", "site", "dist", "build", "fuzz-found", ".device-work")
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*ignored), symlinks=True)
    if (ROOT.parent / "shared").is_dir():
        (folder / "shared").symlink_to((ROOT.parent / "shared").resolve())
    command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", str(copy / "src")]
    subprocess.run(command, check=True)
    return copy


def note_all(copies: Sequence[Path], areas: Iterable[str]) -> list[KnownTest]:
    """Return the tests of *areas* that pass without any mutant; the areas are shared out to the copies."""
    tests = sorted({test for area in areas for test in AREAS[area][1] if (ROOT / test).exists()})
    files = sorted(
        {
            str(path.relative_to(ROOT))
            for test in tests
            for path in ([ROOT / test] if test.endswith(".py") else (ROOT / test).rglob("test_*.py"))
        }
    )
    found, children = list[KnownTest](), {}
    for number, copy in enumerate(copies):
        to = copy.parent / f"tests-{number}.json"
        share = files[number :: len(copies)]
        children[fork(partial(note_tests, copy, share, to))] = to
    for child, to in children.items():
        os.waitpid(child, 0)
        if not to.exists():
            sys.exit(f"the tests could not be run: {to.with_name('said.txt').read_text()[-2000:]}")
        noted = json.loads(to.read_text())
        found += [KnownTest(name, seconds, set(calls)) for name, seconds, calls in noted["tests"]]
        for name in noted["failed"]:
            print(f"left out, it fails without any mutant: {name}", flush=True)
    return found


def run_all(
    mutants: Sequence[Mutant], known: Sequence[KnownTest], copies: Sequence[Path], args: argparse.Namespace
) -> Iterator[tuple[Mutant, str]]:
    """Yield each mutant with its outcome, as many at a time as there are copies."""
    free, running, waiting = list(copies), dict[int, tuple[Mutant, Path, str, float]](), list(reversed(mutants))
    began = time.monotonic()
    while waiting or running:
        while waiting and free:
            mutant, copy = waiting.pop(), free.pop()
            before = (copy / "src" / "stepcast" / mutant.file).read_text()
            tests = chosen_tests(mutant, known)
            most = min(args.seconds, 20 + 4 * sum(test.seconds for test in tests))
            child = fork(partial(try_mutant, copy, mutant, [test.name for test in tests], most))
            running[child] = (mutant, copy, before, time.monotonic() + WAITS * most)
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            mutant, copy, before, _ = running.pop(child)
            (copy / "src" / "stepcast" / mutant.file).write_text(before)
            free.append(copy)
            code = os.waitstatus_to_exitcode(status)
            yield mutant, "survived" if code in (0, 5) else "out of time" if code < 0 else "killed"
            continue
        for child, (_, _, _, until) in running.items():
            if time.monotonic() > until:  # a test that waits without end takes no processor time
                os.killpg(child, signal.SIGKILL)
        if args.minutes and time.monotonic() - began > 60 * args.minutes:
            waiting.clear()
        time.sleep(0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="mutants (default: 200)")
    parser.add_argument("--seed", type=int, default=1, help="other seeds draw other mutants (default: 1)")
    parser.add_argument("--area", choices=AREAS, help="only this area")
    parser.add_argument("--only", metavar="FILE[:LINE]", help="all mutants of a file or a line, e.g. cost/matmul.py:80")
    parser.add_argument("--seconds", type=float, default=120.0, help="processor time of one mutant (default: 120)")
    parser.add_argument("--minutes", type=float, help="start no further mutant after so many minutes")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="mutants at a time (default: cores)")
    args = parser.parse_args()
    if importlib.util.find_spec("starlette") is None:
        print("without the extra web the tests of the area guard are skipped, and its mutants survive", flush=True)
    began, mutants = time.monotonic(), chosen(args)
    counts, survivors = dict[str, Counter[str]](), list[Mutant]()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.workers):
            Path(folder, str(number)).mkdir()
        copies = [make_copy(Path(folder, str(number))) for number in range(args.workers)]
        known = note_all(copies, {mutant.area for mutant in mutants})
        seconds = sum(test.seconds for test in known)
        print(f"{len(known):,} tests of {seconds:.0f} s noted after {time.monotonic() - began:.0f} s", flush=True)
        for number, (mutant, outcome) in enumerate(run_all(mutants, known, copies, args), 1):
            counts.setdefault(mutant.area, Counter())[outcome] += 1
            if outcome == "survived":
                survivors.append(mutant)
            change = f"{mutant.before[:60]!r} -> {mutant.after[:60]!r}"
            took = time.monotonic() - began
            print(f"{number:4} {took:6.0f} s  {outcome:11} {mutant.file}:{mutant.line}: {change}", flush=True)
    total = sum(sum(count.values()) for count in counts.values())
    noticed = total - len(survivors)
    for area, count in counts.items():
        print(f"{area:10} {sum(count.values()) - count['survived']:4} of {sum(count.values()):4}  {dict(count)}")
    print(f"noticed {noticed} of {total} ({100 * noticed / max(1, total):.0f} %), seed {args.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
