"""What PyTorch and NCCL call groups, collectives and number formats, in our words."""

import re
from collections.abc import Sequence

from stepcast.ir.dtype import DType
from stepcast.ir.group import Group
from stepcast.ir.work import CollectiveKind, Direction

# Words of process-group descriptions in Megatron-LM (TENSOR_MODEL_PARALLEL_GROUP), torchtitan and device
# meshes (mesh_dp_shard), DeepSpeed and FSDP. "model" and "parallel" say nothing on their own.
FAMILY_OF_WORD = {
    "tp": Group.TP,
    "tensor": Group.TP,
    "cp": Group.CP,
    "context": Group.CP,
    "ulysses": Group.CP,
    "ep": Group.EP,
    "expert": Group.EP,
    "moe": Group.EP,
    "dp": Group.DP,
    "data": Group.DP,
    "ddp": Group.DP,
    "fsdp": Group.DP,
    "hsdp": Group.DP,
    "pp": Group.PP,
    "pipeline": Group.PP,
    "pipe": Group.PP,
    "embedding": Group.EMBEDDING,
    "embd": Group.EMBEDDING,
    "edp": Group.EXPERT_DP,
    "etp": Group.EXPERT_TP,
    "shard": Group.SHARD,
    "replicate": Group.REPLICA,
}
# A name with several words: expert + data are the replicas of an expert, data with context one dp group.
FAMILY_OF_WORDS = {
    frozenset({Group.EP, Group.DP}): Group.EXPERT_DP,
    frozenset({Group.EP, Group.TP}): Group.EXPERT_TP,
    frozenset({Group.DP, Group.SHARD}): Group.SHARD,
    frozenset({Group.DP, Group.SHARD, Group.CP}): Group.SHARD,
    frozenset({Group.DP, Group.REPLICA}): Group.REPLICA,
    frozenset({Group.DP, Group.CP}): Group.DP,
    frozenset({Group.EMBEDDING, Group.PP}): Group.EMBEDDING,
}


def group_named(*names: str) -> Group:
    """The family that the first telling name tells; the world where none does or it spans several."""
    for name in names:
        words = re.findall(r"[a-z]+", name.lower().replace("dataparallel", "data"))
        families = frozenset(FAMILY_OF_WORD[word] for word in words if word in FAMILY_OF_WORD)
        if len(families) == 1:
            return next(iter(families))
        if families:
            return FAMILY_OF_WORDS.get(families, Group.WORLD)
    return Group.WORLD


# In this order: "reduce" and "gather" are parts of longer words.
KIND_OF_WORD: tuple[tuple[str, CollectiveKind | Direction], ...] = (
    ("barrier", CollectiveKind.BARRIER),
    ("allreduce", CollectiveKind.ALL_REDUCE),
    ("allgather", CollectiveKind.ALL_GATHER),
    ("reducescatter", CollectiveKind.REDUCE_SCATTER),
    ("alltoall", CollectiveKind.ALL_TO_ALL),
    ("broadcast", CollectiveKind.BROADCAST),
    ("gather", CollectiveKind.GATHER),
    ("scatter", CollectiveKind.SCATTER),
    ("reduce", CollectiveKind.REDUCE),
    ("sendrecv", CollectiveKind.ALL_TO_ALL),  # refined by the caller: NCCL's kernel for any point to point
    ("send", Direction.SEND),
    ("recv", Direction.RECEIVE),
)


def collective_named(name: str) -> CollectiveKind | Direction | None:
    """``_allgather_base``, ``reduce_scatter_tensor_coalesced``, ``ncclDevKernel_AllReduce_Sum_...``."""
    letters = re.sub(r"[_\- :]", "", name.lower())
    return next((kind for word, kind in KIND_OF_WORD if word in letters), None)


# c10 type names as the profiler prints them, and the C++ names in "Input type".
DTYPE_OF_WORD = {
    "double": DType.FP64,
    "float64": DType.FP64,
    "float": DType.FP32,
    "float32": DType.FP32,
    "half": DType.FP16,
    "float16": DType.FP16,
    "bfloat16": DType.BF16,
    "float8_e4m3fn": DType.FP8,
    "float8_e5m2": DType.FP8,
    "float8_e4m3fnuz": DType.FP8,
    "float8_e5m2fnuz": DType.FP8,
    "long": DType.INT64,
    "long int": DType.INT64,
    "int64": DType.INT64,
    "uint64": DType.INT64,
    "int": DType.INT32,
    "int32": DType.INT32,
    "uint32": DType.INT32,
    "short": DType.INT16,
    "int16": DType.INT16,
    "char": DType.INT8,
    "signed char": DType.INT8,
    "byte": DType.INT8,
    "unsigned char": DType.INT8,
    "int8": DType.INT8,
    "uint8": DType.INT8,
    "bool": DType.BOOL,
}


def dtype_named(name: str) -> DType | None:
    return DTYPE_OF_WORD.get(name.removeprefix("c10::").lower())


def parse_ranks(text: str | Sequence[int]) -> tuple[int, ...]:
    """``[0, 1, 2]`` or a list; nothing where the profiler cut a long list short with dots."""
    if not isinstance(text, str):
        return tuple(text)
    if "..." in text:
        return ()
    return tuple(int(word) for word in re.findall(r"\d{1,9}", text))
