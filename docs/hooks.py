"""Hooks of the documentation site: files outside `docs/`, and mermaid without a content delivery network.

Pages link to the rest of the repository by relative paths, which work in an editor and on a code host. The site gets a
copy of every file that is linked that way, below `repository/`: Markdown as a page, everything else unchanged. A link
to a folder, or to a file that does not exist, is not rewritten and fails the strict build.
"""

from __future__ import annotations

import hashlib
import importlib.util
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[1]
MERMAID = "assets/javascripts/mermaid.min.js"
MERMAID_SHA256 = "74d7c46dabca328c2294733910a8aa1ed0c37451776e8d5295da38a2b758fb9b"
"""Of dist/mermaid.min.js in the npm package mermaid 11.16.0."""
_LINK = re.compile(r"(\]\()([^)\s#:]+)([^)\s]*\))")
_CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.M | re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what pages link to outside `docs/`, and mermaid.js."""
    waiting = [file for file in files if file.src_uri.endswith(".md")]
    while waiting:
        page = waiting.pop()
        for path in _outside_links(page):
            uri = f"repository/{path}"
            if files.get_file_from_path(uri) is None:
                file = File.generated(config, uri, abs_src_path=str(REPOSITORY / path))
                files.append(file)
                waiting += [file] if uri.endswith(".md") else []
    files.append(File.generated(config, MERMAID, content=_mermaid()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links that leave `docs/` to the copies below `repository/`."""

    def site_link(match: re.Match[str]) -> str:
        path = _repository_path(page.file, match[2])
        uri = path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"
        if files.get_file_from_path(uri) is None:
            return match[0]
        return match[1] + posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".") + match[3]

    return _LINK.sub(site_link, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Loads mermaid.js on pages with a diagram; the theme would take it from a CDN if it were not loaded yet."""
    if 'class="mermaid"' not in html:
        return html
    depth = page.url.count("/")
    return f'{html}\n<script src="{"../" * depth}{MERMAID}"></script>'


def _outside_links(page: File) -> list[str]:
    """Existing files of the repository outside `docs/` that a page links to."""
    paths = [_repository_path(page, match[2]) for match in _LINK.finditer(_CODE.sub("", page.content_string))]
    return [path for path in paths if not path.startswith(("docs/", "../")) and (REPOSITORY / path).is_file()]


def _repository_path(page: File, link: str) -> str:
    """The path in the repository that a page's relative link means."""
    uri = page.src_uri
    source = uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _mermaid() -> bytes:
    """mermaid.js from the package mermaidx, which carries the file of the npm package unchanged."""
    found = importlib.util.find_spec("mermaidx")
    if found is None or found.origin is None:
        raise RuntimeError("mermaidx is missing: install docs/requirements.lock, or run 'make docs'")
    content = (Path(found.origin).parent / "assets/mermaid.js").read_bytes()
    if hashlib.sha256(content).hexdigest() != MERMAID_SHA256:
        raise RuntimeError("mermaid.js of the package mermaidx is not mermaid 11.16.0: check docs/requirements.txt")
    return content
