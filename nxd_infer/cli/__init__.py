"""The command line, ``nxd-infer``. A command imports what it needs when it runs, so that ``--help`` answers at once."""
