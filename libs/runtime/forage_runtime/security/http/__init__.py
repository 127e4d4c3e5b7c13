"""HTTP servers: who is let in, within TLS, and what a stranger may hold."""
