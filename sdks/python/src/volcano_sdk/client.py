"""The sync client: settings, and `.locks`."""

from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from volcano_sdk.errors import VolcanoError, put_beside
from volcano_sdk.locks import Locks
from volcano_sdk.runtime import Runtime
from volcano_sdk.settings import Settings, checked_http_client
from volcano_sdk.transport import Injected


class VolcanoClient:
    """A client of one project.  Thread-safe, and safe to fork; close it, or use it as a context.

    `api_url`, `anon_key` and `service_key` default to the environment's VOLCANO_API_URL,
    VOLCANO_ANON_KEY and VOLCANO_SERVICE_KEY.  `timeout`: seconds that one request may take in
    total, by default 10.  `http_client`: an httpx.Client, or one of its kind, to send with; it
    stays yours.  `trust_env=False` ignores the environment's proxies.

    ValueError: no URL, or one of these is wrong; TypeError: an `http_client` of another kind.
    """

    def __init__(
        self,
        *,
        api_url: str | None = None,
        anon_key: str | None = None,
        service_key: str | None = None,
        timeout: float | None = None,
        http_client: Any = None,
        trust_env: bool = True,
    ) -> None:
        self._settings = Settings.resolve(
            api_url=api_url,
            anon_key=anon_key,
            service_key=service_key,
            timeout=timeout,
            trust_env=trust_env and http_client is None,
        )
        transport = None
        if http_client is not None:
            checked_http_client(http_client, is_async=False)
            transport = partial(Injected, http_client, self._settings)
        self._runtime = Runtime(self._settings, transport=transport)
        self.locks = Locks(self._runtime)

    def __repr__(self) -> str:
        return f"<VolcanoClient {self._settings.api_url}>"

    def close(self) -> None:
        """End it: running `with_lock`s lose their locks, which are then released.

        The first release that fails is raised, after all were tried.  Leases from `acquire` are
        yours.
        """
        self._runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        try:
            self.close()
        except VolcanoError as failure:
            if error is None:
                raise
            put_beside(error, failure)
        return False
