"""Which files below ``weights_root`` are read, and whose fault it is if they cannot be."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from nxd_infer.checkpoint.folder import find_checkpoint
from nxd_infer.checkpoint.storage import storage_of
from nxd_server.errors import ForbiddenPathError
from nxd_server.http.admin import path_under, unchanged
from nxd_server.http.error_responses import ApiError
from tests.support.http.weights_root import weights_root


def test_a_tag_that_the_folder_lacks_is_the_tags_fault(tmp_path):
    async def refused(tag):
        with pytest.raises(ApiError) as caught, unchanged("the weights are unchanged", "weights"):
            find_checkpoint(storage_of(tmp_path), tag)
        return caught.value.status, caught.value.param

    assert asyncio.run(refused("step_9")) == (400, "tag")
    assert asyncio.run(refused(None)) == (400, "path")


def test_a_link_to_a_folder_is_followed_while_it_stays_inside(tmp_path):
    root = weights_root(tmp_path)
    assert path_under(root, "link") == path_under(root, str(root / "one")) == root / "one"
    assert path_under(root, "holds_link") == root / "holds_link"  # one of its links leads back to it
    assert path_under(root, "holds_link/deep/two") == root / "deep" / "two"
    with pytest.raises(ForbiddenPathError, match=r"holds_out/model.safetensors' lies outside"):
        path_under(root, "holds_link_out")
    with pytest.raises(ForbiddenPathError, match=r"--weights-root .NXD_INFER_WEIGHTS_ROOT"):
        path_under(None, str(root / "one"))


@pytest.mark.parametrize("where", [".", "deep", "deep/two", "holds_link"])
def test_what_another_user_may_change_is_not_read(tmp_path, where):
    root = weights_root(tmp_path)
    path_under(root, "holds_link")
    path = (root / where).resolve()
    path.chmod(0o757)
    with pytest.raises(ForbiddenPathError, match=rf"{path} belongs to .* mode 0757.*`chmod go-w {path}`"):
        path_under(root, "holds_link")  # one of its links leads to deep
    path.chmod(0o755)
    path_under(root, "holds_link")
    if os.geteuid() == 0:
        os.chown(path, 65534, -1)
        with pytest.raises(ForbiddenPathError, match=f"{path} belongs to .*65534"):
            path_under(root, "holds_link")


@pytest.mark.parametrize(("owner", "call"), [(Path, "stat"), (os, "readlink"), (os, "listdir")])
def test_a_folder_is_read_while_a_trainer_saves_into_it(tmp_path, monkeypatch, owner, call):
    """Files and folders come and go: a deleted entry is not an error of the request that names the folder."""
    step, whole = tmp_path / "step", getattr(owner, call)
    step.mkdir()
    (step / "link").symlink_to(tmp_path)

    def deleted_meanwhile(path, *more, **options):
        if str(path).startswith(str(step)):
            shutil.rmtree(step)
        return whole(path, *more, **options)

    monkeypatch.setattr(owner, call, deleted_meanwhile)
    assert path_under(tmp_path, ".") == tmp_path
    assert not step.exists()
