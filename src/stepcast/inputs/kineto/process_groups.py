"""PyTorch's and NCCL's names of groups, collectives and number formats, as our values."""

import re
from collections.abc import Sequence

from stepcast.ir.dtype import DType
from stepcast.ir.group import Group
from stepcast.ir.work import CollectiveKind, Direction

# Words of process-group descriptions in Megatron-LM (TENSOR_MODEL_PARALLEL_GROUP), torchtitan and device
# meshes (mesh_dp_shard), DeepSpeed and FSDP. "model" and "parallel" say nothing on their own.
FAMILY_OF_WORD = {
    word: family
    for family, words in {
        Group.TP: "tp tensor",
        Group.CP: "cp context ulysses",
        Group.EP: "ep expert moe",
        Group.DP: "dp data ddp fsdp hsdp",
        Group.PP: "pp pipeline pipe",
        Group.EMBEDDING: "embedding embd",
        Group.EXPERT_DP: "edp",
        Group.EXPERT_TP: "etp",
        Group.SHARD: "shard",
        Group.REPLICA: "replicate",
    }.items()
    for word in words.split()
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
    """Return the family of the first name that states one; the world where none does or it spans several."""
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
    """Return the kind of ``_allgather_base``, ``ncclDevKernel_AllReduce_Sum_...`` and other names."""
    letters = re.sub(r"[_\- :]", "", name.lower())
    return next((kind for word, kind in KIND_OF_WORD if word in letters), None)


# c10 type names as the profiler prints them, and the C++ names in "Input type".
DTYPE_OF_WORD = {
    word: dtype
    for dtype, words in {
        DType.FP64: "double,float64",
        DType.FP32: "float,float32",
        DType.FP16: "half,float16",
        DType.BF16: "bfloat16",
        DType.FP8: "float8_e4m3fn,float8_e5m2,float8_e4m3fnuz,float8_e5m2fnuz",
        DType.INT64: "long,long int,int64,uint64",
        DType.INT32: "int,int32,uint32",
        DType.INT16: "short,int16",
        DType.INT8: "char,signed char,byte,unsigned char,int8,uint8",
        DType.BOOL: "bool",
    }.items()
    for word in words.split(",")
}


def dtype_named(name: str) -> DType | None:
    return DTYPE_OF_WORD.get(name.removeprefix("c10::").lower())


def parse_ranks(text: str | Sequence[int]) -> tuple[int, ...]:
    """Return the ranks of ``[0, 1, 2]`` or a list; nothing where the profiler cut a long list short with dots."""
    if not isinstance(text, str):
        return tuple(text)
    if "..." in text:
        return ()
    return tuple(int(word) for word in re.findall(r"\d{1,9}", text))
