"""The real adapter against a real API server, and the fake against the same sentences."""

import asyncio
import base64
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config.incluster_config import InClusterConfigLoader
from kubernetes.aio.dynamic import DynamicClient
from support.kube_contract import CUSTOM, SENTENCES, Sentence, config_map, pod, stateful_set
from support.kube_fake import FakeKube
from support.relay import Relay

from tba_operator.cluster_api import ClusterApi, configuration_of
from tba_operator.kubeapi import Access, Forbidden, Invalid, NamespaceTerminating, Object, QuotaExceeded, Unavailable
from tba_operator.world import Ref

CUSTOM_RESOURCE = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "tbajobs.contract.tba.dev"},
    "spec": {
        "group": CUSTOM.partition("/")[0],
        "names": {"kind": "TBAJob", "plural": "tbajobs"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": CUSTOM.partition("/")[2],
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
                "subresources": {"status": {}},
            }
        ],
    },
}


class Admin:
    """All rights, unpaced, and requests that `KubeApi` has no words for."""

    def __init__(self, client: ApiClient) -> None:
        self.api = ClusterApi(client, rate=1000, burst=1000)
        self.host = client.configuration.host
        self._client = DynamicClient(client)

    async def request(self, method: str, path: str, body: Object | None = None) -> Object:
        answer = await self._client.request(method, path, body=body, serialize=False)
        return await answer.json()

    async def namespace(self) -> str:
        name = f"api-{secrets.token_hex(4)}"
        await self.request(
            "post", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        )
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": name}}
        await self.api.apply(account)  # pods need it; controller-manager is slower
        return name

    async def serves(self, api_version: str) -> bool:
        try:
            return bool((await self.request("get", f"/apis/{api_version}"))["resources"])
        except ApiException:
            return False

    async def token(self, namespace: str) -> str:
        """Of an account without any rights."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/default/token"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        return (await self.request("post", path, body))["status"]["token"]

    @asynccontextmanager
    async def granted(self, namespace: str, accesses: set[Access]) -> AsyncIterator[None]:
        """The account `default` of that namespace may do these things, everywhere, and no others."""
        group = "rbac.authorization.k8s.io"
        metadata = {"name": namespace}
        subject = {"kind": "ServiceAccount", "name": "default", "namespace": namespace}
        rules = [{"apiGroups": [a.group], "resources": [a.resource], "verbs": [a.verb]} for a in accesses]
        reference = {"apiGroup": group, "kind": "ClusterRole", "name": namespace}
        made: dict[str, Object] = {
            "clusterroles": {"kind": "ClusterRole", "rules": rules},
            "clusterrolebindings": {"kind": "ClusterRoleBinding", "roleRef": reference, "subjects": [subject]},
        }
        for plural, body in made.items():
            whole = {"apiVersion": f"{group}/v1", "metadata": metadata} | body
            await self.request("post", f"/apis/{group}/v1/{plural}", whole)
        async with asyncio.timeout(30):
            while not all([await self._may(namespace, access) for access in accesses]):
                await asyncio.sleep(0.05)
        yield
        for plural in made:
            await self.request("delete", f"/apis/{group}/v1/{plural}/{namespace}")

    async def _may(self, namespace: str, access: Access) -> bool:
        resource, _, subresource = access.resource.partition("/")
        asked = {"group": access.group, "resource": resource, "subresource": subresource, "verb": access.verb}
        user = f"system:serviceaccount:{namespace}:default"
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "resourceAttributes": asked},
        }
        answer = await self.request("post", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return answer["status"]["allowed"]


@asynccontextmanager
async def admin_of(kubeconfig) -> AsyncIterator[Admin]:
    async with ApiClient(await configuration_of(kubeconfig)) as client:
        yield Admin(client)


@asynccontextmanager
async def api_of(configuration: Configuration, **options) -> AsyncIterator[ClusterApi]:
    async with ApiClient(configuration) as client:
        yield ClusterApi(client, **options)


@pytest.fixture(scope="module", autouse=True)
def custom_resource(kubeconfig) -> Iterator[None]:
    """A kind as our own, in a group of its own."""
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"

    async def make() -> None:
        async with admin_of(kubeconfig) as admin:
            await admin.request("post", definitions, CUSTOM_RESOURCE)
            async with asyncio.timeout(30):
                while not await admin.serves(CUSTOM):
                    await asyncio.sleep(0.1)

    async def remove() -> None:
        async with admin_of(kubeconfig) as admin:
            await admin.request("delete", f"{definitions}/{CUSTOM_RESOURCE['metadata']['name']}")

    asyncio.run(make())
    yield
    asyncio.run(remove())


@pytest.mark.parametrize("sentence", SENTENCES, ids=lambda sentence: sentence.__name__)
def test_real_server(kubeconfig, sentence: Sentence):
    async def main() -> None:
        async with admin_of(kubeconfig) as admin:
            await sentence(admin.api, await admin.namespace())

    asyncio.run(main())


@pytest.mark.parametrize("sentence", SENTENCES, ids=lambda sentence: sentence.__name__)
def test_the_permissions_that_the_fake_records_suffice_and_are_those_of_the_adapter(kubeconfig, tmp_path, sentence):
    async def main() -> None:
        fake = FakeKube()
        await sentence(fake, "default")
        async with admin_of(kubeconfig) as admin:
            namespace = await admin.namespace()
            content = yaml.safe_load(Path(kubeconfig).read_text())
            content["users"][0]["user"] = {"token": await admin.token(namespace)}
            (tmp_path / "config").write_text(yaml.safe_dump(content))
            configuration = await configuration_of(tmp_path / "config")
            async with (
                admin.granted(namespace, fake.accesses),
                api_of(configuration, rate=1000, burst=1000) as api,
            ):
                await sentence(api, namespace)
                assert api.accesses == fake.accesses

    asyncio.run(main())


@pytest.mark.parametrize(
    "change",
    [{"noSuchField": 1}, {"restartPolicy": "Sometimes"}],
    ids=["unknown field", "unknown word"],
)
def test_a_pod_template_that_cannot_be_is_invalid(kubeconfig, change):
    async def main() -> None:
        async with admin_of(kubeconfig) as admin:
            manifest = stateful_set(await admin.namespace())
            manifest["spec"]["template"]["spec"] |= change
            with pytest.raises(Invalid):
                await admin.api.apply(manifest)

    asyncio.run(main())


def test_a_variable_twice_is_invalid(kubeconfig):
    async def main() -> None:
        async with admin_of(kubeconfig) as admin:
            manifest = stateful_set(await admin.namespace())
            manifest["spec"]["template"]["spec"]["containers"][0]["env"] *= 2
            with pytest.raises(Invalid, match="duplicate entries"):
                await admin.api.apply(manifest)

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
@pytest.mark.parametrize("count", [15_000, 20_000, 40_000], ids=["etcd", "gRPC", "HTTP"])
def test_an_object_that_is_too_big_is_invalid(kubeconfig, count):
    async def main() -> None:
        async with admin_of(kubeconfig) as admin:
            manifest = stateful_set(await admin.namespace())
            env = [{"name": f"A{n}", "value": "x" * 64} for n in range(count)]
            manifest["spec"]["template"]["spec"]["containers"][0]["env"] = env
            with pytest.raises(Invalid, match="too large|larger than"):
                await admin.api.apply(manifest)

    asyncio.run(main())


def test_a_full_quota_is_told_from_a_missing_right(kubeconfig):
    async def main() -> None:
        async with admin_of(kubeconfig) as admin:
            namespace = await admin.namespace()
            quota = {
                "apiVersion": "v1",
                "kind": "ResourceQuota",
                "metadata": {"name": "none", "namespace": namespace},
                "spec": {"hard": {"pods": "0"}},
            }
            path = f"/api/v1/namespaces/{namespace}/resourcequotas"
            await admin.request("post", path, quota)
            # Of whichever version: controller-manager, where there is one, writes the same.
            known = quota | {"status": {"hard": {"pods": "0"}, "used": {"pods": "0"}}}
            await admin.request("put", f"{path}/none/status", known)
            with pytest.raises(QuotaExceeded):
                async with asyncio.timeout(30):
                    while True:  # the server reads its quotas from a watch of its own
                        await admin.api.create(pod(namespace), dry_run=True)

    asyncio.run(main())


def test_pod_security_is_forbidden_and_says_what(kubeconfig):
    async def main() -> None:
        async with admin_of(kubeconfig) as admin:
            namespace = await admin.namespace()
            labels = {"pod-security.kubernetes.io/enforce": "restricted"}
            found = await admin.request("get", f"/api/v1/namespaces/{namespace}")
            found["metadata"]["labels"] |= labels
            await admin.request("put", f"/api/v1/namespaces/{namespace}", found)
            with pytest.raises(Forbidden, match="allowPrivilegeEscalation"):
                await admin.api.create(pod(namespace), dry_run=True)

    asyncio.run(main())


def test_a_terminating_namespace_is_told(kubeconfig):
    async def main() -> None:
        async with admin_of(kubeconfig) as admin:
            namespace = await admin.namespace()
            held = config_map(namespace)
            held["metadata"]["finalizers"] = ["tba.dev/test"]
            held["metadata"]["name"] = "held"
            await admin.api.apply(held)
            await admin.request("delete", f"/api/v1/namespaces/{namespace}")
            with pytest.raises(NamespaceTerminating):
                await admin.api.apply(config_map(namespace))
            del held["metadata"]["finalizers"]
            await admin.api.apply(held)

    asyncio.run(main())


def test_a_rotated_token_of_a_pod_is_used(kubeconfig, tmp_path):
    async def main() -> None:
        async with admin_of(kubeconfig) as admin:
            namespace = await admin.namespace()
            token, authority = tmp_path / "token", tmp_path / "ca.crt"
            token.write_text("stale")
            authority.write_bytes(_authority(kubeconfig))
            host, port = admin.host.removeprefix("https://").rsplit(":", 1)
            environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
            loader = InClusterConfigLoader(str(token), str(authority), environ=environ)
            loader._token_refresh_period = timedelta(0)  # a minute
            configuration = Configuration()
            loader.load_and_set(configuration)
            await _is_used_once_it_changes(configuration, token, await admin.token(namespace))

    asyncio.run(main())


def test_a_rotated_token_of_a_kubeconfig_is_used(kubeconfig, tmp_path):
    async def main() -> None:
        async with admin_of(kubeconfig) as admin:
            namespace = await admin.namespace()
            token = tmp_path / "token"
            token.write_text("stale")
            content = yaml.safe_load(Path(kubeconfig).read_text())
            content["users"][0]["user"] = {"tokenFile": str(token)}
            (tmp_path / "config").write_text(yaml.safe_dump(content))
            configuration = await configuration_of(tmp_path / "config", reload_seconds=0)
            await _is_used_once_it_changes(configuration, token, await admin.token(namespace))

    asyncio.run(main())


async def _is_used_once_it_changes(configuration: Configuration, file, token: str) -> None:
    async with api_of(configuration) as api:
        with pytest.raises(Unavailable, match="401"):
            await api.get(Ref("v1", "ConfigMap", "default", "x"))
        file.write_text(token)
        with pytest.raises(Forbidden, match="system:serviceaccount"):
            await api.get(Ref("v1", "ConfigMap", "default", "x"))


def test_an_outage_of_the_server_is_unavailable_and_then_over(kubeconfig):
    async def main() -> None:
        async with admin_of(kubeconfig) as admin:
            namespace = await admin.namespace()
            host, port = admin.host.removeprefix("https://").rsplit(":", 1)
            async with Relay(host, int(port)) as relay:
                configuration = await configuration_of(kubeconfig)
                configuration.host = f"https://127.0.0.1:{relay.port}"
                async with api_of(configuration) as api:
                    await api.apply(config_map(namespace, a="1"))
                    await relay.stop()
                    with pytest.raises(Unavailable):
                        await api.apply(config_map(namespace, a="2"))
                    await relay.start()
                    await api.apply(config_map(namespace, a="3"))

    asyncio.run(main())


def _authority(kubeconfig) -> bytes:
    content = yaml.safe_load(Path(kubeconfig).read_text())
    return base64.b64decode(content["clusters"][0]["cluster"]["certificate-authority-data"])
