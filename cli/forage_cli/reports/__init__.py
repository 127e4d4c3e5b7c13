"""Reports as self-contained HTML documents with their style, plots and a small script; nothing is fetched."""
