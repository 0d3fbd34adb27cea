"""Read the JSON files of a model directory, without transformers.

:class:`ConfigFile` is a pydantic model whose errors name the file, the field, its value and the allowed values:

    class GPT2File(ConfigFile):
        n_embd: Count
        layer_norm_epsilon: Positive = 1e-5
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from nxd_infer.errors import ModelConfigError

if TYPE_CHECKING:
    from typing_extensions import Self


_WITHOUT_EFFECT = """
_attn_implementation _commit_hash _flash_attn_2_enabled _name_or_path _num_labels architectures auto_map
bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward cls_token_id decoder_start_token_id
directionality diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
id2label initializer_factor initializer_range is_encoder_decoder is_llama_config is_matryoshka label2id length_penalty
mask_token_id matryoshka_dimensions max_length max_sequence_length min_length model_type no_repeat_ngram_size
num_beam_groups num_beams num_labels num_return_sequences output_attentions output_hidden_states output_past
output_scores pad_token_id
pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type prefix
pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
return_dict_in_generate sbert_ce_default_activation_function sentence_transformers sep_token_id suppress_tokens
task_specific_params temperature tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
transformers.js_config transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16
use_cache
"""
WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())
"""Fields of ``config.json`` that change nothing that a traced model computes: generation, training, provenance."""


class Problem(NamedTuple):
    """The error text for a value that the field's type rejects."""

    text: str


Count = Annotated[int, Field(ge=1), Problem("expected a whole number of at least 1")]
TokenId = Annotated[int, Field(ge=0), Problem("expected a whole number of at least 0")]
Positive = Annotated[float, Field(gt=0), Problem("expected a number above 0")]
Fraction = Annotated[float, Field(ge=0), Problem("expected a number of at least 0")]
Flag = Annotated[bool, Problem("expected true or false")]
Texts = Annotated[tuple[str, ...], Field(strict=False), Problem("expected a list of texts")]
Numbers = Annotated[tuple[int, ...], Field(strict=False), Problem("expected a list of whole numbers")]
TokenIds = Annotated[int | list[int], Problem("expected a token id or a list of them")]


class ConfigFile(BaseModel):
    """A JSON object by its field names. null means absent; undeclared fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", protected_namespaces=())

    _raw: Mapping[str, Any] = PrivateAttr(default_factory=dict)
    _origin: str = PrivateAttr("config.json")

    @classmethod
    def read(cls, raw: Mapping[str, Any], origin: str = "config.json") -> Self:
        """Read the fields. Raises ModelConfigError naming the first field with an invalid value."""
        try:
            found = cls.model_validate({name: value for name, value in raw.items() if value is not None})
        except ValidationError as error:
            raise cls._explained(error, raw, origin) from None
        found._raw, found._origin = raw, origin
        return found

    @classmethod
    def _explained(cls, error: ValidationError, raw: Mapping[str, Any], origin: str) -> ModelConfigError:
        first = error.errors()[0]
        name = str(first["loc"][0])
        if first["type"] == "missing":
            return ModelConfigError(f"{origin}: the field {name} is missing")
        known = cls.model_fields.get(name)
        problem = _problem([*known.metadata, known.annotation]) if known else None
        return _refusal(origin, name, raw, problem or first["msg"])

    def error(self, name: str, problem: str) -> ModelConfigError:
        """Return the error for a field whose value cannot be run exactly."""
        return _refusal(self._origin, name, self._raw, problem)

    def refuse(self, name: str, why: str) -> None:
        """Raise if the field holds anything but null, false, 0 or an empty list."""
        if self._raw.get(name):
            raise self.error(name, why)


def _refusal(origin: str, name: str, raw: Mapping[str, Any], problem: str) -> ModelConfigError:
    return ModelConfigError(f"{origin}: {name} = {raw.get(name)!r}: {problem}")


def _problem(parts: Any) -> str | None:
    """Return the text of the Problem among the parts of a type."""
    for part in parts:
        if isinstance(part, Problem):
            return part.text
        if (found := _problem(get_args(part))) is not None:
            return found
    return None


class ModelFile(ConfigFile):
    """The common fields of the families' ``config.json``."""

    model_type: str
    architectures: Texts = ()
    quantization_config: Any = None
    dtype: Any = None
    torch_dtype: Any = None

    def require_known(self) -> None:
        """Raise ModelConfigError naming a field that the family does not read, if it holds more than null, false, 0 or
        nothing, and if it has an effect on a model that is not trained. (``_name`` is a note of transformers.)"""
        for name, value in self._raw.items():
            noted = name.startswith("_") or name in WITHOUT_EFFECT or "dropout" in name
            if value and name not in type(self).model_fields and not noted:
                raise self.error(name, "this family does not know the field")

    def require_causal(self) -> None:
        """Raise ModelConfigError unless it is a causal model that generates, for families that have no other."""
        instead = "not supported in this family"
        if self._raw.get("is_causal") is False:
            raise self.error("is_causal", f"attention to later tokens is {instead}")
        if self.architectures and not any(name.endswith("ForCausalLM") for name in self.architectures):
            raise self.error("architectures", f"a head that does not generate is {instead}")

    @property
    def weight_dtype(self) -> str:
        """dtype of the checkpoint's weights, by torch's name; "float32" if the file does not say."""
        value = str(self.dtype or self.torch_dtype).removeprefix("torch.")
        return value if value in ("float32", "bfloat16", "float16", "float64") else "float32"


class SpecialTokens(ConfigFile):
    """The tokens that begin and end a text."""

    bos_token_id: Any = None
    eos_token_id: TokenIds = Field(default_factory=list)

    @property
    def bos(self) -> int | None:
        value = self.bos_token_id
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def eos(self) -> tuple[int, ...]:
        return tuple(self.eos_token_id) if isinstance(self.eos_token_id, list) else (self.eos_token_id,)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises ModelConfigError if it is missing, not JSON or not an object."""
    value = read_any_json(path)
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def read_any_json(path: Path) -> Any:
    """Read a JSON file of a model directory. Raises ModelConfigError if it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(
            f"{path} is missing: expected a Hugging Face model directory (one of the hub is fetched with `hf download`)"
        ) from None
    except NotADirectoryError:
        raise ModelConfigError(f"{path.parent} is not a directory: expected a Hugging Face model directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path} cannot be read as JSON: {error}") from None


_TORCH_SCORES = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "none"}
_PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")


class ClassifierFile(ModelFile):
    """What a model's classes are called, and how its logits become scores."""

    num_labels: Count = 2
    id2label: Any = None
    problem_type: Any = None
    sentence_transformers: Any = None
    sbert_ce_default_activation_function: Any = None

    def labels(self) -> tuple[str, ...]:
        """Return the names of the classes in order."""
        if self.id2label is None:
            return tuple(f"LABEL_{i}" for i in range(self.num_labels))
        if not isinstance(self.id2label, Mapping):
            raise self.error("id2label", "expected an object from number to name")
        try:
            ordered = {int(key): str(value) for key, value in self.id2label.items()}
        except ValueError:
            raise self.error("id2label", "expected an object from number to name") from None
        if sorted(ordered) != list(range(len(ordered))):
            raise self.error("id2label", "the numbers must be 0, 1, 2, ... without a gap")
        return tuple(ordered[i] for i in range(len(ordered)))

    def scores(self, labels: int) -> str:
        """Return the activation that sentence-transformers wrote into the file, else that of transformers' pipeline."""
        problem = self.problem_type
        if problem is not None and problem not in _PROBLEMS:
            raise self.error("problem_type", f"expected one of {', '.join(_PROBLEMS)}")
        theirs = self.sentence_transformers
        named = theirs.get("activation_fn") if isinstance(theirs, Mapping) else None
        name = named or self.sbert_ce_default_activation_function  # its older spelling
        if isinstance(name, str) and name.startswith("torch."):  # user-defined code is not run
            found = _TORCH_SCORES.get(name.rpartition(".")[2])
            if found is None:
                raise ModelConfigError(
                    f"{self._origin}, or the library's own file: activation_fn = {name!r} is not supported; known are "
                    f"{', '.join(_TORCH_SCORES)}"
                )
            return found
        if problem == "regression":
            return "regression" if labels == 1 else "none"
        return "sigmoid" if problem == "multi_label_classification" or labels == 1 else "softmax"
