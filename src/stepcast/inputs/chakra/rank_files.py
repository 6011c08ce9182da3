"""The files of a set as ASTRA-sim names them: PREFIX.RANK.et, and a list of each communicator's ranks."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from stepcast.inputs.source import FormatError, Source
from stepcast.ir.limits import GROUPS

RANK_FILE = re.compile(r"(.*)\.([0-9]{1,7})\.et(?:\.gz)?", re.DOTALL)
# {"1": [0, 1], ...}: what --comm-group-configuration takes.
GROUPS_HEAD = re.compile(rb'\s*\{\s*"[0-9]{1,9}"\s*:\s*\[[0-9,\s]*(?:\]|\Z)')
MOST_RANK = 2**24


def prefix_of(path: str) -> str:
    """What a set's files are named after, where *path* is a name for all of them."""
    return re.sub(r"(\.et)?(\.gz)?\Z", "", path)


def rank_of(path: str) -> int | None:
    found = RANK_FILE.fullmatch(path)
    return int(found[2]) if found else None


def run_of(path: str) -> str:
    """What the files of one set have in common; a file that names no rank stands by itself."""
    found = RANK_FILE.fullmatch(path)
    return found[1] if found else path.removesuffix(".comm_group.json")


def lists_groups(head: bytes) -> bool:
    """Whether a file begins like a list of communicators."""
    return GROUPS_HEAD.match(head) is not None


def read_groups(source: Source) -> dict[str, tuple[int, ...]]:
    """The ranks of each communicator by its number."""
    try:
        groups = msgspec.json.decode(source.raw(GROUPS), type=dict[str, tuple[int, ...]])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{error}; expected a list of ranks for each communicator", source.path) from None
    for name, ranks in groups.items():
        if not ranks or len(set(ranks)) < len(ranks) or not 0 <= min(ranks) <= max(ranks) < MOST_RANK:
            raise FormatError(f"communicator {name!r} is {ranks[:4]!r}...; expected different ranks", source.path)
    return groups


def ranks_of_set(paths: Sequence[str]) -> tuple[int, ...]:
    """The rank of each file of a set."""
    ranks: dict[int, str] = {}
    for path in paths:
        rank = rank_of(path)
        if rank is None:
            raise FormatError("names no rank; the files of one run are PREFIX.0.et, PREFIX.1.et, ...", path)
        if rank in ranks:
            raise FormatError(f"is of rank {rank}, as is {ranks[rank]}; name the files of one run", path)
        ranks[rank] = path
    return tuple(ranks)


def strides(groups: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, int]]:
    """Of each communicator with evenly spaced ranks: how far apart they are, and how many."""
    found = {}
    for name, ranks in groups.items():
        ordered = sorted(ranks)
        steps = {after - before for before, after in pairwise(ordered)}
        if len(steps) == 1:
            found[name] = (steps.pop(), len(ordered))
    return found
