"""What work costs: pure functions of work and hardware, seconds or bytes out."""
