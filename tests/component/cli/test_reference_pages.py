"""docs/reference: the gRPC contracts."""

from __future__ import annotations

import api_doc


def test_the_page_of_the_api_has_the_current_contracts() -> None:
    page = api_doc.DOCUMENT.read_text(encoding="utf-8")
    assert api_doc.render_grpc_section() in page, "docs/reference/api.md: run 'make reference' and commit"
