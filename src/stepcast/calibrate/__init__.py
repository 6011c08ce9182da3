"""Named constants fitted to a user's own measurements."""
