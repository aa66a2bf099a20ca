"""Static files: read once, served with their ETags."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

SHARED = Path(__file__).parent / "static"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

Files = dict[str, tuple[str, str, bytes]]


def static_files(own: Path) -> Files:
    """Return content type, ETag and bytes of every file of a page, shared ones included, by relative path."""
    found = {}
    for folder in (SHARED, own):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix in KINDS:
                body = path.read_bytes()
                tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
                found[path.relative_to(folder).as_posix()] = (KINDS[path.suffix], tag, body)
    return found


def static_response(files: Files, request: Request) -> Response | None:
    """Return the requested file or 304; None if there is none."""
    from starlette.responses import Response

    found = files.get(request.path_params.get("path", "index.html"))
    if found is None:
        return None
    kind, tag, body = found
    headers = {"etag": tag, "cache-control": "no-cache", "content-type": kind}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers)
