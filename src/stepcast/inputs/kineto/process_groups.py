"""PyTorch's and NCCL's names of groups, collectives and number formats, as our values."""

import re
from collections.abc import Mapping, Sequence

from stepcast.inputs.source import read_words
from stepcast.ir.dtype import DType
from stepcast.ir.work import CollectiveKind, Direction, Group

WORDS = read_words("traces")
FAMILY_OF_WORD = {word: Group(family) for family, words in WORDS["groups"].items() for word in words.split()}
FAMILY_OF_WORDS = {frozenset(map(Group, words.split())): Group(name) for words, name in WORDS["joint_groups"].items()}
KIND_OF_WORD: Mapping[str, CollectiveKind | Direction] = {
    word: Direction(kind) if kind in set(Direction) else CollectiveKind(kind)
    for word, kind in WORDS["collectives"].items()
}
DTYPE_OF_WORD = {word: DType(dtype) for dtype, words in WORDS["dtypes"].items() for word in words.split(",")}


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


def collective_named(name: str) -> CollectiveKind | Direction | None:
    """Return the kind of ``_allgather_base``, ``ncclDevKernel_AllReduce_Sum_...`` and other names."""
    letters = re.sub(r"[_\- :]", "", name.lower())
    return next((kind for word, kind in KIND_OF_WORD.items() if word in letters), None)


def dtype_named(name: str) -> DType | None:
    return DTYPE_OF_WORD.get(name.removeprefix("c10::").lower())


def parse_ranks(text: str | Sequence[int]) -> tuple[int, ...]:
    """Return the ranks of ``[0, 1, 2]`` or a list; nothing where the profiler cut a long list short with dots."""
    if not isinstance(text, str):
        return tuple(text)
    if "..." in text:
        return ()
    return tuple(int(word) for word in re.findall(r"\d{1,9}", text))
