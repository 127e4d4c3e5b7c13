"""Published policies and the weight files in them."""
