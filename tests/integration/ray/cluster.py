"""A Ray cluster of several nodes on this machine, in a network of its own.

Ray listens at all addresses of a machine, and a node has one of them. So all of it is in a network namespace (`make
test-ray` makes it), where each node has an address, nobody else can call it, and it can call nobody.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import serve

from tests.support.processes import descendants, gone

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
START_SECONDS = 120
STORE_BYTES = 80 << 20  # Ray's least is 75 MiB

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # other programs of this machine may need its memory meanwhile
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING": "0",  # as docs/deploying.md has it
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "OMP_NUM_THREADS": "1",
}
NODES = 3
"""Most that are started, the lost ones included."""
ADDRESS = "10.213.8.{}"
GCS = f"{ADDRESS.format(1)}:6379"
URL = "http://127.0.0.1:8000"
MARK = "NXD_TEST_CLUSTER"
"""A variable by which every process of a cluster can be found, whoever its parent is."""


def set_up_network() -> None:
    """Give each node an address. Fails outside a namespace of ours: this machine's network is not to be changed."""
    links = json.loads(subprocess.run(["ip", "-j", "link"], check=True, capture_output=True).stdout)
    assert [link["ifname"] for link in links] == ["lo"], "`make test-ray` runs these, in a network of their own"
    addresses = [f"address add {ADDRESS.format(number)}/24 dev lo" for number in range(1, NODES + 1)]
    for command in ["link set lo up", *addresses]:
        subprocess.run(["ip", *command.split()], check=True, timeout=30)


class Node:
    """`ray start`, and all processes below it."""

    def __init__(self, cluster: Cluster, address: str, *arguments: str):
        command = [
            *(BIN / "ray", "start", "--block", f"--node-ip-address={address}", "--num-gpus=0"),
            *(f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats", *arguments),
        ]
        self.address = address
        self._log = (cluster.directory / f"{address}-{time.monotonic_ns()}.log").open("w+")
        self.process = subprocess.Popen(
            command, env=cluster.environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def kill(self) -> None:
        """As a machine that loses power: every process at once, without a word."""
        pids = {self.process.pid, *descendants(self.process.pid)}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(120)
        self._log.close()
        assert all(gone(pid, 120) for pid in pids)


class Cluster:
    """A head with the proxy, further nodes, and this process as a driver."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="nxd-ray-", dir="/tmp"))  # short: sockets are made below
        self.environment = {**os.environ, **ENVIRONMENT, MARK: str(self.directory)}
        self.nodes: list[Node] = []
        self._addresses = (ADDRESS.format(number) for number in range(1, NODES + 1))

    def __enter__(self) -> Cluster:
        set_up_network()
        return self

    def start_head(self, *arguments: str) -> None:
        address = next(self._addresses)
        options = ("--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={self.directory}/ray")
        self.nodes.append(Node(self, address, *options, *arguments))
        os.environ.update(ENVIRONMENT)
        self.wait(self._connects)

    def _connects(self) -> bool:
        with contextlib.suppress(ConnectionError):
            ray.init(address=GCS, namespace="serve", _node_ip_address=ADDRESS.format(1), log_to_driver=False)
        return ray.is_initialized()

    def start_node(self, *arguments: str) -> None:
        self.nodes.append(Node(self, next(self._addresses), f"--address={GCS}", *arguments))
        self.wait(lambda: sum(node["Alive"] for node in ray.nodes()) == len(self.nodes))

    def wait(self, condition: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        """Until it holds; no longer than the nodes run."""
        end = time.monotonic() + seconds
        while not condition():
            for node in self.nodes:
                assert node.process.poll() is None and time.monotonic() < end, node.log()[-3000:]
            time.sleep(0.25)

    def lose(self, node: Node) -> None:
        self.nodes.remove(node)
        node.kill()

    def deploy(self, config: dict[str, Any]) -> None:
        """As a user does: `serve run`, which returns once Ray Serve has the file."""
        file = self.directory / "serve.yaml"
        file.write_text(json.dumps(config))
        done = subprocess.run(
            [BIN / "serve", "run", "--non-blocking", f"--address={GCS}", file],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
        )
        assert done.returncode == 0, done.stderr[-3000:]

    def wait_running(self, replicas: int) -> None:
        """Until the application has so many replicas, and no others."""

        def running() -> bool:
            application = serve.status().applications["nxd-infer"]
            assert application.status != "DEPLOY_FAILED", application
            (deployment,) = application.deployments.values() or [None]
            states = {} if deployment is None else {s: n for s, n in deployment.replica_states.items() if n}
            return application.status == "RUNNING" and states == {"RUNNING": replicas}

        self.wait(running)

    def processes(self) -> dict[int, str]:
        """Those that run, of this cluster's nodes or once started by one, with their names."""
        found = {}
        mark = f"{MARK}={self.directory}\0".encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it has ended, or is none
                if mark in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "comm").read_text().strip()
        return found

    def ranks(self) -> list[int]:
        return [pid for pid, name in self.processes().items() if name.startswith("nxd rank")]

    def __exit__(self, *error: object) -> None:
        ray.shutdown()
        for node in reversed(self.nodes):
            node.kill()
        shutil.rmtree(self.directory, ignore_errors=True)
