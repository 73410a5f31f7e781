"""How large the operator gets: many TBAJobs on a real API server, with nodes and pods that kwok simulates.

As root. Brings up a control plane of its own (`make cluster-build`, tests/cluster/companions/kwok/build.sh), runs the
operator as a process of this machine, and ends both. From creation to the end in five parts:

    create ─▶ all ready ─▶ nothing changes ─▶ progress, changes by users ─▶ operator restarted ─▶ more searchers

PYTHONPATH=workloads:operator:tests python tests/bench/bench_operator.py --jobs 1000 --searchers 8 --more-searchers 10
"""

import argparse
import asyncio
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from operator_cluster import Api, Trainers, cluster, connect
from prometheus_client.parser import text_string_to_metric_families
from results import Row, record, table, write
from support.jobs import smallest
from support.kube_cluster import KubeCluster

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "docs" / "results" / "operator.json"
JOBS_A_NAMESPACE = 100
JOBS = "/apis/tba.dev/v1alpha1/tbajobs"
SETS = "/apis/apps/v1/statefulsets"
OURS = "tba.dev/job-name"
CHILDREN = (
    SETS,
    "/apis/batch/v1/jobs",
    "/api/v1/configmaps",
    "/api/v1/services",
    "/api/v1/serviceaccounts",
    "/apis/networking.k8s.io/v1/networkpolicies",
    "/apis/policy/v1/poddisruptionbudgets",
)
READS = ("get", "list", "discover")
RESYNC_SECONDS = 60.0
IDLE_SECONDS = 90.0
CREATED_AT_ONCE = 20
LATE_JOBS = 20
SCALES_A_SECOND = 2.0
STARTS_A_SECOND = 0.5
"""Each makes or ends ten pods, work for the rest of the cluster that has the same processors here."""
PATIENCE_SECONDS = 60.0


class Operator:
    """The process; its memory and what it says of itself."""

    def __init__(self, kubeconfig: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        environment = {
            "KUBECONFIG": str(kubeconfig),
            "PYTHONPATH": f"{ROOT}/workloads:{ROOT}/operator",
            "TBA_NAMESPACE": "default",
            "TBA_TRAINER_IMAGE": "trainer:1",
            "TBA_SEARCHER_IMAGE": "searcher:1",
            "TBA_HTTP_PORT": str(self._port),
            "TBA_RESYNC_SECONDS": str(RESYNC_SECONDS),
        }
        self.started = time.monotonic()
        with log.open("ab") as file:
            command = [sys.executable, "-m", "tba_operator"]
            self.process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=file, stderr=file)

    async def scrape(self) -> "Scrape":
        """Its metrics now."""
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{self._port}/metrics") as answer:
            return Scrape(await answer.text(), self.memory("VmRSS"), self.memory("VmHWM"))

    async def leads(self) -> bool:
        """Whether it has begun."""
        try:
            return (await self.scrape()).sum("tba_leader") == 1
        except OSError:
            return False

    def memory(self, what: str) -> float:
        """MB of VmRSS (now) or VmHWM (at most so far)."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(f"{what}:"))

    def stop(self) -> None:
        """As a pod is stopped."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(15)


@dataclass(frozen=True, slots=True)
class Scrape:
    """What the operator said at one moment."""

    text: str
    rss: float
    peak: float
    at: float = field(default_factory=time.monotonic)

    def sum(self, name: str, **labels: Iterable[str]) -> float:
        """Over all series of a name whose labels are among those given."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.text)
            for sample in family.samples
            if sample.name == name and all(sample.labels[k] in v for k, v in labels.items())
        )

    @property
    def passes(self) -> float:
        return self.sum("tba_reconcile_seconds_count")

    @property
    def cpu(self) -> float:
        return self.sum("process_cpu_seconds_total")

    @property
    def waiting(self) -> float:
        return self.sum("tba_queue_depth")

    @property
    def writes(self) -> dict[tuple[str, str], float]:
        """(verb, kind) -> requests that may change something, Leases aside."""
        found: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(self.text):
            for sample in family.samples:
                if sample.name == "tba_api_requests_total":
                    key = (sample.labels["verb"], sample.labels["kind"])
                    if key[0] not in READS and key[1] != "Lease":
                        found[key] = found.get(key, 0) + sample.value
        return found

    def buckets(self) -> dict[float, float]:
        """Of passes, by seconds."""
        families = text_string_to_metric_families(self.text)
        samples = (sample for family in families for sample in family.samples)
        return {float(s.labels["le"]): s.value for s in samples if s.name == "tba_reconcile_seconds_bucket"}


def pass_quantile(before: Scrape, after: Scrape, share: float) -> float:
    """Seconds within which that share of the passes between two scrapes ended, linear within a bucket."""
    old = before.buckets()
    counts = sorted((edge, count - old.get(edge, 0)) for edge, count in after.buckets().items())
    wanted = share * counts[-1][1]
    low, below = 0.0, 0.0
    for edge, count in counts:
        if count >= wanted:
            return low if edge == float("inf") else low + (edge - low) * (wanted - below) / max(count - below, 1e-9)
        low, below = edge, count
    return low


@dataclass(slots=True)
class Bench:
    """One run."""

    api: Api
    found: KubeCluster
    trainers: Trainers
    jobs: list[tuple[str, str]]
    """(namespace, name)"""
    searchers: int
    samples: int
    rows: list[Row] = field(default_factory=list)
    load: str = ""

    async def create(self, job: tuple[str, str]) -> None:
        manifest = smallest(searcher={"replicas": self.searchers})
        manifest["metadata"] = {"namespace": job[0], "name": job[1]}
        await self.api.send("POST", path_of(job).rpartition("/")[0], manifest)

    def row(self, metric: str, value: float, unit: str, **more: object) -> None:
        note = f"{self.load}; {more.pop('note')}" if "note" in more else self.load
        self.rows.append(record("scale", "operator", metric, value, unit, note=note, **more))  # pyright: ignore
        print(f"{time.strftime('%H:%M:%S')}  {metric}: {value:.4g} {unit}  {note}", flush=True)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def path_of(job: tuple[str, str]) -> str:
    return f"/apis/tba.dev/v1alpha1/namespaces/{job[0]}/tbajobs/{job[1]}"


async def until(what: str, probe: Callable[[], Awaitable[bool]], *, seconds: float, every: float = 2.0) -> float:
    """Seconds until it was so. Raises: TimeoutError."""
    started = time.monotonic()
    while not await probe():
        if time.monotonic() - started > seconds:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        await asyncio.sleep(every)
    return time.monotonic() - started


# -- the parts


async def create(bench: Bench, operator: Operator, patience: float) -> None:
    """All jobs at once, as fast as the API server takes them, until every status says that all of it is ready."""
    before = await operator.scrape()
    started = time.monotonic()
    slots = asyncio.Semaphore(CREATED_AT_ONCE)

    async def one(job: tuple[str, str]) -> None:
        async with slots:
            await bench.create(job)

    await asyncio.gather(*(one(job) for job in bench.jobs))
    say(f"{len(bench.jobs)} jobs created in {time.monotonic() - started:.0f} s")
    await all_ready(bench, bench.searchers, patience)
    took = time.monotonic() - started
    after = await operator.scrape()
    note = f"{sum(after.writes.values()) - sum(before.writes.values()):,.0f} writes of the operator, "
    note += f"{after.passes - before.passes:,.0f} passes, {after.cpu - before.cpu:.0f} s of processor time"
    bench.row("created at once: all Running, all searchers ready", took, "s", note=note)
    bench.row("created at once: a pass, 99 %", pass_quantile(before, after, 0.99), "s")


async def all_ready(bench: Bench, searchers: int, patience: float) -> None:
    """Every job's status says so."""
    told = time.monotonic()

    async def probe() -> bool:
        nonlocal told
        ready = running = 0
        async for job in bench.api.list(JOBS):
            status = job.get("status") or {}
            running += status.get("phase") == "Running"
            ready += status.get("searcher", {}).get("readyReplicas", 0)
        if time.monotonic() - told > 20:
            told = time.monotonic()
            say(f"  {running} running, {ready} searchers ready")
        return running == len(bench.jobs) and ready == searchers * len(bench.jobs)

    await until("all ready", probe, seconds=patience, every=5.0)


async def settle(bench: Bench, operator: Operator) -> None:
    """Until nothing has been written for ten seconds; every trainer is heard once more first, ten a second."""
    jobs, heard = len(bench.jobs), bench.trainers.asked
    last, since = await operator.scrape(), time.monotonic()
    started = since
    while time.monotonic() - since < 10 or bench.trainers.asked - heard < 1.2 * jobs:
        await asyncio.sleep(2)
        now = await operator.scrape()
        if now.writes != last.writes or now.waiting:
            last, since = now, time.monotonic()
        if time.monotonic() - started > 2 * RESYNC_SECONDS + 0.2 * jobs:
            raise TimeoutError(f"still writing: {now.writes}")


async def versions(api: Api) -> dict[str, str]:
    """uid -> resourceVersion of all jobs and their children, pods aside."""
    found: dict[str, str] = {}
    for path in (JOBS, *CHILDREN):
        async for item in api.list(path, "" if path == JOBS else OURS, only_metadata=True):
            found[item["metadata"]["uid"]] = item["metadata"]["resourceVersion"]
    return found


async def idle(bench: Bench, operator: Operator) -> None:
    """Progress is read and stays the same; every job is looked at again once a minute."""
    await settle(bench, operator)
    objects, before, asked = await versions(bench.api), await operator.scrape(), bench.trainers.asked
    await asyncio.sleep(IDLE_SECONDS)
    after, now = await operator.scrape(), await versions(bench.api)
    changed = sum(1 for uid in objects.keys() | now.keys() if objects.get(uid) != now.get(uid))
    minutes = (after.at - before.at) / 60
    passes = after.passes - before.passes
    note = f"{minutes:.1f} minutes, {passes:,.0f} passes, {bench.trainers.asked - asked:,} reads of /progress"
    written = {key: count - before.writes.get(key, 0) for key, count in after.writes.items()}
    note += "".join(f", {count:g} x {' '.join(key)}" for key, count in written.items() if count)
    bench.row("nothing changes: writes", sum(written.values()), "requests", target="== 0", note=note)
    bench.row("nothing changes: changed objects", changed, "objects", target="== 0", note=f"of {len(objects):,}")
    share = (after.cpu - before.cpu) / (after.at - before.at)
    bench.row("nothing changes: processor", share, "cores", note=f"each job looked at every {RESYNC_SECONDS:.0f} s")
    bench.row("nothing changes: a pass, 99 %", pass_quantile(before, after, 0.99), "s")


@dataclass(slots=True)
class Effects:
    """When StatefulSets got which size, seen by a watch."""

    seen: dict[tuple[str, str], list[tuple[float, int]]] = field(default_factory=dict)

    async def follow(self, api: Api) -> None:
        async for found in api.watch(SETS, OURS):
            metadata = found["metadata"]
            key = (metadata["namespace"], metadata["labels"][OURS])
            self.seen.setdefault(key, []).append((time.monotonic(), found["spec"]["replicas"]))

    async def seconds(self, job: tuple[str, str], size: int, since: float) -> float:
        """From `since` until the job's StatefulSet had that size."""
        while time.monotonic() - since < PATIENCE_SECONDS:
            for at, replicas in self.seen.get(job, ()):
                if at >= since and replicas == size:
                    return at - since
            await asyncio.sleep(0.02)
        raise TimeoutError(f"{job}: not {size} searchers within {PATIENCE_SECONDS:.0f} s")


async def changes(bench: Bench, operator: Operator) -> None:
    """Users scale, suspend and resume jobs while all trainers make progress."""
    bench.trainers.move()
    before, asked = await operator.scrape(), bench.trainers.asked
    effects = Effects()
    following = asyncio.create_task(effects.follow(bench.api))
    await asyncio.sleep(1)
    chosen = random.Random(0).sample(bench.jobs, min(bench.samples, len(bench.jobs)))
    few = chosen[: max(1, len(chosen) // 4)]
    late = [(bench.jobs[0][0], f"late-{number}") for number in range(LATE_JOBS)]
    more, less = bench.searchers + 1, bench.searchers

    def change(**spec: object) -> Callable[[tuple[str, str]], Awaitable[object]]:
        return lambda job: bench.api.merge(path_of(job), {"spec": spec})

    try:
        for what, jobs, do, size, rate in (
            ("scaled", chosen, change(searcher={"replicas": more}), more, SCALES_A_SECOND),
            ("scaled", chosen, change(searcher={"replicas": less}), less, SCALES_A_SECOND),
            ("suspended", few, change(suspend=True), 0, STARTS_A_SECOND),
            ("resumed", few, change(suspend=False), less, STARTS_A_SECOND),
            ("created", late, bench.create, less, STARTS_A_SECOND),
        ):
            taken = await sampled(effects, jobs, do, size, rate)
            busy = f"machine's load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
            bench.row(
                f"{what}, {size} searchers: done at the StatefulSet, 99 %",
                quantile(taken, 0.99),
                "s",
                target="<= 1",
                runs=taken,
                note=f"{len(taken)} jobs, {rate:g} a second; median {statistics.median(taken):.3f} s; {busy}",
            )
            await settle_changes(operator)
        await remove(bench, late)
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
    after = await operator.scrape()
    bench.row("changes and progress: a pass, 99 %", pass_quantile(before, after, 0.99), "s", target="<= 1")
    await progress(bench, operator)
    say(f"{bench.trainers.asked - asked:,} reads of /progress")
    bench.trainers.stand()


async def settle_changes(operator: Operator) -> None:
    """Until the queue is empty at a look."""

    async def empty() -> bool:
        return (await operator.scrape()).waiting == 0

    await until("an empty queue", empty, seconds=PATIENCE_SECONDS)
    await asyncio.sleep(5)


async def sampled(
    effects: Effects,
    jobs: list[tuple[str, str]],
    do: Callable[[tuple[str, str]], Awaitable[object]],
    size: int,
    rate: float,
) -> list[float]:
    """Seconds of each job from the change's request to its effect."""

    async def one(number: int, job: tuple[str, str]) -> float:
        await asyncio.sleep(number / rate)
        since = time.monotonic()
        await do(job)
        return await effects.seconds(job, size, since)

    return await asyncio.gather(*(one(number, job) for number, job in enumerate(jobs)))


async def remove(bench: Bench, jobs: list[tuple[str, str]]) -> None:
    """Until nothing is left of them."""
    for job in jobs:
        await bench.api.send("DELETE", path_of(job), {"propagationPolicy": "Foreground"})

    async def gone() -> bool:
        return len([job async for job in bench.api.list(JOBS, only_metadata=True)]) == len(bench.jobs)

    await until("late jobs gone", gone, seconds=120)


def quantile(values: list[float], share: float) -> float:
    """The smallest value that is not less than that share of them."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def progress(bench: Bench, operator: Operator) -> None:
    """Nothing but progress changes, at every trainer, all the time."""
    before, asked = await operator.scrape(), bench.trainers.asked
    await asyncio.sleep(IDLE_SECONDS / 2)
    after = await operator.scrape()
    seconds = after.at - before.at
    written = {key: count - before.writes.get(key, 0) for key, count in after.writes.items()}
    rest = sum(count for key, count in written.items() if key != ("apply_status", "TBAJob"))
    reads = bench.trainers.asked - asked
    note = f"{reads / seconds:.1f} reads of /progress a second; "
    note += f"{(after.cpu - before.cpu) / seconds:.2f} cores"
    rate = written.get(("apply_status", "TBAJob"), 0) / max(reads, 1)
    bench.row("progress moves: status writes a read", rate, "writes", target="<= 1.05", note=note)
    bench.row("progress moves: other writes", rest, "requests", target="== 0")


async def restart(bench: Bench, operator: Operator, log: Path, searchers: int, limit: float) -> Operator:
    """A new process on what is there: it looks at everything and has nothing to do."""
    await settle(bench, operator)
    objects = await versions(bench.api)
    operator.stop()
    new = Operator(bench.found.kubeconfig, log)

    async def through() -> bool:
        try:
            now = await new.scrape()
        except OSError:
            return False
        return now.passes >= len(bench.jobs) and now.waiting == 0

    await until("every job looked at", through, seconds=300, every=0.5)
    took = time.monotonic() - new.started
    await asyncio.sleep(20)  # the watch workers of kopf end after 5 s
    found, now = await new.scrape(), await versions(bench.api)
    changed = sum(1 for uid in objects.keys() | now.keys() if objects.get(uid) != now.get(uid))
    pods = (searchers + 1) * len(bench.jobs)
    note = f"{found.cpu:.1f} s of processor time, {pods:,} pods listed"
    bench.row("cold start: every job looked at", took, "s", note=note)
    bench.row("cold start: writes", sum(found.writes.values()), "requests", target="== 0", note=f"{changed} changed")
    bench.row("cold start: peak memory", found.peak, "MB", target=f"<= {limit:g}", note=f"then {found.rss:.0f} MB")
    return new


async def grow(bench: Bench, operator: Operator, searchers: int, patience: float) -> None:
    """Every job gets more searchers at once."""
    started = time.monotonic()
    slots = asyncio.Semaphore(CREATED_AT_ONCE)

    async def one(job: tuple[str, str]) -> None:
        async with slots:
            await bench.api.merge(path_of(job), {"spec": {"searcher": {"replicas": searchers}}})

    await asyncio.gather(*(one(job) for job in bench.jobs))

    async def scaled() -> bool:
        return all([found["spec"]["replicas"] == searchers async for found in bench.api.list(SETS, OURS)])

    await until("all scaled", scaled, seconds=patience)
    took = time.monotonic() - started
    bench.row(f"all scaled to {searchers} at once: all StatefulSets", took, "s")
    await all_ready(bench, searchers, patience)
    memory(bench, operator, 500)


def memory(bench: Bench, operator: Operator, limit: float) -> None:
    """Now, after whatever was done before."""
    peak = f"{operator.memory('VmHWM'):.0f} MB at most so far"
    bench.row("memory", operator.memory("VmRSS"), "MB", target=f"<= {limit:g}", note=peak)


def load(jobs: int, searchers: int) -> str:
    return f"{jobs:,} jobs x {searchers} searchers ({jobs * searchers:,} + {jobs:,} pods)"


async def run(options: argparse.Namespace, found: KubeCluster, log: Path) -> list[Row]:
    """All parts, or as many as go well: what was measured before a failure is returned."""
    jobs = [(f"bench-{n // JOBS_A_NAMESPACE}", f"job-{n}") for n in range(options.jobs)]
    for namespace in dict.fromkeys(namespace for namespace, _ in jobs):
        found.kubectl("create", "namespace", namespace)
    async with connect(found.kubeconfig) as api:
        trainers = Trainers(api)
        bench = Bench(api, found, trainers, jobs, options.searchers, options.samples)
        bench.load = load(len(jobs), options.searchers)
        operator = Operator(found.kubeconfig, log)
        try:
            async with trainers.serve():
                await until("a leader", operator.leads, seconds=60)
                say(f"operator without jobs: {operator.memory('VmRSS'):.0f} MB")
                await create(bench, operator, options.patience)
                memory(bench, operator, 300)
                await idle(bench, operator)
                await changes(bench, operator)
                operator = await restart(bench, operator, log, options.searchers, 300)
                if options.more_searchers:
                    bench.load = load(len(jobs), options.more_searchers)
                    await grow(bench, operator, options.more_searchers, options.patience)
                    operator = await restart(bench, operator, log, options.more_searchers, 500)
        except TimeoutError as error:
            say(f"ended early: {error}")
        finally:
            operator.process.terminate()
            operator.process.wait(15)
    return bench.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--searchers", type=int, default=8, help="of each job")
    parser.add_argument("--more-searchers", type=int, default=10, help="of each job in the last part; 0: without it")
    parser.add_argument("--samples", type=int, default=100, help="jobs that are scaled; a quarter of them is suspended")
    parser.add_argument("--patience", type=float, default=900, help="seconds until all pods must be ready")
    parser.add_argument("-o", "--output", type=Path, help="write the rows as JSON")
    parser.add_argument("--log", type=Path, default=Path("/tmp/bench_operator.log"), help="the operator's own")
    options = parser.parse_args()
    options.log.unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # told to end, it still removes its cluster
    with cluster() as found:
        rows = asyncio.run(run(options, found, options.log))
    print(table(rows))
    if options.output:
        write(rows, options.output)


if __name__ == "__main__":
    main()
