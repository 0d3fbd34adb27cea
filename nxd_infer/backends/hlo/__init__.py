"""What backends on XLA devices share: a graph in host and device parts, the device's as HLO, and the host's run.

All but ``base`` needs torch or torch_xla.
"""
