"""What a form may say, and the command line it means.

A request reaches the program only through these: a value is one of a list, or a whole number within limits.
No text of a request is a path, an option or a word of a command line by itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepcast.frameworks.catalog import framework_names
from stepcast.hardware import cluster_names
from stepcast.ir.dtype import DType
from stepcast.ir.schedules import ScheduleKind
from stepcast.ir.strategy import Sharding
from stepcast.models.catalog import model_names

LONGEST_VALUE = 200
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")
RECOMPUTES = ("none", "selective", "full")
OBJECTIVES = ("step", "throughput", "cost", "memory", "energy")


class FieldError(ValueError):
    """A form says what it may not."""


@dataclass(frozen=True, slots=True)
class Field:
    """One thing to choose; *choices* or *limits* say what it may be, nothing given means the framework's."""

    name: str
    label: str
    choices: tuple[str, ...] = ()
    limits: tuple[int, int] = (1, 1)
    usual: str = ""
    powers: bool = False  # a slider of powers of two
    plain: str = ""  # what a command line means that does not say it
    note: str = ""

    @property
    def option(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    def words(self, value: str) -> list[str]:
        """The words of a command line that *value* stands for."""
        if self.choices:
            if value not in self.choices:
                raise FieldError(f"{self.label}: {value[:40]!r} is not one of those known")
            return [self.option, value]
        low, high = self.limits
        if not (value.isascii() and value.isdigit() and len(value) <= 12) or not low <= int(value) <= high:
            raise FieldError(f"{self.label}: expected a whole number from {low:,} to {high:,}")
        return [self.option, str(int(value))]


MODEL = Field("model", "Model", model_names(), usual="llama-3.1-70b")
CLUSTER = Field("cluster", "Cluster", cluster_names(), usual="dgx-h100")
FRAMEWORK = Field("framework", "Framework", framework_names(), usual="megatron-core")
GPUS = Field("gpus", "GPUs", limits=(1, 1_000_000), usual="64", powers=True)
BATCH = Field("global_batch", "Global batch", limits=(1, 10_000_000), usual="256", note="sequences in a step")
SEQ = Field("seq", "Sequence", limits=(1, 10_000_000), usual="4096", note="tokens")
PREDICT: tuple[Field, ...] = (
    MODEL,
    CLUSTER,
    FRAMEWORK,
    GPUS,
    Field("tp", "Tensor parallel", limits=(1, 4096), usual="8", powers=True, plain="1"),
    Field("pp", "Pipeline parallel", limits=(1, 4096), usual="2", powers=True, plain="1"),
    Field("cp", "Context parallel", limits=(1, 4096), usual="1", powers=True, plain="1"),
    Field("ep", "Expert parallel", limits=(1, 4096), usual="1", powers=True, plain="1"),
    Field("vpp", "Virtual pipeline stages", limits=(1, 512), note="per rank (VPP)"),
    Field("micro_batch", "Micro-batch", limits=(1, 100_000), usual="1", powers=True, plain="1"),
    BATCH,
    SEQ,
    Field("precision", "Precision", tuple(str(each) for each in DType if str(each) in PRECISIONS)),
    Field("sharding", "Sharding", tuple(map(str, Sharding))),
    Field("recompute", "Recompute", RECOMPUTES),
    Field("schedule", "Schedule", tuple(map(str, ScheduleKind))),
)
SEARCH: tuple[Field, ...] = (
    MODEL,
    CLUSTER,
    FRAMEWORK,
    GPUS,
    BATCH,
    SEQ,
    Field("objective", "Minimise", OBJECTIVES, usual="step"),
    Field("top", "Strategies to rank", limits=(1, 50), usual="10"),
)


def command_words(verb: str, fields: Sequence[Field], given: Mapping[str, str]) -> list[str]:
    """The command line of a form; what is not known, no choice of it or beyond its limits is refused."""
    known = {field.name: field for field in fields}
    words = [verb]
    for name, value in given.items():
        if name not in known:
            raise FieldError(f"a form has no field {name[:40]!r}")
        if len(value) > LONGEST_VALUE:
            raise FieldError(f"{known[name].label}: too long")
    for name, field in known.items():
        value = given.get(name, "").strip()
        if value and value != field.plain:
            words += field.words(value)
    return words
