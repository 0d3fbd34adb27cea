"""``python -m nxd_infer``: the command line, for when the script ``nxd-infer`` is not on the PATH."""

from nxd_infer.cli.main import main

if __name__ == "__main__":
    main()
