"""A published run in our nouns: Model, Strategy, Framework, Cluster, and the command that says the same."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from stepcast.frameworks.command import UnsaidError, predict_words
from stepcast.frameworks.profile import Profile
from stepcast.hardware import Cluster
from stepcast.ir.framework import Framework
from stepcast.ir.model import Model
from stepcast.ir.strategy import Strategy
from stepcast.models.catalog import load_model
from stepcast.models.columns import model_of_columns, words_of
from stepcast.validate.published.cluster import cluster_of, cluster_words
from stepcast.validate.published.corrections import Record
from stepcast.validate.published.framework import profile_of
from stepcast.validate.published.run import PublishedRun, run_of
from stepcast.validate.published.strategy import strategy_of


@dataclass(frozen=True, slots=True)
class Setup:
    """A published run in our nouns, and what its row left open."""

    run: PublishedRun
    model: Model
    cluster: Cluster
    strategy: Strategy
    framework: Framework
    profile: Profile
    assumptions: tuple[str, ...]
    # What the row says of its model's sizes, by column.
    sizes: Mapping[str, str | None] = field(default_factory=dict, hash=False)

    @property
    def command(self) -> str:
        """What a user types for the same prediction, or why none can be typed."""
        name, changes = cluster_words(self.run)
        machine = ["--cluster", name, *(word for change in changes for word in ("--set", change))]
        try:
            word, model = self._said_model()
            said = predict_words(self.profile, model, self.cluster.gpu.name, self.strategy, self.framework)
        except UnsaidError as error:
            return f"cannot be said: {error}"
        words = ["stepcast", "predict", "--model", word, *machine, *said]
        scaled = self.strategy.global_batch != self.run.global_batch
        note = f"  # times {self.run.global_batch}/{self.strategy.global_batch}" if scaled else ""
        return shlex.join(words) + note

    def _said_model(self) -> tuple[str, Model]:
        """The row's model by its name, or by name and sizes, as ``load_model`` takes it."""
        sized = words_of(self.run.model, {**self.sizes, "seq": self._said_seq})
        for word in (self.run.model, sized):
            with suppress(ValueError):
                found = load_model(word)
                if replace(found, name=self.model.name) == self.model:
                    return word, found
        raise UnsaidError(f"{sized} is another model")

    @property
    def _said_seq(self) -> str:
        """Models take as many tokens as the row says, or needs."""
        return self.sizes.get("seq") or str(max(self.strategy.seq, self.model.max_seq))


def completed(records: Sequence[Record]) -> Iterator[Record]:
    """*records* with blank heads as most runs of the same source and hidden size have them."""
    known: dict[tuple[str | None, str | None], Counter[str]] = {}
    for record in records:
        if heads := record.get("heads"):
            known.setdefault((record.get("source"), record.get("hidden")), Counter())[heads] += 1
    for record in records:
        usual = known.get((record.get("source"), record.get("hidden")))
        blank = not record.get("heads") and record.get("hidden") and usual
        yield {**record, "heads": usual.most_common(1)[0][0]} if blank and usual else record


def setup_of(record: Record) -> Setup:
    """The model, cluster and strategy of one row; a ValueError where it states too little."""
    run = run_of(record)
    model = model_of_columns(run.model, record)
    assumptions: list[str] = []
    cluster, profile = cluster_of(run, assumptions), profile_of(record)
    strategy, framework = strategy_of(run, profile, model, cluster.gpu.name, assumptions)
    if strategy.seq > model.max_seq:
        model = model.with_max_seq(strategy.seq)
    return Setup(run, model, cluster, strategy, framework, profile, tuple(assumptions), record)
