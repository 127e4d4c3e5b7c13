"""The page of the console's routes is that of its code."""

import api_doc


def test_the_page_of_routes_is_current() -> None:
    page = api_doc.DOCUMENT.read_text(encoding="utf-8")
    assert api_doc.render_console_section() in page, "docs/reference/api.md: run 'make reference' and commit"
