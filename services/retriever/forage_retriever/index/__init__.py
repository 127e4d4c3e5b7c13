"""Index folders: built, checked, loaded."""
