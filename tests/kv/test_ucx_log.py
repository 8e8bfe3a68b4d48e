"""The transport found is what UCX says of this agent's reads, and nothing else."""

from __future__ import annotations

from hocket.kv.ucx_log import transports_in_log

AGENT = "imp-4570e4a4db764cb492047527eae"


def table(agent: str, where: str, operation: str, *rows: str) -> str:
    lines = [f"| {agent} {where} cfg#1 |", f"| {operation} |", "| Range | Description | Config |"]
    prefix = "[1796061467.809762] [vm:10766:0]   "
    return "".join(f"{prefix}{line}\n" for line in [*lines, *rows])


READ = "remote memory read by ucp_get*(multi) into host memory from host"


def test_the_row_for_large_reads_counts() -> None:
    rows = ["| 0..2047 | short | tcp/lo |", "| 2K..inf | zero-copy | cma/memory |"]
    assert transports_in_log(table(AGENT, "intra-node", READ, *rows), AGENT, "cpu") == "cma"


def test_all_lanes_and_peers_are_named_once() -> None:
    rdma = "| 0..inf | zero-copy | 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1 |"
    log = table(AGENT, "inter-node", READ, rdma)
    log += table(AGENT, "inter-node", READ, "| 0..inf | software emulation | tcp/eth0 |")
    assert transports_in_log(log, AGENT, "cpu") == "rc_mlx5+tcp"


def test_other_agents_other_operations_and_reads_of_oneself_do_not_count() -> None:
    row = "| 0..inf | zero-copy | tcp/lo |"
    log = table("exp-1", "intra-node", READ, row)
    log += table(AGENT, "self", READ, row)
    log += table(AGENT, "intra-node", "remote memory write by ucp_put* from host memory", row)
    assert transports_in_log(log, AGENT, "cpu") == ""


def test_only_reads_into_the_pools_memory_count() -> None:
    cuda = "remote memory read by ucp_get*(multi) into cuda/GPU0 memory from cuda"
    log = table(AGENT, "intra-node", READ, "| 0..inf | zero-copy | cma/memory |")
    log += table(AGENT, "intra-node", cuda, "| 0..inf | zero-copy | cuda_ipc/cuda |")
    assert transports_in_log(log, AGENT, "cuda") == "cuda_ipc"
    assert transports_in_log(log, AGENT, "cpu") == "cma"


def test_a_log_cut_off_in_a_table_still_counts() -> None:
    log = table(AGENT, "intra-node", READ, "| 0..inf | zero-copy | cma/memory |")
    assert transports_in_log(log[:-1], AGENT, "cpu") == "cma"
    assert transports_in_log("", AGENT, "cpu") == ""
