"""``nxd-infer verify``."""

from nxd_infer.verify.artifact import run

__all__ = ["run"]
