"""A user reward that wants out, within a scorer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from breakout_targets import CODE, Targets

from forage_proto.v1 import reward_pb2, trajectory_pb2
from forage_reward.isolation.user_rewards import UserRewards
from forage_reward.registry import REWARDS
from forage_reward.router import RewardRouter
from forage_runtime.settings import RewardPart, UserReward
from forage_runtime.settings.security import Sandbox

Score = Callable[..., trajectory_pb2.Score]
OWN = """
import mmap
import threading
import time


def start_threads(count):
    for _ in range(count):
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()


def start_processes(count):
    for _ in range(count):
        if os.fork() == 0:
            if os.fork() == 0:  # its own parent ends at once
                time.sleep(3600)
            os._exit(0)


def spin():
    while True:
        pass


def fill_folder():
    for index in range(11_000):
        with open(f"{os.environ['TMPDIR']}/{index}", "wb") as file:
            file.truncate(0)


def fill_disk():
    for index in range(8):
        with open(f"{os.environ['TMPDIR']}/{index}", "wb") as file:
            for _ in range(100):
                file.write(bytes(1 << 20))
    time.sleep(3600)


kept = []


def find_own_socket():
    for number in range(3, 256):
        with contextlib.suppress(OSError):
            return socket.socket(fileno=number)


def score(view, truth, params):
    order = truth.targets[0]
    if order == "fine":
        return 1.0
    if order == "memory":
        return float(len(bytearray(2**33)))
    if order == "map":
        return float(len(mmap.mmap(-1, 2**33)))
    if order == "shared_map":
        return float(len(mmap.mmap(-1, 2**33, flags=mmap.MAP_SHARED)))
    if order == "threads":
        threading.stack_size(65536)
        start_threads(400)
        time.sleep(3600)
    if order == "processes":
        start_processes(300)
        time.sleep(3600)
    if order == "print":
        while True:
            print("x" * 1000)
    if order == "large_file":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with open(os.environ["TMPDIR"] + "/large", "wb") as file:
            for _ in range(1000):
                file.write(bytes(1 << 20))
    if order == "many_files":
        fill_folder()
        time.sleep(3600)
    if order == "disk":
        fill_disk()
    if order == "name":  # of its process, which is no text
        ctypes.CDLL(None).prctl(15, b"\\xff\\xfe")
        return 1.0
    if order == "dig":
        os.chdir(os.environ["TMPDIR"])
        for _ in range(3000):  # deeper than Python's recursion, and longer than a path may be
            os.mkdir("a")
            os.chdir("a")
        os._exit(3)
    if order == "dig_and_stay":
        os.chdir(os.environ["TMPDIR"])
        for _ in range(3000):
            os.mkdir("a")
            os.chdir("a")
        time.sleep(3600)
    if order == "unlinked":
        for index in range(8):
            file = open(f"{os.environ['TMPDIR']}/{index}", "wb")
            os.unlink(file.name)
            kept.append(file)
            for _ in range(100):
                file.write(bytes(1 << 20))
        time.sleep(3600)
    if order == "forge_nan":
        from forage_proto.v1 import trajectory_pb2

        score = trajectory_pb2.Score(status=trajectory_pb2.STATUS_OK, reward="mine", total=float("nan"))
        frame = score.SerializeToString()
        find_own_socket().sendall(len(frame).to_bytes(4, "little") + frame)
        time.sleep(3600)
    if order == "signal":
        os.kill(os.getpid(), 36)
    if order == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if order == "forge":
        find_own_socket().send(b"\\x04\\x00\\x00\\x00\\xff\\xff\\xff\\xff")
    if order == "huge":
        find_own_socket().send(b"\\xff\\xff\\xff\\xff")
    if order == "lock":
        os.mkdir(os.environ["TMPDIR"] + "/locked", 0)
        os._exit(3)
    if order == "hide":
        threading.Thread(target=spin, daemon=True).start()
        return 1.0
    if order == "folder":
        return {"length": float(len(os.listdir(os.environ["TMPDIR"])))}
    if order == "keep":
        with open(os.environ["TMPDIR"] + "/kept", "w") as file:
            file.write("x")
        return 1.0
    ATTEMPTS[order](params)
    return 1.0
"""


def write_code(folder: Path) -> Path:
    """Write the module of the reward."""
    file = folder / "mine.py"
    file.write_text(CODE.read_text() + OWN)
    return file


def open_scorer(code: Path, targets: Targets, mode: Sandbox, **options: object) -> tuple[UserRewards, Score]:
    reward = UserReward(function=f"{code}:score", **{"timeout_s": 300.0, "memory_mib": 512, **options})  # type: ignore[arg-type]
    user = UserRewards({"mine": reward}, REWARDS, mode)
    router = RewardRouter({"a": (RewardPart(name="mine", params=dict(targets.params)),)}, user.rewards)

    def score(order: str) -> trajectory_pb2.Score:
        item = reward_pb2.ScoreItem(
            data_source="a",
            spans=[trajectory_pb2.Span(role=trajectory_pb2.ROLE_MODEL, text="x")],
            ground_truth=trajectory_pb2.GroundTruth(targets=[order]),
        )
        return router.score(item).score

    return user, score
