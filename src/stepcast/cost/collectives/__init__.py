"""The cost of collectives: algorithms as curves of time over size, and the choice between them."""
