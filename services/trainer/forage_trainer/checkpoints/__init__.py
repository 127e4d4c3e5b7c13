"""Checkpoints: saving, restoring, acknowledging the consumed groups, uploading, exporting, rolling back."""
