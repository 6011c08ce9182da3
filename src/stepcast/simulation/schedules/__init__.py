"""Pipeline schedules, one family per file; ``table.SCHEDULES`` names them all."""
