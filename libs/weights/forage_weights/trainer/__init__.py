"""The trainer's end: policies are written, and announced."""
