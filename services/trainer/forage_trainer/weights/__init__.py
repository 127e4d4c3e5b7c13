"""Publication of policies, and the files of weights in them."""
