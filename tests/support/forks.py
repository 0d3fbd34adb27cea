"""The fork servers that this process keeps."""

from __future__ import annotations

from nxd_infer.util import fork_server as module
from nxd_infer.util.fork_server import ForkServer


def kept(imports: str) -> ForkServer | None:
    """The server that has imported this module, if there is one."""
    return module._kept.get(imports, (None, None))[1]


def forget() -> None:
    """End them all."""
    for _, server in module._kept.values():
        server.end()
    module._kept.clear()
