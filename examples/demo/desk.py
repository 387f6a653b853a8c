"""The service that the tickets lie with: what agents in any language read and write.

    python desk.py DATABASE TICKETS      a new backlog; prints the URL, serves until stdin ends

    GET  /tickets        [3, 7, 12]: those without an answer
    PUT  /tickets/7      204: it is there; an answer that it has stays
    POST /tickets/7      {"fencing_token": 17…, "agent": "agent-03", "answer": "Try it off and on."}
                         204; 409: it changed nothing, somebody newer has written the ticket

The fencing token is not compared here but in the SQL of backlog.py, in the statement that writes.
"""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from backlog import Backlog


class _Handler(BaseHTTPRequestHandler):
    backlog: Backlog

    def do_GET(self) -> None:
        if self.path == "/tickets":
            self._respond(HTTPStatus.OK, self.backlog.open_tickets())
        else:
            self._respond(HTTPStatus.NOT_FOUND)

    def do_PUT(self) -> None:
        self.backlog.add(self._ticket)
        self._respond(HTTPStatus.NO_CONTENT)

    def do_POST(self) -> None:
        note = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        written = (
            self.backlog.mark(self._ticket, fencing_token=note["fencing_token"])
            if note["answer"] is None
            else self.backlog.answer(
                self._ticket,
                note["answer"],
                fencing_token=note["fencing_token"],
                agent=note["agent"],
            )
        )
        self._respond(HTTPStatus.NO_CONTENT if written else HTTPStatus.CONFLICT)

    @property
    def _ticket(self) -> int:
        return int(self.path.removeprefix("/tickets/"))

    def _respond(self, status: HTTPStatus, value: Any = None) -> None:
        body = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            pass  # agents get killed, also in the middle of a request

    def log_message(self, *_: Any) -> None:
        """Quiet: the agents tell what they do."""


@contextmanager
def open_desk(backlog: Backlog) -> Iterator[str]:
    """Serves the backlog on a free port of 127.0.0.1; gives the URL."""
    handler = type("Handler", (_Handler,), {"backlog": backlog})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    present = Backlog(Path(sys.argv[1]))
    present.create(int(sys.argv[2]))
    with open_desk(present) as url:
        print(url, flush=True)
        sys.stdin.read()
