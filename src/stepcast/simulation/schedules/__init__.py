"""Pipeline schedules, one family per file; ``table.ORDERS`` names them all."""
