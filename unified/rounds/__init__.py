"""Steps that the ranks of a round take together: rendezvous, process group, agreement, node check, and the way out."""
