"""``nxd-infer demo``: the main job end to end, on text that ships with Python."""
