"""Predictions that are pickled: what was found travels, the functions that found it do not."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from stepcast.simulation.engine import Run
from stepcast.simulation.step import Step

if TYPE_CHECKING:
    from stepcast.forecast.simulate import Prediction


@dataclass(frozen=True, slots=True)
class Found:
    """Returns what was found before."""

    value: Any

    def __call__(self, *_: object) -> Any:
        return self.value


def packed(prediction: "Prediction") -> tuple[Callable[..., "Prediction"], tuple[Any, ...]]:
    """What pickle needs to make the prediction again."""
    state = {
        "workload": prediction.workload,
        "cluster": prediction.cluster,
        "pricer": prediction.pricer,
        "options": prediction.options,
        "place": prediction.place,
        "assumptions": prediction.assumptions,
        "memory": prediction.memory,
        "band": prediction.band,
    }
    step, run = (None, None) if prediction.settled else (prediction.step, prediction.run)
    found = {"report": prediction.report, "found_s": prediction.simulated_s}
    if prediction.shared:  # they do not follow from the run
        found["times"] = prediction.times
    return _unpacked, (state, step, run, found)


def _unpacked(
    state: dict[str, Any],
    step: Step | None,
    run: Run | None,
    found: dict[str, Any],
) -> "Prediction":
    from stepcast.forecast.simulate import Prediction

    built: Callable[[], Any] = Found(step) if step is not None else _too_long
    ran: Callable[[], Any] = Found(run) if step is not None else _too_long
    made = Prediction(built=built, ran=ran, **state)
    # They are computed when first asked for, and were.
    made.__dict__.update(found)
    return made


def _too_long() -> NoReturn:
    raise ValueError("a step of so many micro-batches travels without its tasks: predict it again")
