"""Reports of a faithfulness probe, as a page and in a terminal."""
