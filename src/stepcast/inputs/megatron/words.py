"""The words of a Megatron-LM rank trace: operations, groups, collectives, shapes and numbers."""

import math
import re
from dataclasses import dataclass

from stepcast.inputs.errors import FormatError
from stepcast.ir.dtype import DType
from stepcast.ir.group import Group
from stepcast.ir.timeline import SpanKind
from stepcast.ir.work import Collective, CollectiveKind, Direction, Transfer, Work

# No trace lasts 30,000 years; what is beyond is a damaged number.
LARGEST_MS = 1e15
LARGEST_BYTES = 2**62

NUMBER = re.compile(r"[+-]?[0-9]{1,40}(?:\.[0-9]{0,40})?(?:[eE][+-]?[0-9]{1,3})?|nan|-?inf", re.ASCII)
COUNT = re.compile(r"[0-9]{1,9}", re.ASCII)
SHAPE = re.compile(r"(?:torch\.Size\()?\[((?:[0-9]{1,15}(?:, ?[0-9]{1,15})*)?)\]\)?", re.ASCII)
FIELD_START = re.compile(r",(?=[A-Za-z_][A-Za-z0-9_]*=)")

# Where a transfer's peer is: stages up (+1) or down (-1) the pipeline.
TRANSFERS: dict[str, tuple[Direction, int]] = {
    "recv_forward": (Direction.RECEIVE, -1),
    "send_forward": (Direction.SEND, 1),
    "recv_backward": (Direction.RECEIVE, 1),
    "send_backward": (Direction.SEND, -1),
}
# The group that an operation reduces over, used where its line names none.
REDUCTIONS: dict[str, Group] = {
    "dp_allreduce": Group.DP,
    "ep_allreduce": Group.EMBEDDING,
    "pep_allreduce": Group.EMBEDDING,
    "ep_dp_allreduce": Group.EXPERT_DP,
    "exp_dp_allreduce": Group.EXPERT_DP,
}
BUCKET = "ddp_grad_comm"  # one gradient bucket, launched from within the backward pass
KINDS: dict[str, SpanKind] = {
    "get_batch": SpanKind.HOST,
    "forward_step": SpanKind.COMPUTE,
    "loss_func": SpanKind.COMPUTE,
    "backward_step": SpanKind.COMPUTE,
    "optimizer_step": SpanKind.COMPUTE,
    BUCKET: SpanKind.COMMUNICATION,
    **dict.fromkeys(TRANSFERS, SpanKind.COMMUNICATION),
    **dict.fromkeys(REDUCTIONS, SpanKind.COMMUNICATION),
}
# "ep" is the embedding group (first and last stage), "pep" the one of position embeddings; experts are "exp".
GROUPS: dict[str, Group] = {
    "tp": Group.TP,
    "cp": Group.CP,
    "dp": Group.DP,
    "pp": Group.PP,
    "ep": Group.EMBEDDING,
    "pep": Group.EMBEDDING,
    "exp": Group.EP,
    "ep_dp": Group.EXPERT_DP,
    "exp_dp": Group.EXPERT_DP,
}
COLLECTIVES: dict[str, CollectiveKind] = {
    "allreduce": CollectiveKind.ALL_REDUCE,
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "broadcast": CollectiveKind.BROADCAST,
    "allgather": CollectiveKind.ALL_GATHER,
    "all_gather": CollectiveKind.ALL_GATHER,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "reducescatter": CollectiveKind.REDUCE_SCATTER,
    "all_to_all": CollectiveKind.ALL_TO_ALL,
    "alltoall": CollectiveKind.ALL_TO_ALL,
    "reduce": CollectiveKind.REDUCE,
    "gather": CollectiveKind.GATHER,
    "scatter": CollectiveKind.SCATTER,
    "barrier": CollectiveKind.BARRIER,
}
DTYPES: dict[str, DType] = {
    "float64": DType.FP64,
    "double": DType.FP64,
    "float32": DType.FP32,
    "float": DType.FP32,
    "float16": DType.FP16,
    "half": DType.FP16,
    "bfloat16": DType.BF16,
    "float8_e4m3fn": DType.FP8,
    "float8_e5m2": DType.FP8,
    "int64": DType.INT64,
    "long": DType.INT64,
    "int32": DType.INT32,
    "int": DType.INT32,
    "int16": DType.INT16,
    "int8": DType.INT8,
    "uint8": DType.INT8,
    "bool": DType.BOOL,
}


def parse_ms(word: str, text: str) -> float:
    """The milliseconds of field *word*; ``None`` (never measured) is zero."""
    if text == "None":
        return 0.0
    if not NUMBER.fullmatch(text):
        raise FormatError(f"{word} is {text[:40]!r}; expected milliseconds, a number like 604.58")
    value = float(text)
    if not (0 <= value < LARGEST_MS):
        raise FormatError(f"{word} is {text[:40]}; expected milliseconds, zero or more and below 1e15")
    return value


def parse_count(word: str, text: str) -> int:
    if not COUNT.fullmatch(text):
        raise FormatError(f"{word} is {text[:40]!r}; expected a whole number")
    return int(text)


def parse_shape(text: str) -> tuple[int, ...] | None:
    """``[2048, 2, 5120]``; None where nothing is written."""
    if text in ("None", ""):
        return None
    match = SHAPE.fullmatch(text)
    if match is None:
        raise FormatError(
            f"input__shape is {text[:40]!r}; expected a list of whole numbers like [2048, 2, 5120]"
        )
    return tuple(int(size) for size in match[1].split(",")) if match[1] else ()


def parse_fields(text: str) -> dict[str, str]:
    """``a=1,b=x, y,c=2`` as a mapping: a comma ends a value only where ``word=`` follows."""
    fields: dict[str, str] = {}
    for part in FIELD_START.split(text):
        word, equals, value = part.partition("=")
        if not equals or not word.isidentifier():
            raise FormatError(f"found {part[:40]!r}; expected fields word=value separated by commas")
        if word in fields:
            raise FormatError(f"field {word} is given twice")
        fields[word] = value
    return fields


def parse_dtype(text: str) -> DType | None:
    return DTYPES.get(text.removeprefix("torch."))


def tensor_bytes(elements: int, dtype: DType) -> int:
    size_bytes = round(elements * dtype.bytes)
    if size_bytes > LARGEST_BYTES:
        raise FormatError(f"a tensor of {elements} elements is too large to be real")
    return size_bytes


@dataclass(frozen=True, slots=True)
class Message:
    """Communication as the trace shows it: the bytes of the tensor that was handed in."""

    kind: CollectiveKind | None  # None: a transfer between stages
    input_bytes: int
    group: Group
    direction: Direction | None = None
    peer_offset: int = 0

    def work(self, ranks: int | None) -> Work:
        """As work: an all-gather's whole buffer is *ranks* times what each rank hands in."""
        if self.kind is None:
            assert self.direction is not None
            return Transfer(self.direction, self.input_bytes, self.group, self.peer_offset)
        gathers = self.kind in (CollectiveKind.ALL_GATHER, CollectiveKind.GATHER)
        return Collective(self.kind, self.input_bytes * (ranks or 1 if gathers else 1), self.group)


def message_of(
    name: str, fields: dict[str, str], shape: tuple[int, ...] | None, dtype: DType | None
) -> Message | None:
    """What an operation or sub-operation sends, where its line says how much."""
    word = fields.get("comm_func", "None")
    if word not in ("None", "") and word not in COLLECTIVES:
        raise FormatError(f"unknown collective {word[:40]!r}; expected one of {', '.join(COLLECTIVES)}")
    if shape is None or dtype is None:
        return None
    input_bytes = tensor_bytes(math.prod(shape), dtype)
    group = GROUPS.get(fields.get("group", fields.get("group_kind", "None")), REDUCTIONS.get(name))
    if name in TRANSFERS:
        direction, offset = TRANSFERS[name]
        return Message(None, input_bytes, Group.PP, direction, offset)
    kind = COLLECTIVES.get(word, CollectiveKind.ALL_REDUCE if name in REDUCTIONS else None)
    return None if group is None or kind is None else Message(kind, input_bytes, group)
