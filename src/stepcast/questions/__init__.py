"""Questions that stepcast answers, as frozen typed values, and the runs that they mean."""
