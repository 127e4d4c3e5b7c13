"""`python -m forage_console [--config FILE] [key=value …]`: show runs in a browser until SIGTERM."""

from forage_console.serve import serve
from forage_runtime.service import run_service

if __name__ == "__main__":
    run_service("console", serve)
