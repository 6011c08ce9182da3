"""OptimusPrime training logs. ``reader`` is what the table of formats loads."""
