"""`python -m axolotl.serving.launcher PARENT_PID COMMAND...`: become COMMAND, tied to the life of the parent.

The kernel sends this process SIGTERM when the thread of the parent that started it ends, however it ends; SIGTERM, so
that a server still closes its engine. The setting survives exec. Elsewhere than on Linux there is no such signal.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the process that wanted this server is gone")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
