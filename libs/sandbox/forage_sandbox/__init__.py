"""Processes for code that may hang, crash, allocate without bound, or look for what is none of its business."""
