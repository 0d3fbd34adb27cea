"""What `make test` and `make test-xla` leave to `make test-long`: cases that take most of a minute and have a sibling.

A line is a test, or some of its cases, or some cases of each test in a file. A sibling takes the same path through the
code with another model, degree or backend, so that a mistake rarely shows in the long case alone.
"""

from __future__ import annotations

LONG = {
    # each decoder of transformers takes its steps in `make test`; those of llama and our own are served too
    "models/test_generic_decoders::test_it_is_traced_verified_and_served": (
        *("llama, padded and tied-2", "mistral-1", "qwen2-1", "qwen3-1", "phi3-1", "gpt2-2", "gpt_neo-1"),
        *("gpt_neox-2", "opt-1", "gemma2-2"),
    ),
    "models/test_generic_decoders::test_a_plan_with_a_wrong_style_is_told": ("phi3-layers.*.mlp.gate_up_proj",),
    "models/test_generic_encoders::test_a_classifier_gives_the_logits_of_transformers": ("distilbert-2", "roberta-1"),
    "models/test_generic_encoders::test_an_encoder_gives_the_vectors_of_transformers": ("bert-AutoModelForMaskedLM",),
    "models/test_t5::test_it_is_traced_verified_and_generates": (),  # the commands trace and serve one
    "models/test_traced_llama::test_traced_tokens_equal_generate": (
        *("1-llama3", "1-qwen2", "1-qwen3", "1-mistral", "4-llama3", "4-qwen2", "4-qwen3", "4-mistral"),
        *("2-qwen2", "2-mistral"),
    ),
    "models/test_traced_llama::test_compiled_tokens_equal_generate": ("qwen3-1",),
    "models/test_foreign_family::test_the_command_line_traces_verifies_and_serves_it": (),  # test_cli, and its traces
    "models/test_adapter_slots::test_rows_without_an_adapter_have_the_numbers_of_the_plain_model": ("1",),
    "models/test_adapter_slots::test_rows_of_a_mixed_batch_equal_plain_merged_models": ("1",),
    "models/test_config_files::test_whatever_a_field_holds_the_error_is_typed": ("mistral", "qwen3"),
    # llama's graphs of one rank and of two are looked at, and qwen2's of two
    "backends/test_device_passes": (
        *("llama3 tp 1", "mistral tp 1", "qwen2 tp 1", "qwen3 tp 1"),
        *("llama3 tp 2", "mistral tp 2", "qwen3 tp 2"),
    ),
    # compiled code of the same graphs, or the same code at another degree
    # test_real_generate compiles one; lockstep's ranks share a process, whose calls are tested
    "backends/test_every_backend::test_a_server_generates_and_recovers": ("inductor", "lockstep"),
    "backends/test_packed_weights::test_a_traced_model_is_the_same_packed_and_plain": (
        *("eager-1", "inductor-1", "inductor-2"),
    ),
    "backends/test_packed_weights::test_new_weights_are_packed_in_place": ("2",),  # trace/test_quantize
    "backends/test_joined_linears::test_compiled_linears_of_one_input_are_called_directly": ("False",),
    "artifact/test_golden::test_it_is_compiled_again": (
        *("1_1-inductor", "1_1-lockstep", "1_1_blake3-inductor", "1_1_blake3-lockstep"),
    ),
    "trace/test_quantize::test_a_traced_model_computes_with_the_rounded_weights": ("inductor-2-eager",),
    "comm/test_compiled_collectives::test_one_compiled_graph_serves_every_rank_for_a_thousand_rounds": (),
    "comm/test_compiled_collectives::test_a_lost_peer_ends_a_compiled_step_with_an_error_that_names_it": (
        "dispatched",
    ),
    "engine/test_speculation::test_greedy_answers_are_the_same_and_take_fewer_steps": ("1",),
    "engine/test_real_generation::test_greedy_tokens_equal_those_of_transformers_for_every_kind_of_length": ("1",),
    "neuron/test_user_script::test_it_trains_traces_saves_loads_and_serves": ("inductor", "eager", "xla"),
    "e2e/test_recipes::test_the_bert_recipe_gives_what_transformers_gives": ("inductor",),
    "e2e/test_quantize::test_an_encoder_in_eight_bits_is_verified": (),  # trace/test_quantize, and the next too
    "e2e/test_quantize::test_a_llama_in_eight_bits_is_traced_verified_and_generates": (),
    "seeds/test_tracing::test_every_argument_by_place_and_by_name": ("2-backend1",),
    "seeds/test_tracing::test_buckets": ("1",),
    "ops/test_native_attention::test_a_traced_graph_updates_its_caches_in_place": ("inductor",),
    "ops/test_native_sampling::test_a_traced_graph_draws_as_the_module_does": ("inductor",),
    "trace/test_traced_layers::test_every_layer_traced_equals_plain_pytorch": ("1", "2"),
    "e2e/test_soak::test_a_short_soak_holds": (),  # `make soak`, and what it consists of is tested one by one
    # the programs of two and four ranks have what that of one has, and collectives
    "xla/test_lowering": (
        *("tp1", "tp1-llama decode", "tp1-llama prefill", "tp1-guesses verify", "tp1-adapters decode"),
        *("tp1-adapters prefill", "tp1-llama3 decode", "tp1-llama3 prefill", "tp1-mistral decode"),
        *("tp1-mistral prefill", "tp1-qwen2 decode", "tp1-qwen2 prefill", "tp1-qwen3 decode", "tp1-qwen3 prefill"),
        *("tp1-bert", "tp1-bert_classifier", "tp1-roberta"),
    ),
    # each family stays at one degree, and each degree with some family
    "xla/test_families::test_a_decoder_says_what_eager_says": (
        *("llama3-1", "llama3-4", "mistral-2", "mistral-4", "qwen2-1", "qwen2-2", "qwen3-1", "qwen3-4"),
    ),
    "xla/test_families::test_slots_for_adapters_and_guesses_change_nothing_and_survive_a_fault": ("1", "4"),
    "xla/test_families::test_an_encoder_gives_eagers_numbers": (
        *("bert-2", "bert-4", "bert_classifier-1", "bert_classifier-4", "roberta-1", "roberta-2"),
    ),
    # another way to be lost
    "engine/test_lost_again::test_ranks_lost_while_they_start_again_are_started_once_more": ("stopped",),
    "lightning/test_launch::test_a_rank_that_ends_ends_the_others": ("early", "first"),
    "checkpoint/test_bucket_damage::test_killed_at_random_moments_of_saving_into_a_bucket": (),  # test_damage
    "http/test_real_generate::test_a_rank_lost_under_load": ("stopped",),
    "pipeline/test_failures::test_a_stage_that_is_lost": ("stop",),
    "comm/test_lost_peers::test_distributed_names_a_lost_peer_and_stays_failed": ("stop",),
    "runtime/test_faults::test_a_rank_killed_during_a_call": ("1",),
    "runtime/test_faults::test_a_rank_stopped_during_a_call": ("0",),
    "runtime/test_faults::test_one_rank_that_raises_while_the_other_waits": ("1",),
    "runtime/test_closing::test_killing_the_parent_ends_the_ranks": ("False",),  # the other one has such a rank, too
    "runtime/test_closing::test_a_parent_that_ends_takes_its_ranks_along": ("raise",),
    "e2e/test_train_recipe::test_it_runs_under_a_launcher": ("torchrun",),  # Slurm sets the same variables
    # training at other degrees
    "pipeline/test_equivalence::test_equals_one_process": ("tp1pp2dp2", "tp1pp2dp1", "tp2pp2dp1"),
    "pipeline/test_hugging_face::test_models_in_stages": ("4",),  # distributed/test_stages has ranks in stages
    "trainer/test_two_machines::test_two_machines_train_as_one_does": ("dp2",),
    "distributed/test_apply::test_models_equal_the_whole_ones": ("2",),  # test_adapters and test_stages, too
    "pipeline/test_messages::test_in_lock_step": ("2",),
    "models/test_tensor_parallel::test_decoders_on_ranks_equal_the_plain_model": ("2",),
    "parallel_layers/test_qkv_linear::test_equal_to_plain": ("torch.float32-4", "torch.float64-2"),
    "layout/test_pad::test_every_combination_of_heads": ("5", "6", "7", "8"),
    # `make bench` runs them
    "bench/test_train::test_everybody_trains_one_model": (),
    "bench/test_peers::test_hugging_face_gives_its_own_greedy_tokens": (),
}
"""The cases of each test, by their ids; none: all of it."""


def is_long(nodeid: str) -> bool:
    """Whether a test, ``tests/FILE.py::NAME[CASE]``, is one of them."""
    name, _, case = nodeid.removeprefix("tests/").replace(".py::", "::").removesuffix("]").partition("[")
    return any(key in LONG and case in (LONG[key] or (case,)) for key in (name, name.partition("::")[0]))
