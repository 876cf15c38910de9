"""An interpreter ends normally although the store has not answered a request."""

import os
import subprocess
import sys

from tests.support.harness import ENVIRONMENT

UNANSWERED = """
import ctypes
import os
import signal
import sys
import time
from torch.distributed import TCPStore

PR_SET_PDEATHSIG = 1
theirs, ours = os.pipe()
server = os.fork()
if server == 0:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a server that is left would keep stderr open
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(ours, str(served.port).encode())
    signal.pause()
port = int(os.read(theirs, 100))

from gradwire.comm import store_collectives

store_collectives.EXIT_SECONDS = 0.0
store_collectives.SHUTDOWN_SECONDS = 100.0
store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
os.kill(server, signal.SIGSTOP)
os.waitpid(server, os.WUNTRACED)  # it has stopped, and cannot answer
requests = store_collectives.StoreRequests(store)
assert requests.ask(lambda store: store.check(["key"]), 0.0) is None
(thread,) = store_collectives._store_of_thread

class Last:
    def __del__(self, kill=os.kill, arguments=(server, signal.SIGKILL), thread=thread, sleep=time.sleep):
        kill(*arguments)  # the interpreter is being finalized
        while thread.is_alive():
            sleep(0.01)  # a thread that wakes up meanwhile aborts the process

sys.last_of_all = Last()
"""


def test_request_without_an_answer_does_not_abort_the_exit():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, "-c", UNANSWERED],
        env=environment | ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
