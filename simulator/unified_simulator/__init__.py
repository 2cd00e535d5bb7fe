"""A cluster in virtual time: the real cores of master and agents in a simulated environment."""
