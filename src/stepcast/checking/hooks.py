"""Callbacks through which Trainer, Lightning and other loops tell a check when steps begin and end."""

from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from stepcast.checking.described import describe
from stepcast.checking.run import RunCheck, Write


class ForecastCallback:
    """Forecast a run of transformers' Trainer when training begins, and compare it after some steps.

    ``Trainer(..., callbacks=[ForecastCallback(gpu="h100-sxm")])`` is all it takes. It is no subclass of
    TrainerCallback, so that stepcast does not import transformers; other events are ignored.
    """

    def __init__(
        self,
        run: RunCheck | None = None,
        *,
        strict: bool = False,
        compare_after: int = 20,
        write: Write | None = None,
        **choices: Any,
    ) -> None:
        self.run, self._choices = run, choices
        self._make_check = partial(RunCheck, strict=strict, compare_after=compare_after, write=write)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *args, **known: None
        raise AttributeError(name)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **known: Any) -> None:
        if self.run is None:
            data = getattr(known.get("train_dataloader"), "dataset", None)
            script = SimpleNamespace(args=args, model=model, train_dataset=data)
            self.run = self._make_check({**describe(script), **self._choices})
            self.run.forecast()

    def on_step_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        if self.run is not None:
            self.run.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        if self.run is not None:
            self.run.end_step()

    @property
    def facts(self) -> dict[str, Any]:
        """All figures of the check."""
        return self.run.facts if self.run is not None else {}


def add_to_trainer(script: Any, run: RunCheck) -> None:
    """Have a Trainer of transformers or of Lightning call *run* around each step; others call it themselves."""
    if hasattr(script, "add_callback"):
        script.add_callback(ForecastCallback(run))
    elif hasattr(script, "callbacks") and hasattr(script, "fit"):
        script.callbacks.append(build_lightning_callback(run))


def build_lightning_callback(run: RunCheck) -> Any:
    """Return a callback of Lightning that calls *run* around each optimizer step."""
    try:
        library = import_module("lightning.pytorch.callbacks")
    except ImportError:
        library = import_module("pytorch_lightning.callbacks")
    base: Any = library.Callback

    class LightningForecast(base):  # type: ignore[misc]
        """Counts optimizer steps; each may have several batches."""

        def __init__(self) -> None:
            self.seen_steps = -1

        def on_train_batch_start(self, trainer: Any, *known: Any) -> None:
            if trainer.global_step != self.seen_steps:
                self.seen_steps = trainer.global_step
                run.begin_step()

        def on_train_batch_end(self, trainer: Any, *known: Any) -> None:
            if trainer.global_step != self.seen_steps:
                run.end_step()

    return LightningForecast()
