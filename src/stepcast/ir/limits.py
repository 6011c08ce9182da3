"""Limits of what stepcast takes from a file or a command line, with the reason for each number.

A limit exists where a small input could state, or become, more than the machine has; what is streamed needs none.
Each limit is far beyond what real runs have. docs/limits.md lists them.
"""

from functools import partial

from stepcast.ir.types import dataclass
from stepcast.units import MIB


class LimitError(ValueError):
    """More than stepcast takes."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest amount of *what* that stepcast takes, and *why* real inputs need no more."""

    what: str
    most: int
    why: str
    unit: str = ""

    def check(self, amount: int) -> None:
        """Raise a LimitError that names the limit if *amount* is beyond it."""
        if amount > self.most:
            raise LimitError(self.message)

    @property
    def message(self) -> str:
        """The message of the error."""
        return f"{self.what}: more than {self.amount}, the most that stepcast takes"

    @property
    def amount(self) -> str:
        return f"{self.most // MIB:,} MiB" if self.unit == "bytes" else f"{self.most:,}"


_bytes = partial(Limit, unit="bytes")

# ---- bytes: files that are read at once -----------------------------------------------------------------

DESCRIPTION = _bytes("description or configuration", MIB, "written by hand, or with a few hundred measured points")
SCHEDULE_FILE = _bytes("schedule file", 16 * MIB, "64 stages of 8,192 micro-batches")
CONFIG = _bytes("model config", 16 * MIB, "a config.json has a few kilobytes")
RESULT = _bytes("JSON result", 64 * MIB, "what a verb prints with --json, with thousands of stages")
GROUPS = _bytes("list of communicators", 64 * MIB, "a comm_group.json of a hundred thousand ranks")
LENGTHS = _bytes("list of lengths", 16 * MIB, "a million steps next to an OptimusPrime log")
CAPTURED = _bytes("captured program", 256 * MIB, "a model of a thousand different layers takes about 10 MiB")
TRACE = _bytes("trace that is read at once", 8192 * MIB, "its nodes are decoded at once and take three times its size")
CHAKRA_SET = _bytes("set of Chakra files to be written", 2048 * MIB, "replicas beyond it add nothing")
PIPE = _bytes(
    "pipe or standard input", 512 * MIB, "it can be read only once, so its bytes stay in memory; files may be larger"
)

# ---- bytes: files that are streamed -------------------------------------------------------------------

LINE = _bytes("line of text", 16 * MIB, "no format has longer lines; JSON traces are not read by line")
UNPACKED = _bytes("compressed file, unpacked", 256 * MIB, "or 200 times its size; traces are packed about twenty-fold")
UNPACKED_TIMES = 200

# ---- counts -------------------------------------------------------------------------------------------

GPUS = Limit("GPUs", 2**24, "a hundred times the largest cluster")
LISTED = Limit("nodes that a file names", 1_000_000, "several times the largest cluster")
LAYERS = Limit("layers", 10_000, "models have up to a few hundred")
CHUNKS = Limit("stages times chunks of a pipeline", 10_000, "each holds at least one layer")
CONTEXT = Limit("context parallel ranks", 4_096, "a ring has a step for each; runs have up to a few hundred")
WIDTH = Limit("width or vocabulary of a model", 2**31, "widths go up to 2^18, vocabularies to 2^20")
MICRO_BATCHES = Limit("micro-batches of a step", 1_000_000, "a step has up to a few thousand")
OPTIMUS = Limit("stages times micro-batches of an OptimusPrime run", 100_000, "runs have a few hundred")
SEQUENCES = Limit("sequences of a batch", 1_000_000_000, "a step has up to tens of thousands")
TOKENS = Limit("tokens of a sequence", 1_000_000_000, "sequences have up to a few million")
ELEMENTS = Limit("size of an operator in one dimension", 10**12, "dimensions go up to 2^31")
SHARED_VALUES = Limit(
    "values that a pickle refers to again",
    5_000_000,
    "names of files and functions; a recorder of 20,000 calls has four",
)
GROUP_RANKS = Limit("ranks of all process groups", 2_000_000, "twenty groups of a hundred thousand")
NSYS_ROWS = Limit("kernels of an Nsight Systems export", 50_000_000, "a few thousand steps")
NSYS_DEVICES = Limit("devices of an Nsight Systems export", 1_024, "a node has up to 72")
SLOTS = Limit("slots of a schedule that are simulated one by one", 2**18, "for schedules without a steady state")
OPS_DESCRIBED = Limit(
    "ops of a stage without layers, times its calls that start differently",
    2_000_000,
    "the report reads each of them; stages have a few thousand ops",
)
TASKS = Limit(
    "tasks of a step that is written out", 4_000_000, "timelines and jitter need it; most steps have a few 100,000"
)
JITTERED = Limit("tasks of a step times its runs with jitter", 100_000_000, "a hundred runs of a large step")
NODES = Limit("nodes of the stages of a Chakra set", 500_000, "a stage has tens of thousands")
CANDIDATES = Limit("candidates of a search", 5_000_000, "a table of 2 GB; a wide search has a million")
PRICED = Limit("kinds of layers that a search prices", 10_000, "milliseconds each; DeepSeek-V3 on 2,048 GPUs has 6,725")
STEPS = Limit("steps of a run", 10**12, "runs have up to a few million")
RUNS = Limit("simulated runs", 1_000_000, "a thousand are enough")
INTERRUPTIONS = Limit("interruptions of all simulated runs", 100_000_000, "a run of months has a few thousand")
COLUMNS = Limit("columns of a table", 1_000, "tables have a few dozen")
BASES = Limit("chain of files that build on each other", 32, "people write chains of two or three")
POINTS = Limit("points of a sweep", 10_000_000, "a million take more than an hour on two cores")
UNASKED = Limit("points of a sweep without --limit", 1_000_000, "the refusal says how long they would take")
SEARCHES = Limit("searches of a sweep without --limit", 1_000, "each takes seconds to minutes")
SCRIPT = Limit("characters of a launch script", 200_000, "scripts have a few thousand")
EXPRESSION = Limit("characters of an expression", 10_000, "a filter has a few dozen")
BACKGROUND = Limit("background jobs and patterns", 1_000, "clusters run dozens of jobs at once")
KEY_PARTS = Limit("parts of a TOML key", 64, "keys have two or three; the parser takes their square")

LIMITS = tuple(value for value in globals().values() if isinstance(value, Limit))
