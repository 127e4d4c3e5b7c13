"""What the pages about runs show, computed from their folders."""
