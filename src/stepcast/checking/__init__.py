"""``check``: a forecast inside the training script, and what differs from it once the script runs."""

from stepcast.checking.check import RunCheck, RunDoesNotFitError, check
from stepcast.checking.hooks import ForecastCallback

__all__ = ["ForecastCallback", "RunCheck", "RunDoesNotFitError", "check"]
