"""Every format stepcast writes (``data/targets.toml``)."""

from collections.abc import Callable, Iterable
from importlib import import_module
from types import ModuleType

from stepcast.inputs.source import DATA, read_toml
from stepcast.ir.types import dataclass, require

NOUNS = {"RunLog": "run log", "CollectiveSweep": "collective sweep", "OperatorTimes": "table of operator times"}
# The command that makes one kind of document from another.
REMEDIES = {
    ("timeline", "workload"): "; 'stepcast simulate FILE --cluster C --trace OUT' runs it and writes one",
    ("workload", "model"): "; 'stepcast predict --model FILE ... --to-workload OUT' writes one",
}


@dataclass(frozen=True, slots=True)
class Target:
    """One format that can be written, and the document it is written from ("" = any)."""

    name: str
    title: str
    takes: str
    module: str

    def load(self) -> ModuleType:
        return import_module(f"stepcast.outputs.{self.module}")

    def files(self, document: object, output: str) -> Iterable[tuple[str, bytes]]:
        """Return the files to write, by name: *output* alone, or as many as the format takes, named after it."""
        kind = NOUNS.get(type(document).__name__, type(document).__name__.lower())
        if self.takes and kind != self.takes:
            remedy = REMEDIES.get((self.takes, kind), "")
            raise ValueError(f"{self.name} is written from a {self.takes}, and this file holds a {kind}{remedy}")
        module = self.load()
        files: Iterable[tuple[str, bytes]]
        files = module.files(document, output) if hasattr(module, "files") else [(output, module.write(document))]
        return files

    def losses(self, document: object) -> tuple[str, ...]:
        """Return what of *document* the format cannot hold."""
        lost: Callable[[object], tuple[str, ...]] | None = getattr(self.load(), "losses", None)
        return lost(document) if lost else ()


TARGETS = tuple(Target(name, **entry) for name, entry in read_toml(DATA / "targets.toml").items())


def target_named(name: str) -> Target:
    known = {target.name: target for target in TARGETS}
    require(name in known, f"unknown format {name!r}; can write: {', '.join(known)}")
    return known[name]
