"""The driver: what is not answered yet goes to an engine in chunks, and each chunk to the store at once."""

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from stepcast.sweep.chunks import Answer, ChunkPace, PointChunk
from stepcast.sweep.engines.table import EngineSetting, load_engine
from stepcast.sweep.spec import Spec, Words
from stepcast.sweep.store import Store

Digest = Callable[[str, Any], str]
"""What a word stands for: the digest of a model, a cluster or a file that it names; else the word itself."""

KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a sweep is."""

    points: int
    answered: int
    errors: int
    # Of this run alone.
    new: int
    seconds: float
    best: dict[str, Any] | None

    @property
    def rate(self) -> float:
        return self.new / self.seconds if self.seconds > 0 else 0.0


def sweep(
    spec: Spec,
    folder: str,
    answer: Answer,
    digest: Digest,
    program: str,
    engine: str = "local",
    workers: int = 1,
    address: str | None = None,
    watch: Callable[[Progress], None] = lambda progress: None,
    most: int | None = None,
) -> Progress:
    """Answer every point of *spec*, or *most* of them, into the store in *folder*, and say how it went.

    *program* names the version of all that an answer follows from beside its point.
    """
    run = load_engine(engine)
    with Store(folder, writes=True) as store:
        keys = PointKeys(program, spec.ask, digest)
        store.ask(spec.names, ((position, keys.of(words), words) for position, words in spec.points(most)))
        counts = store.counts()
        points, answered, errors = counts["points"], counts["answered"], counts["errors"]
        began, new, best, pace = time.monotonic(), 0, None, ChunkPace()

        def told() -> Progress:
            return Progress(points, answered + new, errors, new, time.monotonic() - began, best)

        watch(told())
        for done in run(_chunks(spec, store, pace), answer, EngineSetting(workers, address, folder)):
            store.add(done)
            pace.note(done)
            new += len(done.answers)
            errors += sum(1 for each in done.answers if each.get("error"))
            best = max([best, *done.answers], key=_speed) if done.answers else best
            watch(told())
        counts = store.counts()
        return Progress(counts["points"], counts["answered"], counts["errors"], new, time.monotonic() - began, best)


def _speed(answer: dict[str, Any] | None) -> float:
    return (answer or {}).get("tokens_per_s_per_gpu") or 0.0


def _chunks(spec: Spec, store: Store, pace: ChunkPace) -> Iterator[PointChunk]:
    """Cut when an engine asks, so that their size follows what the last ones took."""
    keys: list[bytes] = []
    words: list[Words] = []
    for position, key in store.open_points():
        keys.append(key)
        words.append(spec.at(position))
        if len(keys) >= pace.size:
            yield PointChunk(spec.ask, tuple(keys), tuple(words))
            keys, words = [], []
    if keys:
        yield PointChunk(spec.ask, tuple(keys), tuple(words))


class PointKeys:
    """What a point asks, as a short name: the digests of all that its answer depends on."""

    def __init__(self, program: str, ask: str, digest: Digest) -> None:
        self._start = hashlib.blake2b(f"{program} {ask}".encode(), digest_size=KEY_BYTES)
        self._digest = digest
        self._known: dict[tuple[str, str], bytes] = {}

    def of(self, words: Words) -> bytes:
        found = self._start.copy()
        for name in sorted(words):
            found.update(self._token(name, words[name]))
        return found.digest()

    def _token(self, name: str, value: Any) -> bytes:
        # 1, 1.0 and True are one key of a dictionary, and not one word.
        place = (name, repr(value))
        token = self._known.get(place)
        if token is None:
            token = self._known[place] = msgspec.json.encode([name, self._digest(name, value)])
        return token
