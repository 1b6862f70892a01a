"""The HTTP server of the playground on 127.0.0.1: the standard library's threading server, with limits.

No files of the user are served. A connection that is silent for `IDLE_S` seconds, or takes longer to send a body, is
closed. Connections beyond `MAX_CONNECTIONS` at a time are closed, too. An error in a request becomes a response with an
HTTP status, never a traceback.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from meshwright.playground.jobs import RefusedError, check_post, check_request
from meshwright.playground.service import Reply, Service
from meshwright.report.page import SERVED_HEADERS
from meshwright.spec import PlaygroundError

HOST = "127.0.0.1"
IDLE_S = 30.0
MAX_CONNECTIONS = 64
_POLL_S = 0.2


class PlaygroundServer(ThreadingHTTPServer):
    """Serves a `Service` on a port of 127.0.0.1; port 0 chooses a free port.

    Raises PlaygroundError if the port cannot be opened.
    """

    daemon_threads = True
    block_on_close = False
    # On Windows this would let two servers share a port.
    allow_reuse_address = os.name == "posix"

    def __init__(self, service: Service, port: int = 0) -> None:
        self.service = service
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PlaygroundError(
                    f"Port {port} is in use. Give another --port, or leave --port out, which chooses a free port."
                ) from None
            raise PlaygroundError(
                f"Port {port} cannot be opened ({error.strerror}). Leave --port out, which chooses a free port."
            ) from None

    @property
    def url(self) -> str:
        """The URL of the page."""
        return f"http://{HOST}:{self.server_port}/"

    def warm_up(self) -> None:
        """Compute the first state once, so that the first request is as fast as later ones."""
        self.service.warm_up()
        # Existing objects are kept out of garbage collection: walking graphs of 100,000 objects takes 0.1 s each time.
        gc.collect()
        gc.freeze()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread; close it if `MAX_CONNECTIONS` are open already."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a connection; when it ends, allow another one."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: a connection breaks when the browser closes it."""


def serve(server: PlaygroundServer, started: Callable[[str], None]) -> None:
    """Serve until Ctrl-C; call ``started`` with the URL when requests are accepted. Call this in the main thread.

    Requests are handled in another thread, and Ctrl-C only sets a flag for which this thread waits. A KeyboardInterrupt
    in the loop that accepts requests was lost about once in thirty tries, right after a response.
    """
    interrupted: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    taking = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": _POLL_S}, daemon=True)
    try:
        server.warm_up()
        signal.signal(signal.SIGINT, lambda number, _: interrupted.append(number))
        taking.start()
        started(server.url)
        while taking.is_alive() and not interrupted:
            taking.join(_POLL_S)
        server.shutdown()
    except KeyboardInterrupt:
        pass  # while it warmed up
    finally:
        signal.signal(signal.SIGINT, before)
        server.service.close()
        server.server_close()
        gc.unfreeze()


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: PlaygroundServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    # Send small answers at once (no Nagle delay).
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._reply(self._get)

    def do_HEAD(self) -> None:
        self._reply(self._get)

    def do_POST(self) -> None:
        self._reply(self._post)

    def _get(self) -> Reply:
        path, _, query = self.path.partition("?")
        check_request(self.headers, self.server.server_port, is_page=path == "/")
        return self.server.service.get(path, query)

    def _post(self) -> Reply:
        check_request(self.headers, self.server.server_port, is_page=False)
        length = check_post(self.headers, self.server.server_port)
        return self.server.service.post(self.path, self._read(length))

    def _read(self, length: int) -> bytes:
        # The whole body must arrive within the idle time; otherwise a slow body would keep its place for ever.
        end = time.monotonic() + self.timeout
        body = b""
        while len(body) < length:
            self.connection.settimeout(max(end - time.monotonic(), 0.001))
            piece = self.rfile.read1(length - len(body))
            if not piece:
                raise RefusedError(400, "The request is shorter than its Content-Length.")
            body += piece
        self.connection.settimeout(self.timeout)
        return body

    def _reply(self, answer: Callable[[], Reply]) -> None:
        try:
            reply = answer()
        except RefusedError as refusal:
            # The rest of a refused request is not read, so the connection cannot be reused.
            self.close_connection = True
            reply = _refusal(refusal.status, str(refusal))
        except (TimeoutError, ConnectionError):
            self.close_connection = True
            return
        except Exception as error:
            reply = _refusal(
                500, f"This error is a defect of Meshwright ({type(error).__name__}: {error}). Please report it."
            )
        self._send(reply)

    def _send(self, reply: Reply) -> None:
        self.send_response(reply.status)
        for name, value in SERVED_HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.body)))
        if reply.file_name:
            self.send_header("Content-Disposition", f'attachment; filename="{reply.file_name}"')
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request that is not HTTP or uses an unsupported method, with a JSON body like other refusals."""
        self.close_connection = True
        self._send(_refusal(int(code), message or explain or "This request is not supported."))

    def version_string(self) -> str:
        """Return "meshwright", without the versions of Python and Meshwright."""
        return "meshwright"

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing: requests are not printed."""


def _refusal(status: int, message: str) -> Reply:
    return Reply(status=status, body=json.dumps({"status": "impossible", "message": message}).encode())
