"""The engine's end: an announced policy is fetched, checked, put in place and proved."""
