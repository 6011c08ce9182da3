"""Where chunks are worked off: processes of this machine, or a cluster through an engine that runs there."""
