"""What backends on XLA devices share: a graph cut into host and device parts, its device part as HLO, the host's run."""
