"""Model x Strategy -> Workload."""
