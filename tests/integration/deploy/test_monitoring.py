"""Dashboard, alerts and autoscalers ask for what the server measures, under our names and vLLM's."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.deploy.test_files import KUBERNETES, rendered
from tests.support.http.http_servers import toy_server

FOLDER = KUBERNETES / "components/monitoring"
OF_VLLM = """
num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens_total generation_tokens_total
request_success_total time_to_first_token_seconds_bucket time_per_output_token_seconds_bucket
inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket request_queue_time_seconds_sum
request_prefill_time_seconds_sum request_decode_time_seconds_sum request_prompt_tokens_bucket
request_generation_tokens_bucket prefix_cache_hits_total prefix_cache_queries_total
"""
"""What vLLM's own dashboard and its documents name."""


@pytest.fixture(scope="module")
def samples():
    """The samples of a server that has answered and refused, by name."""
    with toy_server(served_model_name='a "model"') as server:
        body = {"prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        assert server.post("/v1/completions", body).status_code == 200
        text = server.get("/metrics").text
    found: dict[str, list] = {}
    for family in text_string_to_metric_families(text):
        found.setdefault(family.name + "_total" * (family.type == "counter"), [])  # a counter of labels may have none
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def expressions():
    for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["spec"]["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    yield (
        "KEDA",
        yaml.safe_load((KUBERNETES / "components/keda/scaled-object.yaml").read_text())["spec"]["triggers"][0][
            "metadata"
        ]["query"],
    )
    yield "HPA", (KUBERNETES / "base/autoscaler.yaml").read_text()


def test_every_metric_and_label_that_is_asked_for_is_measured(samples):
    labels = {"instance"}.union(*(sample.labels for several in samples.values() for sample in several))
    labels |= {"reason", "status"}  # of counters without a sample yet
    for title, text in expressions():
        names = set(re.findall(r"\b(?:nxd_|vllm:)\w+", text))
        assert names and names <= samples.keys(), (title, names - samples.keys())
        grouped = {name.strip() for by in re.findall(r"by \(([^)]*)\)", text) for name in by.split(",")}
        selected = set(re.findall(r"(\w+)=~?\"", text))
        assert grouped | selected <= labels, (title, (grouped | selected) - labels)
        assert text.count("(") == text.count(")") and text.count("{") == text.count("}"), title


def test_vllms_names_have_the_values_of_ours(samples):
    assert {f"vllm:{name}" for name in OF_VLLM.split()} <= samples.keys()
    assert all(one.labels["model_name"] == 'a "model"' for several in samples.values() for one in several)
    assert samples["vllm:generation_tokens_total"][0].value == 5
    assert samples["vllm:time_per_output_token_seconds_count"][0].value == 4
    assert samples["vllm:request_prompt_tokens_sum"][0].value == 5
    for name in OF_VLLM.split():
        if f"nxd_{name}" in samples:
            ours = [(one.labels, one.value) for one in samples[f"nxd_{name}"]]
            assert [(one.labels, one.value) for one in samples[f"vllm:{name}"]] == ours, name


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_the_monitor_selects_the_service(tmp_path: Path):
    shutil.copytree(KUBERNETES, tmp_path / "k")
    file = tmp_path / "k/overlays/cpu/kustomization.yaml"
    file.write_text(file.read_text() + "components:\n  - ../../components/monitoring\n")
    found = rendered(file.parent)
    monitor, service = found["ServiceMonitor"]["spec"], found["Service"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert found["PrometheusRule"]["spec"]["groups"][0]["rules"]


def test_the_monitor_says_how_prometheus_gets_a_key():
    text = (FOLDER / "service-monitor.yaml").read_text()
    (endpoint,) = yaml.safe_load(text.replace("# authorization:", "authorization:"))["spec"]["endpoints"]
    assert endpoint["authorization"] == {"credentials": {"name": "nxd-infer-metrics", "key": "key"}}
