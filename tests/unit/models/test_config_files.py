"""``config.json`` is read without transformers, and what cannot be run exactly is refused by field."""

import contextlib
import itertools
import json

import pytest

from nxd_infer.errors import ModelConfigError
from nxd_models import registry
from nxd_models.hf.sentence_transformers import pooling_options
from nxd_models.llama.config import LlamaConfig
from nxd_models.registry import parse_config
from nxd_models.rope import RopeConfig
from nxd_models.serving import tasks
from tests.support.tiny_models import FAMILIES


def parsed(family: str, **changes):
    return parse_config({**FAMILIES[family], **changes})


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"model_type": "mambo"}, r"model_type = 'mambo'.*known are llama, mistral"),
        ("llama", {"hidden_size": None}, "hidden_size is missing"),
        ("llama", {"hidden_size": "32"}, r"hidden_size = '32': expected a whole number"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ("llama", {"num_attention_heads": 5}, "num_key_value_heads = 2: does not divide the 5"),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 6}, "hidden_size = 32: does not divide over 6"),
        ("llama", {"head_dim": 7}, "head_dim = 7: rotary"),
        ("llama", {"hidden_act": "mish"}, r"hidden_act = 'mish'.*silu"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, r"rope_scaling.*'yarn' is not supported"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "needs a factor"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor = -1"),
        ("llama", {"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"eos_token_id": "</s>"}, "eos_token_id"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"num_local_experts": 8}, "num_local_experts.*mixture"),
        ("qwen2", {"is_causal": False}, "is_causal = False.*this family"),
        ("qwen3", {"architectures": ["Qwen3ForSequenceClassification"]}, "architectures.*does not generate"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e4}},
            "rope_scaling.*rope_parameters says something else",
        ),
        ("qwen2", {"use_sliding_window": True, "sliding_window": "x"}, "sliding_window"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"id2label": {"a": "b"}}, "id2label"),
        ("bert", {"id2label": {"1": "b"}}, "id2label"),
        ("bert", {"num_attention_heads": 5}, "hidden_size"),
    ],
)
def test_refusals_name_the_field(family, changes, message):
    with pytest.raises(ModelConfigError, match=message):
        parsed(family, **changes)


def test_both_spellings_of_rope_mean_the_same():
    scaling = FAMILIES["llama3"]["rope_scaling"]
    old = parsed("llama3")
    new = parsed("llama3", rope_scaling=None, rope_theta=None, rope_parameters={**scaling, "rope_theta": 500000.0})
    assert isinstance(old, LlamaConfig)
    assert old == new
    assert old.rope == RopeConfig("llama3", 500000.0, 8.0, 1.0, 4.0, 64)


def test_llama_3_takes_the_original_length_from_the_outer_object_first():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for inner, outer, expected in ((None, 32, 32), (128, 32, 32), (128, None, 128)):
        found = parsed(
            "llama",
            rope_scaling={**scaling, "original_max_position_embeddings": inner},
            original_max_position_embeddings=outer,
        )
        assert isinstance(found, LlamaConfig) and found.rope.original_max_position == expected


def test_what_a_window_means():
    assert parsed("mistral").max_length == 256
    assert parsed("mistral", sliding_window=100).max_length == 100
    assert parsed("mistral", sliding_window=1000).max_length == 256
    without = {k: v for k, v in FAMILIES["mistral"].items() if k != "sliding_window"}
    assert parse_config({**without, "max_position_embeddings": 32768}).max_length == 4096
    assert parsed("qwen2", sliding_window=100).max_length == 256, "Qwen's window is off unless switched on"
    window = {"sliding_window": 100, "use_sliding_window": True}
    assert parsed("qwen2", **window, max_window_layers=1).max_length == 100
    assert parsed("qwen2", **window, max_window_layers=2).max_length == 256, "no layer has a window"
    assert parsed("qwen2", **window, layer_types=["full_attention"] * 2).max_length == 256
    assert parsed("mistral", sliding_window=100, layer_types=["full_attention"] * 2).max_length == 256


def test_directories_that_are_none_say_so(tmp_path):
    (tmp_path / "file").write_text("")
    for path, content, message in (
        (tmp_path / "file", None, r"file is not a directory"),
        (tmp_path, None, r"config\.json is missing"),
        (tmp_path, "{", "cannot be read as JSON"),
        (tmp_path, "[1]", "expected a JSON object"),
    ):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(ModelConfigError, match=message):
            registry.load_config(path)
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["llama"]))
    spec = registry.load_config(tmp_path)
    for task, message in (
        ("embed", r"architectures.*cannot do 'embed'.*generate"),
        ("translate", "no task 'translate'"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            registry.build(spec, task)


ODD = ([], {"a": 1}, "x", -1, 1.5, True, [1, "x"], float("nan"), None)
"""Values of every JSON kind, most of which fit no field."""


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_whatever_a_field_holds_the_error_is_typed(tmp_path, family):
    base = FAMILIES[family]
    fields = {*base, "layer_types", "rope_scaling", "id2label", "eos_token_id"}
    for name, value in itertools.product(sorted(fields), ODD):
        with contextlib.suppress(ModelConfigError):
            parsed(family, **{name: value})
    with pytest.raises(ModelConfigError, match=r"hidden_act = \[\]: this activation is not supported"):
        parsed(family, hidden_act=[])
    (tmp_path / "config.json").write_text(json.dumps({**base, "architectures": 7}))
    with pytest.raises(ModelConfigError, match="architectures = 7: expected a list of texts"):
        registry.load_config(tmp_path)


def test_damaged_files_beside_the_configuration_are_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["llama"]))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, "x"]}')
    with pytest.raises(ModelConfigError, match=r"generation_config\.json: eos_token_id = \[1, 'x'\]"):
        tasks.plan(tmp_path)
    for damaged in ("{", "{}", "[1]", '[{"type": "x.Pooling", "path": 5}]'):
        (tmp_path / "modules.json").write_text(damaged)
        with pytest.raises(ModelConfigError, match=r"modules\.json"):
            pooling_options(tmp_path)


def test_the_activation_that_sentence_transformers_6_stores_beside_the_configuration_wins(tmp_path):
    old = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}
    (tmp_path / "config.json").write_text(json.dumps({**FAMILIES["bert_classifier"], **old}))
    beside = tmp_path / "config_sentence_transformers.json"
    beside.write_text(json.dumps({"activation_fn": "torch.nn.modules.linear.Identity"}))
    assert registry.load_config(tmp_path).config.scores == "none"
    beside.write_text(json.dumps({"activation_fn": "torch.nn.Tanh"}))
    with pytest.raises(ModelConfigError, match=r"activation_fn = 'torch\.nn\.Tanh' is not supported"):
        registry.load_config(tmp_path)
