"""``check``: a forecast inside the training script, and what differs from it once the script runs."""

from stepcast.checking.check import check
from stepcast.checking.hooks import ForecastCallback
from stepcast.checking.run import RunCheck, RunDoesNotFitError

__all__ = ["ForecastCallback", "RunCheck", "RunDoesNotFitError", "check"]
