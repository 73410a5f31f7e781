"""Logs kopf in to the API server with a session that shows when its watches were last answered, and what it lists.

kopf tells handlers of objects only: a quiet stream and a dead one look the same, and its own inactivity timeout just
reconnects without end. But every watch is a request, and each ends after `SERVER_TIMEOUT_SECONDS` at the latest; so the
time since the last answer (HTTP 200, headers) of a watch request bounds how old what we know can be. aiohttp's tracing
and response classes and kopf's custom sessions are public; nothing of kopf is replaced. A canary (a live LIST compared
with what is known each minute) was the alternative: more load on the API server, and it does not say which stream is
dead.
"""

import asyncio
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, Protocol

import aiohttp
import kopf
from yarl import URL

from tba_operator.caches import trim

SERVER_TIMEOUT_SECONDS = 120
"""After this the API server ends a watch, and kopf asks for the next from where it was."""
STALE_SECONDS = 180.0
"""A watch that was not answered for this long is dead: one and a half of its longest life."""
LOGIN_PAUSE_SECONDS = 5.0


class Page(Protocol):
    """Told of a page of a list: which objects are on it, and whether it is the first or the last."""

    def __call__(self, stream: str, uids: Iterable[str], /, *, first: bool, last: bool) -> None:
        """`stream` as in `stream_of`."""
        ...


class Streams:
    """Follows the requests of kopf's session."""

    def __init__(self, heard: Callable[[str], None], page: Page) -> None:
        """Both get the plural of a kind; a stream of one namespace is called `pods in research`."""
        self._heard = heard
        self._page = page
        self._next_login = 0.0

    def answered(self, url: URL, status: int) -> None:
        """A request was answered."""
        stream = stream_of(url)
        if stream is not None and status == 200 and url.query.get("watch") == "true":
            self._heard(stream)

    def read(self, url: URL, body: Any) -> None:
        """The body of an answer was read. Of a list, all that nobody needs is dropped before kopf has it."""
        stream = stream_of(url)
        if stream is None or not isinstance(body, dict) or not isinstance(body.get("items"), list):
            return
        of = {"apiVersion": body.get("apiVersion"), "kind": body.get("kind", "").removesuffix("List")}
        body["items"] = [trim({**of, **item}) for item in body["items"]]
        uids = [item["metadata"]["uid"] for item in body["items"]]
        last = not (body.get("metadata") or {}).get("continue")
        self._page(stream, uids, first="continue" not in url.query, last=last)

    async def login(self, *, settings: kopf.OperatorSettings, **_: Any) -> kopf.AiohttpSession:
        """Credentials of the pod or of the kubeconfig, read anew: kopf asks again after each 401.

        Raises: kopf.PermanentError without any.
        """
        await self._pause()
        found = kopf.login_with_service_account(settings=settings) or kopf.login_with_kubeconfig(settings=settings)
        if found is None:
            raise kopf.PermanentError("no service account and no kubeconfig: set KUBECONFIG, or run in a pod")
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=found.as_ssl_context()),
            headers=found.as_http_headers(),
            proxy=found.proxy_url,
            trust_env=found.trust_env,
            trace_configs=[self._trace()],
            response_class=self._answer_class(),
        )
        return kopf.AiohttpSession(
            server=found.server, default_namespace=found.default_namespace, aiohttp_session=session
        )

    async def _pause(self) -> None:
        # kopf would log in without end, and at full speed, while the API server takes no credentials.
        now = asyncio.get_running_loop().time()
        if now < self._next_login:
            await asyncio.sleep(self._next_login - now)
        self._next_login = max(now, self._next_login) + LOGIN_PAUSE_SECONDS

    def _trace(self) -> aiohttp.TraceConfig:
        async def ended(_: aiohttp.ClientSession, __: SimpleNamespace, request: aiohttp.TraceRequestEndParams) -> None:
            self.answered(request.url, request.response.status)

        trace = aiohttp.TraceConfig()
        trace.on_request_end.append(ended)
        return trace

    def _answer_class(self) -> type[aiohttp.ClientResponse]:
        read = self.read

        class Answer(aiohttp.ClientResponse):
            async def json(self, **how: Any) -> Any:
                body = await super().json(**how)
                if self.status == 200:
                    read(self.url, body)
                return body

        return Answer


def stream_of(url: URL) -> str | None:
    """What a request lists or watches; null for any other request."""
    parts = url.path.strip("/").split("/")
    # api/VERSION/… or apis/GROUP/VERSION/…, below the path of a proxy perhaps.
    start = next((i for i, part in enumerate(parts) if part in ("api", "apis")), None)
    if start is None:
        return None
    rest = parts[start + (2 if parts[start] == "api" else 3) :]
    if len(rest) == 1 and rest[0]:
        return rest[0]
    if len(rest) == 3 and rest[0] == "namespaces":
        return f"{rest[2]} in {rest[1]}"
    return None
