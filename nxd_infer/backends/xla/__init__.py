"""The xla backend: HLO run by torch_xla on this machine's CPU, all ranks in one process.

All but ``backend`` needs torch_xla: a server's process reads the backend's facts without it.
"""
