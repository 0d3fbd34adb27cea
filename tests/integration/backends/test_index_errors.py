"""An index out of range is an error of the call, however many threads share the loops of a compiled graph."""

import pytest
import torch
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer.errors import RankFailedError
from tests.support.needs import needs_inductor

pytestmark = [needs_inductor, pytest.mark.usefixtures("own_cache")]


class LookUp(nn.Module):
    """Loops of 2^18 elements, which two threads share: one that checks its indices, between two that check nothing."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 1024)

    def forward(self, ids: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return x * 2 + 1, self.table(ids).exp(), x.flip(0).exp()


def look_up() -> tuple[nn.Module, dict]:
    return LookUp(), {}


def test_an_index_out_of_range_is_an_error_and_not_the_end_of_the_rank(tmp_path):
    torch.manual_seed(0)
    ids, x = torch.randint(0, 10, (256,)), torch.randn(256, 1024)
    with nxd.trace.parallel_model_trace(look_up, (ids, x), tp_degree=1, compiler_workdir=tmp_path / "work") as model:
        nxd.trace.parallel_model_save(model, tmp_path / "artifact")
    code = "".join(file.read_text() for file in (tmp_path / "work").rglob("*.cpp"))
    assert "AOTI_TORCH_CHECK" in code and "#pragma omp parallel" in code
    with nxd.trace.parallel_model_load(tmp_path / "artifact", in_process=False, threads_per_rank=2) as model:
        assert model(ids, x)[1].shape == (256, 1024)
        ids[200] = 10
        with pytest.raises(RankFailedError, match="index out of bounds"):
            model(ids, x)
