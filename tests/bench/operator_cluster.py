"""What bench_operator.py measures on: a control plane of its own, nodes that kwok simulates, and pods that answer.

API server, etcd, controllers, scheduler: tests/cluster/up.sh, no nodes      kwok: 50 nodes, every pod Ready at once
/progress: the pods' addresses are this machine's, and one server here answers for whichever trainer is asked
"""

import asyncio
import base64
import json
import os
import ssl
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web
from support.kube_cluster import SCRIPTS, KubeCluster

from tba.contracts.history import Progress

CRD = SCRIPTS.parents[1] / "crds" / "tbajobs.tba.dev.yaml"
NODES = 50
PODS = "10.246"
PORT = 8080  # where trainers answer
PAGE = 500
# Its own names and numbers, so that another test cluster may run beside it. The controllers of Kubernetes are allowed
# more requests than their defaults, which are made for small clusters: not they are measured.
ENVIRONMENT = {
    "KUBE_RUN": str(SCRIPTS / ".run-bench"),
    "KUBE_BRIDGE": "kubebo",
    "KUBE_NET": "172.31.0",
    "KUBE_PODS": PODS,
    "KUBE_SERVICES": "10.98",
    "KUBE_ETCD_PORT": "33790",
    "KUBE_GRACE": "120s",
    "KUBE_MANAGER_FLAGS": "--kube-api-qps=400 --kube-api-burst=800 --concurrent-statefulset-syncs=10",
}
Object = dict[str, Any]


@contextmanager
def cluster() -> Iterator[KubeCluster]:
    """Up, with simulated nodes and the CRD; nothing of it is left afterwards."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    found = KubeCluster()
    with ExitStack() as ends:
        ends.callback(found.down)
        found.up(0)
        found.kubectl("apply", "--server-side", "-f", str(CRD))
        ends.enter_context(_kwok(found))
        found.apply(*(_node(n) for n in range(NODES)))
        found.kubectl("wait", "--for=condition=Ready", "--timeout=120s", "node", "--all")
        ends.enter_context(_pod_addresses())
        yield found


@contextmanager
def _kwok(found: KubeCluster) -> Iterator[None]:
    """Simulated kubelets whose pods do not complete by themselves."""
    stages = yaml.safe_load_all((found.bin / "kwok-stages.yaml").read_text())
    wanted = [stage for stage in stages if stage["metadata"]["name"] != "pod-complete"]
    config = found.run / "kwok.yaml"
    config.write_text(yaml.safe_dump_all(wanted))
    command = [str(found.bin / "kwok"), "--config", str(config), "--kubeconfig", str(found.kubeconfig)]
    command += ["--cidr", f"{PODS}.0.0/16", "--node-lease-duration-seconds", "40"]
    command += ["--manage-nodes-with-annotation-selector", "kwok.x-k8s.io/node=fake"]
    with (found.run / "logs" / "kwok.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


def _node(number: int) -> Object:
    room = {"cpu": "1000", "memory": "1Ti", "pods": "10000", "nvidia.com/gpu": "1000"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": f"fake{number}", "annotations": {"kwok.x-k8s.io/node": "fake"}},
        "status": {"allocatable": room, "capacity": room},
    }


@contextmanager
def _pod_addresses() -> Iterator[None]:
    """This machine takes every pod's address for its own."""
    route = ["local", f"{PODS}.0.0/16", "dev", "lo"]
    subprocess.run(["ip", "route", "replace", *route], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "route", "del", *route], check=True)


class Api:
    """Requests to the API server; none of them is retried."""

    def __init__(self, session: aiohttp.ClientSession, server: str) -> None:
        self._session = session
        self._server = server

    async def send(self, method: str, path: str, body: Any = None, kind: str = "json") -> Object:
        """`kind`: the last part of the content type."""
        headers = {"Content-Type": f"application/{kind}"}
        data = None if body is None else json.dumps(body)
        async with self._session.request(method, self._server + path, data=data, headers=headers) as answer:
            if answer.status >= 300:
                raise RuntimeError(f"{method} {path}: HTTP {answer.status}: {await answer.text()}")
            return await answer.json()

    async def merge(self, path: str, change: Object) -> Object:
        """Patch an object."""
        return await self.send("PATCH", path, change, "merge-patch+json")

    async def list(self, path: str, selector: str = "", *, only_metadata: bool = False) -> AsyncIterator[Object]:
        """Objects of all namespaces."""
        form = "application/json"
        accept = f"{form};as=PartialObjectMetadataList;g=meta.k8s.io;v=v1" if only_metadata else form
        page = ""
        while True:
            params = {"labelSelector": selector, "limit": str(PAGE), "continue": page}
            url, headers = self._server + path, {"Accept": accept}
            async with self._session.get(url, params=params, headers=headers, raise_for_status=True) as answer:
                found = await answer.json()
            for item in found["items"] or ():  # Go writes an empty list as null
                yield item
            page = found["metadata"].get("continue", "")
            if not page:
                return

    async def watch(self, path: str, selector: str) -> AsyncIterator[Object]:
        """Objects as they change, for ever."""
        params = {"watch": "true", "labelSelector": selector, "timeoutSeconds": "3600"}
        forever = aiohttp.ClientTimeout(total=None)
        async with self._session.get(
            self._server + path, params=params, timeout=forever, raise_for_status=True
        ) as answer:
            async for line in answer.content:
                yield json.loads(line)["object"]


@asynccontextmanager
async def connect(kubeconfig: Path) -> AsyncIterator[Api]:
    """As the administrator."""
    found = yaml.safe_load(kubeconfig.read_text())
    server, user = found["clusters"][0]["cluster"], found["users"][0]["user"]
    authority = base64.b64decode(server["certificate-authority-data"]).decode()
    context = ssl.create_default_context(cadata=authority)
    with tempfile.NamedTemporaryFile() as own:
        own.write(base64.b64decode(user["client-certificate-data"]) + b"\n" + base64.b64decode(user["client-key-data"]))
        own.flush()
        context.load_cert_chain(own.name)
    connector = aiohttp.TCPConnector(ssl=context, limit=0)
    # Lines of a watch are whole objects.
    async with aiohttp.ClientSession(connector=connector, read_bufsize=2**20) as session:
        yield Api(session, server["server"])


class Trainers:
    """Answers GET /progress for every trainer pod, by the address that was asked."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._uids: dict[str, str] = {}
        self._looking = asyncio.Lock()
        self._started = self._step_time = time.time()
        self._moving = False
        self.asked = 0

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        """Listen at all pods' addresses."""
        application = web.Application()
        application.add_routes([web.get("/progress", self._answer)])
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "0.0.0.0", PORT).start()
            yield
        finally:
            await runner.cleanup()

    def move(self) -> None:
        """From now on a step a second."""
        self._moving = True

    def stand(self) -> None:
        """From now on the same answer each time."""
        self._step_time = self._time()
        self._moving = False

    def _time(self) -> float:
        return time.time() if self._moving else self._step_time

    async def _answer(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        address = request.transport.get_extra_info("sockname")[0]
        self.asked += 1
        if address not in self._uids:
            async with self._looking:
                if address not in self._uids:
                    await self._look()
        return web.Response(text=self._progress(self._uids.get(address)).model_dump_json())

    async def _look(self) -> None:
        pods = self._api.list("/api/v1/pods", "tba.dev/role=trainer")
        self._uids = {pod["status"].get("podIP", ""): pod["metadata"]["uid"] async for pod in pods}

    def _progress(self, uid: str | None) -> Progress:
        step = int(self._time() - self._started)
        return Progress(
            run_id="f" * 32,
            pod_uid=uid,
            state="Training",
            epoch=1,
            step=step,
            total_steps=100_000,
            percentage=step / 1000,
            policy_version=step,
            reward=0.5,
            eval_score=None,
            staleness_mean=1.5,
            trainer_idle_percent=1.0,
            trajectories=step * 320,
            replay_ratio=1.0,
            eta_seconds=100_000.0 - step,
            searchers=8,
            last_updated_time=self._time(),
            checkpoint_step=step,
        )
