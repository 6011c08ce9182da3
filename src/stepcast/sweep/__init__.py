"""Many questions at once: a spec of points, a store that loses none, and engines that work them off."""
