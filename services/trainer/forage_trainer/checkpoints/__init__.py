"""Checkpoints: saving, restoring, uploading, exporting, rolling back."""
