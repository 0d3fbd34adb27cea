"""``torch_xla.experimental.tpu`` and ``torch_xla._internal.tpu``, which libraries ask for TPUs: there are none."""


def version() -> int:
    """Raise OSError, as torch_xla does without a TPU."""
    raise OSError("this process has no TPU: its device is the CPU")


def num_available_devices() -> int:
    return 0
