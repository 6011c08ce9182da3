"""OptimusPrime runs explained and predicted. ``runs`` joins a log with what explains it.

Imports point back along this list: plan, lengths, machine; cost; program, memory; fit, analysis; calibration;
runs. Logs are read in ``inputs/optimus_log.py``.
"""
