"""Serves the page's files from memory, with headers that let nothing of another site in, and nobody frame it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGES = {"index.html": ("/", "/docs")}
FILES = {
    route: path
    for path in sorted(Path(__file__).parent.iterdir())
    if path.suffix in TYPES
    for route in PAGES.get(path.name, (f"/page/{path.name}",))
}
"""By the path under which each is served: nothing in them is secret, so no key is needed to GET them."""
HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # a browser asks whether its copy is the newest, and 304 says so
}


def add_page(app: FastAPI) -> None:
    """Add a route for each file; after all others, which then take no longer to find."""
    for path, file in FILES.items():
        _add(app, path, file.read_bytes(), f"{TYPES[file.suffix]}; charset=utf-8")


def _add(app: FastAPI, path: str, content: bytes, kind: str) -> None:
    headers = {**HEADERS, "content-type": kind, "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def answer(request: Request) -> Response:
        address = request.scope.get("raw_path", b"/").decode()
        if path == "/" and not address.endswith("/"):  # a prefix alone, which relative addresses would lose
            return Response(status_code=308, headers={"location": f"{address.rpartition('/')[2]}/"})
        if headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    app.add_api_route(path, answer, methods=["GET", "HEAD"], response_model=None, include_in_schema=False)
