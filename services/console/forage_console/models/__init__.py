"""Requests and replies of the HTTP interface, by page. The front end's TypeScript types are generated from them."""
