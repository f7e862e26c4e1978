"""Which of the buffers in /dev/shm that killed vLLM workers left are deleted."""

from pathlib import Path

from common.shared_memory import remove_orphans


def test_only_buffers_that_no_process_has_mapped_are_deleted(tmp_path: Path) -> None:
    shared, processes = tmp_path / "shm", tmp_path / "proc"
    shared.mkdir()
    for name in ("vllm_dist_aa-tp-[0-1]-cpushm0", "vllm_dist_bb-tp-[0-1]-cpushm0", "psm_other"):
        (shared / name).touch()
    (processes / "17").mkdir(parents=True)
    (processes / "17" / "maps").write_text("7f00-7f01 rw-s 0 00:1a 5  /dev/shm/vllm_dist_bb-tp-[0-1]-cpushm0\n")
    (processes / "self").mkdir()
    assert remove_orphans(shared, processes) == ["vllm_dist_aa-tp-[0-1]-cpushm0"]
    assert sorted(path.name for path in shared.iterdir()) == ["psm_other", "vllm_dist_bb-tp-[0-1]-cpushm0"]
