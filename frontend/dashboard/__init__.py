"""The dashboard: one page at `/` of the facade's listener, which shows the fleet live. The page holds no data of the
fleet: it asks the facade's routes for them, with the reader's key."""

from __future__ import annotations

from importlib import resources

from frontend.server.api import Api

FILES = {
    "/": ("dashboard.html", "text/html"),
    "/dashboard/dashboard.css": ("dashboard.css", "text/css"),
    "/dashboard/icon.svg": ("icon.svg", "image/svg+xml"),
    "/dashboard/calls.js": ("calls.js", "text/javascript"),
    "/dashboard/charts.js": ("charts.js", "text/javascript"),
    "/dashboard/dashboard.js": ("dashboard.js", "text/javascript"),
    "/dashboard/dom.js": ("dom.js", "text/javascript"),
    "/dashboard/facts.js": ("facts.js", "text/javascript"),
    "/dashboard/panels.js": ("panels.js", "text/javascript"),
    "/dashboard/updates.js": ("updates.js", "text/javascript"),
    "/dashboard/words.js": ("words.js", "text/javascript"),
}
"""Path → its file in this folder, and the media type."""

HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
    ),
    "Cache-Control": "no-cache",  # a new version of the frontend has a new page
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""The page runs no text as a script, loads nothing from elsewhere, and no other page may show it in a frame."""


def add_dashboard(api: Api) -> None:
    """Serves the page and its files without a key."""
    folder = resources.files("frontend.dashboard")
    for path, (name, media_type) in FILES.items():
        api.add_file(path, folder.joinpath(name).read_bytes(), media_type, HEADERS)
