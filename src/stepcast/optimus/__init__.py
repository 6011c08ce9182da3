"""Analysis and prediction of OptimusPrime runs; logs are read in ``inputs/optimus_log.py``."""
