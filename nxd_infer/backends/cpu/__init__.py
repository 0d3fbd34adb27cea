"""The backend of a plain CPU.

All but ``backend`` and ``encodings`` needs torch, which a server's process does not import: it reads the backend's
facts and calls ``check_target``.
"""
