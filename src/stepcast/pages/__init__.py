"""Pages: the facts of an answer as one HTML file that needs nothing else."""
