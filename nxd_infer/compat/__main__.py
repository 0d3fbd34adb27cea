"""``python -m nxd_infer.compat script.py arguments...``."""

from nxd_infer.compat import main

main()
