"""Engine processes are forked from a server, with the environment of the replica."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest
from long_folder import make_long_folder
from waiting import WAIT_S

from forage_rollout.vllm_start import fork_server
from forage_rollout.vllm_start.fork_server import CoreContext, ForkContext
from forage_rollout.vllm_start.start_errors import LastingStartError, explain_start


def test_a_process_has_the_environment_of_now_and_not_of_the_servers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forkserver.ensure_running()
    monkeypatch.setenv("SINCE_THEN", "yes")
    arguments = [sys.executable, "-c", f"import os; open(r'{tmp_path}/seen', 'w').write(os.environ['SINCE_THEN'])"]
    process = ForkContext().Process(target=subprocess.run, name="EngineCore", kwargs={"args": arguments, "check": True})
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert (tmp_path / "seen").read_text() == "yes"


def test_a_process_ends_with_a_replica_that_is_killed() -> None:
    code = (
        "from multiprocessing.connection import wait\n"
        "from forage_rollout.vllm_start.fork_server import ForkContext\n"
        "forever = {'object_list': [], 'timeout': 100}\n"
        "process = ForkContext().Process(target=wait, name='EngineCore', kwargs=forever)\n"
        "process.start()\n"
        "print(process.pid, flush=True)\n"
        "process.join()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as replica:
        assert replica.stdout is not None
        core = psutil.Process(int(replica.stdout.readline()))
        try:
            with pytest.raises(psutil.TimeoutExpired):
                core.wait(0.5)
            replica.kill()
            core.wait(WAIT_S)
        finally:
            with suppress(psutil.NoSuchProcess):
                core.kill()


def test_vllm_starts_its_processes_in_its_own_way_where_no_server_was_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils.system_utils import get_mp_context
    from vllm.v1.engine import utils

    monkeypatch.setattr(utils, "get_mp_context", get_mp_context)  # restored in the end
    fork_server.use_own_processes()
    context = utils.get_mp_context()
    assert type(context) is CoreContext
    assert context.get_start_method() == get_mp_context().get_start_method()
    monkeypatch.setattr(fork_server, "_is_prepared", True)
    fork_server.use_own_processes()
    assert type(utils.get_mp_context()) is ForkContext


def fail() -> None:
    try:
        try:
            raise FileNotFoundError(2, "No such file", "/model/part-2.safetensors")
        except FileNotFoundError as error:
            raise RuntimeError("cannot load") from error
    except RuntimeError:
        logging.getLogger("vllm").exception("EngineCore failed to start.")


@pytest.mark.parametrize("context", [ForkContext(), CoreContext(multiprocessing.get_context("spawn"))])
def test_the_error_of_a_process_that_does_not_start_is_that_of_the_engine(context: CoreContext) -> None:
    def start() -> None:
        with explain_start(Path("/model")):
            process = context.Process(target=fail, name="EngineCore", kwargs={})
            process.start()
            process.join()
            raise RuntimeError("Engine core initialization failed. See root cause above.")

    with pytest.raises(LastingStartError) as raised:
        start()
    assert str(raised.value) == (
        "FileNotFoundError: [Errno 2] No such file: '/model/part-2.safetensors', hence RuntimeError: cannot load"
    )
    details = raised.value.failure.details
    assert "in fail\n" in details
    assert "See root cause above" in details


def test_the_server_starts_where_the_folder_of_temporary_files_has_a_long_path(tmp_path: Path) -> None:
    code = (
        "import tempfile\n"
        "from forage_rollout.vllm_start import fork_server\n"
        "usual = tempfile.gettempdir()\n"
        "fork_server._context.set_forkserver_preload = lambda modules: None\n"  # vLLM takes long
        "fork_server.prepare_fork()\n"
        "core = fork_server.ForkContext().Process(target=print, name='EngineCore', kwargs={'end': 'core'})\n"
        "core.start()\n"
        "core.join()\n"
        "assert core.exitcode == 0 and tempfile.gettempdir() == usual\n"
    )
    environment = os.environ | {"TMPDIR": make_long_folder(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "core"), done.stderr
