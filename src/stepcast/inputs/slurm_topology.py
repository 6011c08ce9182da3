"""Slurm's ``topology.conf``: which nodes are under which switch (topology/tree), or in which block.

Names are hostlist expressions, ``tux[0-3,12]``; words are ``Key=value``, whatever their letter case; a
backslash at its end continues a line (https://slurm.schedmd.com/topology.conf.html).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stepcast.inputs.source import FormatError, Source
from stepcast.ir.limits import GPUS, RESULT
from stepcast.ir.wiring import Wiring

ENTRY = re.compile(r"^[ \t]*(?:SwitchName|BlockName)[ \t]*=", re.MULTILINE | re.IGNORECASE)
WORD = re.compile(r"([A-Za-z]{1,32})\s*=\s*([^\s=]{1,1048576})")
RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def looks_like(head: str) -> bool:
    return ENTRY.search(head) is not None


@dataclass(frozen=True, slots=True)
class _Switch:
    line: int
    nodes: tuple[str, ...]
    switches: tuple[str, ...]


def read(source: Source) -> Wiring:
    switches, blocks, sizes = _entries(source)
    if blocks:
        return _of_blocks(blocks, sizes)
    if not switches:
        raise FormatError("names no switch; expected lines such as SwitchName=s0 Nodes=tux[0-3]")
    return _of_tree(switches)


def _entries(source: Source) -> tuple[dict[str, _Switch], dict[str, int], list[int]]:
    switches: dict[str, _Switch] = {}
    blocks: dict[str, int] = {}
    sizes: list[int] = []
    for number, line in _lines(source):
        found = {key.lower(): value for key, value in WORD.findall(line)}
        if "switchname" in found:
            nodes = tuple(expanded(found.get("nodes", ""), number))
            below = tuple(expanded(found.get("switches", ""), number))
            for name in expanded(found["switchname"], number):
                if name in switches:
                    raise FormatError(f"switch {name} is described twice", line=number)
                switches[name] = _Switch(number, nodes, below)
        elif "blockname" in found:
            nodes = tuple(expanded(found.get("nodes", ""), number))
            if not nodes:
                raise FormatError(f"block {found['blockname']} has no nodes", line=number)
            blocks[found["blockname"]] = len(nodes)
        elif "blocksizes" in found:
            sizes = [int(size) for size in found["blocksizes"].split(",") if re.fullmatch("[0-9]{1,6}", size)]
    if switches and blocks:
        raise FormatError("has switches and blocks; Slurm takes one or the other")
    GPUS.check(sum(len(switch.nodes) for switch in switches.values()) + sum(blocks.values()))
    return switches, blocks, sizes


def _lines(source: Source) -> Iterator[tuple[int, str]]:
    """Lines without comments, those that go on joined, with the number of their first."""
    held, first = "", 0
    for number, line in enumerate(source.text(RESULT).split("\n"), 1):
        text = line.partition("#")[0].rstrip()
        first = first or number
        if text.endswith("\\"):
            held += text[:-1] + " "
            continue
        if (held + text).strip():
            yield first, held + text
        held, first = "", 0
    if held.strip():
        yield first, held


def expanded(expression: str, line: int | None = None) -> list[str]:
    """The names of a hostlist expression."""
    names: list[str] = []
    for part in _parts(expression, line):
        found = [""]
        for piece in re.split(r"(\[[^\[\]]*\])", part):
            if piece.startswith("["):
                numbers = list(_numbers(piece[1:-1], line))
                GPUS.check(len(found) * len(numbers) + len(names))
                found = [name + number for name in found for number in numbers]
            elif "[" in piece or "]" in piece:
                raise FormatError(f"{part[:40]!r} has a bracket without its other", line=line)
            else:
                found = [name + piece for name in found]
        names += found
    return names


def _parts(expression: str, line: int | None) -> Iterator[str]:
    """Cut at commas outside of brackets."""
    depth, start = 0, 0
    for at, letter in enumerate(expression):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            yield expression[start:at]
            start = at + 1
    if depth:
        raise FormatError(f"{expression[:40]!r} has a bracket without its other", line=line)
    if expression[start:]:
        yield expression[start:]


def _numbers(ranges: str, line: int | None) -> Iterator[str]:
    for part in ranges.split(","):
        found = RANGE.fullmatch(part)
        if found is None:
            raise FormatError(f"{part[:40]!r} is no range; expected such as 0-3", line=line)
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first):
            raise FormatError(f"{part} counts down", line=line)
        GPUS.check(int(last) - int(first))
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _of_blocks(blocks: Mapping[str, int], sizes: list[int]) -> Wiring:
    """A block is what one NVLink domain holds."""
    size, count = Counter(blocks.values()).most_common(1)[0]
    warnings = []
    if count < len(blocks):
        fewest, most = min(blocks.values()), max(blocks.values())
        warnings.append(f"blocks have {fewest} to {most} nodes: taken as {size}")
    if sizes and sizes[0] > size:
        warnings.append(f"BlockSizes begins with {sizes[0]}, more than a block's {size} nodes")
    return Wiring(told_by="slurm-topology", nodes=sum(blocks.values()), scale_up_nodes=size, warnings=tuple(warnings))


def _of_tree(switches: Mapping[str, _Switch]) -> Wiring:
    parents = _parents(switches)
    roots = [name for name in switches if name not in parents]
    if not roots:
        _cycle(switches, next(iter(switches)))
    for name in switches:
        _cycle(switches, name)
    if len(roots) > 1:
        raise FormatError(
            f"no switch joins {roots[0]} and {roots[1]}: nodes under one cannot reach those under the other",
            line=switches[roots[1]].line,
        )
    leaves = {name: len(switch.nodes) for name, switch in switches.items() if switch.nodes}
    if not leaves:
        raise FormatError("no switch has nodes; expected SwitchName=... Nodes=...")
    for name, switch in switches.items():
        if not (switch.nodes or switch.switches):
            raise FormatError(f"switch {name} has neither nodes nor switches", line=switch.line)
    on = Counter(node for switch in switches.values() for node in switch.nodes)
    warnings = []
    twice = sum(count > 1 for count in on.values())
    if twice:
        warnings.append(f"{twice} nodes are on several switches: counted on each, as a leaf has them")
    size = max(leaves.values())
    if min(leaves.values()) < size:
        warnings.append(f"leaf switches have {min(leaves.values())} to {size} nodes: taken as {size}")
    above = {parents[leaf] for leaf in leaves if leaf in parents}
    pods = [sum(1 for below in switches[name].switches if below in leaves) for name in above if name in parents]
    if len({_depth(parents, leaf) for leaf in leaves}) > 1:
        warnings.append("leaf switches lie at different depths: pods are those of the lowest")
    if any(_depth(parents, leaf) > 2 for leaf in leaves):
        warnings.append("more than three tiers of switches: those above the third are left out")
    return Wiring(
        told_by="slurm-topology",
        nodes=len(on),
        leaf_nodes=size if len(leaves) > 1 else None,
        pod_nodes=size * max(pods) if pods else None,
        warnings=tuple(warnings),
    )


def _parents(switches: Mapping[str, _Switch]) -> dict[str, str]:
    parents: dict[str, str] = {}
    for name, switch in switches.items():
        for below in switch.switches:
            if below not in switches:
                raise FormatError(f"switch {name} names {below}, which no line describes", line=switch.line)
            parents.setdefault(below, name)
    return parents


def _depth(parents: Mapping[str, str], name: str) -> int:
    depth = 0
    while name in parents:
        name, depth = parents[name], depth + 1
    return depth


def _cycle(switches: Mapping[str, _Switch], start: str) -> None:
    """A FormatError where a way down from *start* leads back to it."""
    seen, ahead = set[str](), list(switches[start].switches)
    while ahead:
        name = ahead.pop()
        if name == start:
            raise FormatError(f"switch {start} is below itself", line=switches[start].line)
        if name not in seen:
            seen.add(name)
            ahead += switches[name].switches
