"""Search over a corpus: BM25, dense and hybrid, over HTTP and gRPC."""
