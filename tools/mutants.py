"""Plant small bugs at random in the rules that matter and see whether the tests of their package notice.

``python tools/mutants.py --count 200 --seed 1``: each mutant changes one expression of one file (an operator, a
comparison, a constant, a condition) in a copy of the checkout, and the tests of that area run with ``-x`` and a limit
on time. A mutant that no test notices survives; survivors are listed with their line. ``--only FILE:LINE`` runs all
mutants of one line. The copy is thrown away.
"""

import argparse
import ast
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "stepcast"
ANSWERS = "tests/test_recorded_answers.py"
# Area -> its files, and the tests that hold its rules (those of its package, the quickest to notice first).
AREAS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cost": (
        tuple(f"cost/{name}.py" for name in (
            "attention", "compute", "host", "matmul", "memory_bound", "pace", "power", "price", "rates", "scan",
            "collectives/algorithms", "collectives/choose", "collectives/flows", "collectives/route",
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
        tuple(f"goodput/{name}.py" for name in ("operation", "plan", "process", "simulated")),
        (ANSWERS, "tests/goodput", "tests/cli/test_plan.py"),
    ),
    "readers": (
        ("inputs/collective_logs.py", "inputs/plain_pickle.py", "inputs/nsys.py", "inputs/source.py", "inputs/simai.py",
         "inputs/op_times.py", "inputs/nccl_tests.py", "inputs/topologies.py", "inputs/stragglers.py"),
        ("tests/inputs", "tests/analyze/test_stragglers.py", "tests/faults/test_attacks.py"),
    ),
    "guard": (("serve/guard.py", "serve/fields.py"), ("tests/serve/test_guard.py", "tests/serve/test_fields.py")),
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
WAITS = 10  # seconds by the clock for each second of processor time
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


def mutants_of(area: str, file: str, only_line: int | None = None) -> Iterator[Mutant]:
    """Yield every mutant of *file*."""
    source = (PACKAGE / file).read_text()
    tree = ast.parse(source)
    skipped = _unimportant(tree)
    for node in ast.walk(tree):
        if id(node) in skipped or not hasattr(node, "lineno"):
            continue
        if only_line is not None and node.lineno != only_line:
            continue
        for changed in _changes(node):
            yield _written(area, file, source, node, changed)


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


def run_tests(copy: Path, tests: tuple[str, ...], seconds: float) -> str:
    """Return how the tests ended: survived, killed, or out of processor time, which counts as killed."""
    present = [test for test in tests if (copy / test).exists()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *present]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(copy / "src"), str(copy)]), "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_MAX_EXAMPLES": "30", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    most = int(seconds)
    running = subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (most, most)),
    )  # fmt: skip
    try:  # a test that waits without end takes no processor time
        status = running.wait(WAITS * seconds)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        return "out of time"
    return "survived" if status == 0 else "out of time" if status in (-signal.SIGKILL, -signal.SIGXCPU) else "killed"


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
        if (PACKAGE / file).exists()
        for mutant in mutants_of(area, file)
    ]
    return random.Random(args.seed).sample(every, min(args.count, len(every)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="mutants (default: 200)")
    parser.add_argument("--seed", type=int, default=1, help="other seeds draw other mutants (default: 1)")
    parser.add_argument("--area", choices=AREAS, help="only this area")
    parser.add_argument("--only", metavar="FILE[:LINE]", help="all mutants of a file or a line, e.g. cost/matmul.py:80")
    parser.add_argument("--seconds", type=float, default=180.0, help="processor time of one mutant (default: 180)")
    parser.add_argument("--minutes", type=float, help="start no further mutant after so many minutes")
    args = parser.parse_args()
    counts, survivors = dict[str, Counter[str]](), list[Mutant]()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "stepcast")
        ignored = shutil.ignore_patterns(
            ".git", ".venv*", "__pycache__", ".*_cache", "site", "dist", "build", "fuzz-found"
        )
        shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)
        if (ROOT.parent / "shared").is_dir():
            (Path(folder) / "shared").symlink_to((ROOT.parent / "shared").resolve())
        mutants = chosen(args)
        for tests in sorted({AREAS[mutant.area][1] for mutant in mutants}):
            if run_tests(copy, tests, WAITS * args.seconds) != "survived":
                sys.exit(f"{' '.join(tests)} fail without any mutant")
        began = time.monotonic()
        for number, mutant in enumerate(mutants, 1):
            if args.minutes and time.monotonic() - began > 60 * args.minutes:
                break
            target = copy / "src" / "stepcast" / mutant.file
            before = target.read_text()
            target.write_text(mutant.text)
            outcome = run_tests(copy, AREAS[mutant.area][1], args.seconds)
            target.write_text(before)
            counts.setdefault(mutant.area, Counter())[outcome] += 1
            if outcome == "survived":
                survivors.append(mutant)
            took = time.monotonic() - began
            place = f"{mutant.file}:{mutant.line}"
            print(
                f"{number:4} {took:6.0f} s  {outcome:11} {place}: {mutant.before[:60]!r} -> {mutant.after[:60]!r}",
                flush=True,
            )
    total = sum(sum(count.values()) for count in counts.values())
    noticed = total - len(survivors)
    for area, count in counts.items():
        print(f"{area:10} {sum(count.values()) - count['survived']:4} of {sum(count.values()):4}  {dict(count)}")
    print(f"noticed {noticed} of {total} ({100 * noticed / max(1, total):.0f} %), seed {args.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
