"""Changes of membership: who takes part in a job, in which incarnation, on which node and in which round."""
