"""The trainer's processes as actors of Ray."""
