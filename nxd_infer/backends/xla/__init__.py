"""The xla backend: HLO run by torch_xla on this machine's CPU, all ranks in one process."""
