"""OptimusPrime runs explained and predicted. ``analysis`` and ``fit`` are where to begin."""
