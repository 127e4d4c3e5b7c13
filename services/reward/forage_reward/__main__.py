"""`python -m forage_reward [--config FILE] [key=value …]`"""

from forage_common.service import run
from forage_reward.serve.process import serve

if __name__ == "__main__":
    run("reward", serve)
