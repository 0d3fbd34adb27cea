"""A Ray cluster of several nodes on this machine, each with a loopback address of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from ray import serve

from tests.processes import command_of, descendants, gone

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
START_SECONDS = 120
STORE_BYTES = 80 << 20  # Ray's least is 75 MiB

ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "deploy/ray", ROOT, ROOT / "server", ROOT / "models"))),
    "PATH": os.pathsep.join([str(BIN), os.environ["PATH"]]),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # other programs of this machine may need its memory meanwhile
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "OMP_NUM_THREADS": "1",
}
MARK = "NXD_TEST_CLUSTER"
"""A variable by which every process of a cluster can be found, whoever its parent is."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
        self.process.wait(10)
        self._log.close()
        assert all(gone(pid, 10) for pid in pids)


class Cluster:
    """A head with the proxy, further nodes, and this process as a driver."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="nxd-ray-", dir="/tmp"))  # short: sockets are made below
        self.environment = {**os.environ, **ENVIRONMENT, MARK: str(self.directory)}
        self.gcs = f"127.0.0.1:{free_port()}"
        self.port = free_port()
        self.nodes: list[Node] = []
        self._last = 1

    def __enter__(self) -> Cluster:
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start_head(self, *arguments: str) -> Node:
        port = self.gcs.rpartition(":")[2]
        options = ("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self.directory}/ray")
        head = self._started("127.0.0.1", *options, *arguments)
        os.environ.update(ENVIRONMENT)
        ray.init(address=self.gcs, namespace="serve", _node_ip_address="127.0.0.1", log_to_driver=False)
        return head

    def start_node(self, *arguments: str) -> Node:
        self._last += 1
        return self._started(f"127.0.0.{self._last}", f"--address={self.gcs}", *arguments)

    def _started(self, address: str, *arguments: str) -> Node:
        node = Node(self, address, *arguments)
        self.nodes.append(node)
        command = [BIN / "ray", "status", f"--address={self.gcs}"]
        end = time.monotonic() + START_SECONDS
        while True:
            done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
            if done.returncode == 0 and done.stdout.count("node_") >= len(self.nodes):
                return node
            assert node.process.poll() is None and time.monotonic() < end, node.log()[-3000:]
            time.sleep(0.5)

    def lose(self, node: Node) -> None:
        self.nodes.remove(node)
        node.kill()

    def deploy(self, config: dict[str, Any]) -> None:
        """As a user does: `serve run`, which returns once Ray Serve has the file."""
        file = self.directory / "serve.yaml"
        file.write_text(json.dumps(config))
        done = subprocess.run(
            [BIN / "serve", "run", "--non-blocking", f"--address={self.gcs}", file],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
        )
        assert done.returncode == 0, done.stderr[-3000:]

    def wait_running(self, replicas: int, seconds: float = START_SECONDS) -> None:
        """Until the application has so many replicas, and no others."""
        end = time.monotonic() + seconds
        while True:
            application = serve.status().applications["nxd-infer"]
            states = {}
            for deployment in application.deployments.values():
                states = {str(state): count for state, count in deployment.replica_states.items() if count}
            if application.status == "RUNNING" and list(states.values()) == [replicas]:
                return
            assert application.status != "DEPLOY_FAILED" and time.monotonic() < end, (states, application)
            time.sleep(0.25)

    def processes(self) -> dict[int, str]:
        """Those that run, of this cluster's nodes or once started by one: what they are."""
        found = {}
        mark = f"{MARK}={self.directory}\0".encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it has ended, or is none
                if mark in (entry / "environ").read_bytes():
                    found[int(entry.name)] = command_of(int(entry.name))
        return found

    def __exit__(self, *error: object) -> None:
        ray.shutdown()
        for node in reversed(self.nodes):
            node.kill()
        shutil.rmtree(self.directory, ignore_errors=True)
