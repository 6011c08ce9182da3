"""``check``: a forecast inside the training script, and what differs from it once the script runs."""

from stepcast.checking.run import ForecastCallback, RunCheck, RunDoesNotFitError, check

__all__ = ["ForecastCallback", "RunCheck", "RunDoesNotFitError", "check"]
