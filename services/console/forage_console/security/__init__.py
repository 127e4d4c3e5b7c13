"""Who may use the console, and what a request may look like."""
