"""Every test here has the browser."""

from browser_fixtures import chromium, open_page

__all__ = ["chromium", "open_page"]
