"""The files that take longest, the longest first: `make test` begins with them.

pytest-xdist gives whole files to a few processes as these become free. A long one that is begun last would leave the
others without work. A file that is missing here costs balance alone, and so does one in the wrong place.
"""

from __future__ import annotations

LONGEST = [
    "xla/test_families",
    "xla/test_lowering",
    "xla/test_serving",
    "neuron/test_user_script",
    "xla/test_training",
    "xla/test_traps",
    "models/test_generic_decoders",
    "models/test_traced_llama",
    "models/test_t5",
    "backends/test_every_backend",
    "pipeline/test_equivalence",
    "pipeline/test_hugging_face",
    "backends/test_device_passes",
    "http/test_lost_ranks",
    "distributed/test_apply",
    "backends/test_packed_weights",
    "engine/test_speculation",
    "models/test_adapter_slots",
    "runtime/test_faults",
    "backends/test_inductor",
    "http/test_real_generate",
    "trace/test_func_mode",
    "e2e/test_cli",
    "comm/test_compiled_collectives",
    "e2e/test_quantize",
    "e2e/test_soak",
    "e2e/test_train_recipe",
    "backends/test_joined_linears",
    "comm/test_native",
    "trace/test_recompile",
    "seeds/test_tracing",
    "seeds/test_training",
    "e2e/test_readme",
    "e2e/test_minilm_http",
    "deploy/test_prepare",
    "http/test_lifecycle",
    "engine/test_real_generation",
    "runtime/test_closing",
    "trace/test_trace_arguments",
    "engine/test_adapter_slots",
    "trainer/test_testing",
    "ops/test_crew",
    "runtime/test_begun_steps",
    "trace/test_quantize",
    "http/test_real_oneshot",
    "http/test_load_adapters",
    "http/test_streams",
    "e2e/test_demo",
    "ops/test_native_attention",
    "lightning/test_launch",
    "lightning/test_resume",
    "trainer/test_torchrun",
    "http/test_speculation",
    "runtime/test_model_calls",
    "ops/test_asks",
    "bench/test_peers",
    "bench/test_train",
    "e2e/test_recipes",
    "trace/test_checkpoint_weights",
    "ops/test_native_sampling",
    "e2e/test_train_to_serve",
    "trainer/test_equivalence",
]

_PLACE = {f"tests/{name}.py": place for place, name in enumerate(LONGEST)}


def place(nodeid: str) -> int:
    """Where the file of a test stands among all; files of one place keep the order in which they were found."""
    return _PLACE.get(nodeid.partition("::")[0], len(_PLACE))
