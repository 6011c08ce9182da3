"""Published training runs: a row, its model, cluster and strategy, and how far off the forecast is."""
