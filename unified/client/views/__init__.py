"""Views of what a master knows, worked out for people: pure functions of a mirror, or of a job and its events."""
