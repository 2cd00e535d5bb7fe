"""A cluster in virtual time: the real cores of master and agents; all around them is simulated."""
