"""Views of the master's state for people: pure functions of a mirror, or of a job and its events."""
