"""Peak memory of Megatron-LM's functional tests, as the last rank of each logged it."""
