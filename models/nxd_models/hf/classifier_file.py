"""The fields of ``config.json`` for the answers of a classifier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nxd_infer.errors import ModelConfigError
from nxd_models.hf.config_file import Count, ModelFile

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
            return "none"
        return "sigmoid" if problem == "multi_label_classification" or labels == 1 else "softmax"
