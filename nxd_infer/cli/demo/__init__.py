"""``nxd-infer demo``: train, trace and serve end to end, on text that ships with Python."""
