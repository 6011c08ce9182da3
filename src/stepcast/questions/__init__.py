"""What can be asked of stepcast, as frozen typed values, and how the run that is meant is settled."""
