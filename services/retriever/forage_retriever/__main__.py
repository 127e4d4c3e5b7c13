"""`python -m forage_retriever [--config FILE] [key=value …]`: search a corpus over HTTP and gRPC until SIGTERM."""

from forage_retriever.serve.server import serve
from forage_runtime.service import run_service

if __name__ == "__main__":
    run_service("retriever", serve)
