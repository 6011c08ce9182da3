"""The driver of sweeps: open points go to an engine in chunks, and each answered chunk to the store."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from itertools import islice

import msgspec

from stepcast.inputs.source import Source, read_toml
from stepcast.ir.limits import RESULT
from stepcast.ir.types import FactDict, dataclass
from stepcast.sweep.engines import Answer, ChunkPace, EngineSetting, PointChunk, WorkSite, load_engine
from stepcast.sweep.spec import Spec, Words
from stepcast.sweep.store import Store

Digest = Callable[[str, object], str]
"""Return the identity of a word: the digest of the model, cluster or file that it names, else the word."""

KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a sweep; *new* and *seconds* are those of this run."""

    points: int
    answered: int
    errors: int
    new: int
    seconds: float
    best: FactDict | None

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
    identify: Callable[[], str] | None = None,
) -> Progress:
    """Answer every point of *spec*, or *most* of them, into the store in *folder*.

    Args:
        spec: the points.
        folder: the folder of the store.
        answer: the function that answers points.
        digest: the function that returns the identity of a word.
        program: the version of everything else that an answer depends on.
        engine: the name of an engine.
        workers: the number of workers.
        address: the address of the engine's cluster.
        watch: a function that is called with the progress.
        most: the maximum number of points, spread evenly over all.
        identify: a module-level function that returns *program* where a worker has the same; None trusts them.
    """
    run = load_engine(engine)
    site = WorkSite(program, identify, () if engine == "local" else named_files(spec))
    with Store(folder, writes=True) as store:
        key_of = point_keys(program, spec.ask, digest)
        store.ask(spec.names, ((position, key_of(words), words) for position, words in spec.points(most)))
        counts = store.counts()
        began, new, best, pace = time.monotonic(), 0, None, ChunkPace()

        def progress() -> Progress:
            return Progress(**counts, new=new, seconds=time.monotonic() - began, best=best)

        watch(progress())
        for chunk in run(_chunks(spec, store, pace), answer, EngineSetting(workers, address, folder, site)):
            store.add(chunk)
            pace.note(chunk)
            new += len(chunk.answers)
            counts["answered"] += len(chunk.answers)
            counts["errors"] += sum(1 for row in chunk.answers if row.get("error"))
            known = filter(None, [best, *chunk.answers])
            best = max(known, key=lambda row: row.get("tokens_per_s_per_gpu") or 0.0, default=None)
            watch(progress())
        counts = store.counts()
        return progress()


def named_files(spec: Spec) -> tuple[tuple[str, bytes], ...]:
    """Return the files that words of *spec* name, and those that they build on, by their relative paths."""
    names = [value for row in (spec.fixed, *(row for axis in spec.axes for row in axis.rows)) for value in row.values()]
    files: dict[str, bytes] = {}
    while names:
        value = names.pop()
        if not isinstance(value, str) or not os.path.isfile(value) or (name := os.path.normpath(value)) in files:
            continue
        if os.path.isabs(name) or name.startswith(os.pardir):
            raise ValueError(f"{value}: files of a sweep on a cluster must be below the current folder")
        files[name] = Source(value).raw(RESULT)
        if name.endswith(".toml"):
            folder = os.path.dirname(name)
            texts = [value for value in read_toml(name).values() if isinstance(value, str)]
            names += [os.path.join(folder, value) for value in texts]
    return tuple(sorted(files.items()))


def _chunks(spec: Spec, store: Store, pace: ChunkPace) -> Iterator[PointChunk]:
    """Yield chunks of open points; their size follows the time of the last ones."""
    points = store.open_points()
    while batch := list(islice(points, pace.size)):
        positions, keys = zip(*batch, strict=True)
        yield PointChunk(spec.ask, keys, tuple(map(spec.point, positions)))


def point_keys(program: str, ask: str, digest: Digest) -> Callable[[Words], bytes]:
    """Return the function that returns the key of a point: the digest of everything that its answer depends on."""
    start = hashlib.blake2b(f"{program} {ask}".encode(), digest_size=KEY_BYTES)
    tokens: dict[tuple[str, str], bytes] = {}

    def key_of(words: Words) -> bytes:
        key = start.copy()
        for name in sorted(words):
            # 1, 1.0 and True are the same key of a dictionary, but different words.
            place = (name, repr(words[name]))
            if place not in tokens:
                tokens[place] = msgspec.json.encode([name, digest(name, words[name])])
            key.update(tokens[place])
        return key.digest()

    return key_of
