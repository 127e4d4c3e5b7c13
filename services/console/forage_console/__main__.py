"""`python -m forage_console [--config FILE] [key=value …]`: show runs in a browser until SIGTERM."""

from forage_common.service import run_service
from forage_console.serve import serve

if __name__ == "__main__":
    run_service("console", serve)
