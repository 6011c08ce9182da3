"""The fluid engine: communication as flows that share links, max-min fair, from event to event."""
