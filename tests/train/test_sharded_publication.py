"""Publication from two ranks: the bytes of one process, encoded where the weights lie."""

from __future__ import annotations

import json
from pathlib import Path

import publish_case
import pytest
from torchrun import torchrun


@pytest.mark.parametrize("block", [256, pytest.param(4096, marks=pytest.mark.slow)])
def test_two_ranks_publish_what_one_process_publishes(
    block: int, family_folders: dict[str, Path], tmp_path: Path
) -> None:
    done = torchrun(2, publish_case.__file__, str(family_folders["qwen3_moe"]), str(tmp_path), str(block))
    assert done.returncode == 0, done.stderr[-4000:]
    for rank, versions in enumerate(json.loads((tmp_path / "sent.json").read_text())):
        assert len(versions) == 4
        for sent in versions:
            experts = {entry.split(".experts.")[1].split(".")[0] for entry in sent if ".experts." in entry}
            assert experts <= {str(e) for e in range(4 * rank, 4 * rank + 4)}, "an expert is encoded on its rank"
            assert not any(entry.startswith("rows") and ".experts." in entry for entry in sent)
            loose = {entry.split()[2] for entry in sent if entry.startswith("rows")}
            matrices = {name for name in loose if "norm" not in name and "gate.weight" not in name}
            if block == 256:
                assert not matrices, "a matrix that is cut between blocks is encoded in parts"
            else:
                assert matrices or not loose
        assert not [e for e in versions[1] if e.startswith("rows")], "nothing changed, nothing travels"
