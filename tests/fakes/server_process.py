"""`python server_process.py SYNC_DIR PORT [BEHAVIOUR]`: what a supervisor sees of a server, in a tenth of a second.

It binds, answers `/health/`, leaves `server.json`, and keeps one child. Behaviours:

    serve       until SIGTERM (the default)
    fail        exits with 3 at once, saying why
    fail-later  serves at its first start, exits with 3 at every later one (it counts in SYNC_DIR/starts)
    silent      binds and answers nothing
"""

from __future__ import annotations

import http.server
import json
import os
import secrets
import signal
import socketserver
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

sync_dir, port = Path(sys.argv[1]), int(sys.argv[2])
behaviour = sys.argv[3] if len(sys.argv) > 3 else "serve"
with (sync_dir / "starts").open("a") as file:
    file.write("x")
num_starts = len((sync_dir / "starts").read_text())
if behaviour == "fail" or (behaviour == "fail-later" and num_starts > 1):
    print(f"cannot find the model (start {num_starts})", flush=True)
    sys.exit(3)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if behaviour == "silent":
            time.sleep(600)
        body = json.dumps({"status": "ok", "phase": "ready"}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    def server_bind(self) -> None:
        # Without the library's look-up of this host's name, which takes seconds on a machine without a network.
        socketserver.TCPServer.server_bind(self)


def stop(number: int, frame: FrameType | None) -> None:
    child.kill()
    print("stopped cleanly", flush=True)
    os._exit(0)


child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
signal.signal(signal.SIGTERM, stop)
server = Server(("127.0.0.1", port), Handler)
content = {"url": f"http://127.0.0.1:{port}", "pid": os.getpid(), "started": 0.0, "token": "t"}
temporary = sync_dir / ".server.json"
temporary.write_text(json.dumps({**content, "instance_id": secrets.token_hex(4)}))
(sync_dir / "child").write_text(str(child.pid))
temporary.replace(sync_dir / "server.json")
print(f"serving (start {num_starts})", flush=True)
server.serve_forever()
