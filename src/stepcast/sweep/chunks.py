"""What an engine works on: some points at a time, as many as take a while."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepcast.sweep.spec import Words

Answers = list[dict[str, Any]]
Answer = Callable[[str, Sequence[Words]], Answers]
"""Answers of points, one for each, in their order; a module's own function, so that workers can find it."""

# A chunk takes so long: enough that handing it over does not matter, little enough to lose.
CHUNK_S = 2.0
FIRST, LARGEST = 4, 10_000


@dataclass(frozen=True, slots=True)
class PointChunk:
    """Points that one worker answers in one go."""

    ask: str
    keys: tuple[bytes, ...]
    words: tuple[Words, ...]
    # Workers that died over it.
    deaths: int = 0

    def halves(self) -> "tuple[PointChunk, PointChunk]":
        middle = len(self.keys) // 2
        return (
            PointChunk(self.ask, self.keys[:middle], self.words[:middle], self.deaths),
            PointChunk(self.ask, self.keys[middle:], self.words[middle:], self.deaths),
        )


@dataclass(frozen=True, slots=True)
class Done:
    """A chunk with its answers, and the seconds they took where they were found."""

    chunk: PointChunk
    answers: Answers
    seconds: float


@dataclass
class ChunkPace:
    """How many points the next chunk has, by what the last ones took."""

    aim_s: float = CHUNK_S
    size: int = FIRST
    seen: list[tuple[int, float]] = field(default_factory=list)

    def note(self, done: Done) -> None:
        self.seen = [*self.seen[-7:], (len(done.answers), done.seconds)]
        points, seconds = (sum(column) for column in zip(*self.seen, strict=True))
        wanted = points * self.aim_s / max(seconds, 1e-3)
        # At most fourfold at once: the first few of a kind say little of those to come.
        self.size = max(1, min(int(wanted), 4 * self.size, LARGEST))


def answered(answer: Answer, chunk: PointChunk) -> Done:
    """What every worker of every engine does."""
    import time

    began = time.perf_counter()
    answers = answer(chunk.ask, chunk.words)
    return Done(chunk, answers, time.perf_counter() - began)
