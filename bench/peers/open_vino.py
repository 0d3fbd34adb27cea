"""OpenVINO GenAI's ContinuousBatchingPipeline: weights stored in float16, or in fewer bits, arithmetic in bfloat16."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from bench.peers.protocol import serve


class OpenVino:
    def __init__(self, model: str, threads: int, form: str = "fp16"):
        directory = Path(model).with_name(f"{Path(model).name}-openvino-{form}")
        done = directory / "openvino_model.xml"
        if not done.exists() or done.stat().st_mtime < (Path(model) / "model.safetensors").stat().st_mtime:
            convert(Path(model), directory, form)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.max_num_seqs = 16
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": threads}
        self.pipe = openvino_genai.ContinuousBatchingPipeline(str(directory), scheduler, "CPU", properties)
        self.version = f"openvino-genai {openvino_genai.__version__}"
        self._requests = 0

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
        tokens: list[list[int]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        begin = time.perf_counter()
        handles = []
        for prompt in prompts:
            self._requests += 1
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self.pipe.add_request(self._requests, ids, config))
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
            for row, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens[row] += output.generated_ids
                        times[row] += [time.perf_counter() - begin] * len(output.generated_ids)
        return {"tokens": tokens, "times": times}


def convert(model: Path, directory: Path, form: str) -> None:
    """Convert the model to OpenVINO's format with optimum-intel, with weights as its ``--weight-format`` says."""
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", str(model)]
    command += ["--task", "text-generation-with-past", "--weight-format", form, str(directory)]
    subprocess.run(command, check=True, timeout=540, stdout=sys.stderr)


def main() -> None:
    serve(OpenVino)
