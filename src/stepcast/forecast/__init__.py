"""Steps before they run: of a workload file (``simulate``) and of a model (``predict``)."""
