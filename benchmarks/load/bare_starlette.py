"""The yardstick of server_throughput.py: the same requests and answers, and nothing in between.

python benchmarks/bare_starlette.py PORT_FILE     writes its URL there once it listens
"""

import sys
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from volcano_server.serving import KEEP_ALIVE, bind, url_of


async def acquire(request: Request) -> Response:
    body = await request.json()
    assert isinstance(body["ttl_seconds"], int)
    answer = {"expires_at": "2026-11-29T17:17:50.951Z", "fencing_token": 1795972640951229}
    return JSONResponse(answer, status_code=201)


async def release(_: Request) -> Response:
    return Response(status_code=204)


def main() -> None:
    app = Starlette(
        routes=[
            Route("/locks/{key}/lease", acquire, methods=["POST"]),
            Route("/locks/{key}/lease", release, methods=["DELETE"]),
        ]
    )
    listener = bind("127.0.0.1", 0)
    Path(sys.argv[1]).write_text(url_of(listener))
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        log_level="critical",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE,
        server_header=False,
        date_header=False,
        proxy_headers=False,
    )
    uvicorn.Server(config).run(sockets=[listener])


main()
