"""Reports as self-contained HTML: one document with its style, its figures and a small script; nothing is fetched."""
