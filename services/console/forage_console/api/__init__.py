"""The HTTP interface that the front end uses: routes, and the models of their requests and replies."""
