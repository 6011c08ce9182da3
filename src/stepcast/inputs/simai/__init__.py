"""SimAI / AICB workload text. ``reader`` is what the table of formats loads."""
