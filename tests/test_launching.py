"""Processes as users start them: every start method, torchrun, SLURM; and ranks that fail or die."""

from __future__ import annotations

import re
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.harness import run_script

MODULE = """
import os, signal, sys, time
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
import lightning_dist
from lightning_dist import ZeROStrategy


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def training_step(self, batch, index):
        fault(self, index)
        loss = self(batch[0]).pow(2).mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def fault(module, index):
    pass


def say(line):
    os.write(1, f"{line}\\n".encode())  # in one piece, as several processes write


def strike():
    say(f"STRUCK {time.time()}")
    raise ValueError("planted here")


def data(samples=64):
    return DataLoader(TensorDataset(torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))), batch_size=4)


def trainer(strategy, **options):
    quiet = dict(accelerator="cpu", devices=2, logger=False, enable_progress_bar=False, enable_model_summary=False)
    return L.Trainer(strategy=strategy, **{**quiet, "enable_checkpointing": False, "max_steps": 6, **options})
"""

BY_METHOD = (
    MODULE
    + """
if __name__ == "__main__":
    method, stage = sys.argv[1], int(sys.argv[2])
    module, run = Module(), trainer(ZeROStrategy(stage, start_method=method))
    before = [p.detach().clone() for p in module.parameters()]
    run.fit(module, data())
    if method == "popen":
        with run.strategy.gathered(module):
            after = [p.detach().clone() for p in module.parameters()]
    else:
        after = [p.detach() for p in module.parameters()]  # brought back to this process
    assert run.callback_metrics["loss"] > 0
    moved = all(not torch.equal(a, b) for a, b in zip(before, after))
    say(f"moved {moved} {float(sum(a.sum() for a in after))}")
"""
)


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_start_methods_train_alike(stage: int) -> None:
    results = {}
    for method in ("popen", "spawn", "fork", "forkserver"):
        output = run_script(BY_METHOD, method, str(stage), timeout=300).output
        line = next(line for line in output.splitlines() if line.startswith("moved"))
        assert "moved True" in line, output
        results[method] = float(line.split()[2])
    assert len(results) == 4
    assert len({round(value, 5) for value in results.values()}) == 1, results


EXTERNAL = (
    MODULE
    + """
run = trainer("zero3", devices=int(os.environ["DEVICES"]))
run.fit(Module(), data())
say(f"{type(run.strategy.cluster_environment).__name__} rank {run.global_rank} of {run.world_size} ended")
"""
)
WARNED = """
def fault(module, index):
    if index == 2 and module.global_rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
"""
"""SLURM's warning that the time is nearly over, here to one rank alone."""


RENDEZVOUS = "'--rdzv-backend=c10d', '--rdzv-endpoint=127.0.0.1:0'"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(script: Path, *, processes: int) -> str:
    """A program that does what the command torchrun does."""
    return (
        "import runpy, sys\n"
        f"sys.argv = ['torchrun', '--nproc-per-node={processes}', {RENDEZVOUS}, {str(script)!r}]\n"
        "runpy.run_module('torch.distributed.run', run_name='__main__')\n"
    )


def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(EXTERNAL)
    result = run_script(torchrun(script, processes=2), env={"DEVICES": "2"}, timeout=300)
    for rank in range(2):
        assert f"TorchElasticEnvironment rank {rank} of 2 ended" in result.output
    assert not result.survivors


def test_slurm() -> None:
    """Two tasks of one node, as srun would start them; both save when one is warned, and the job is queued again."""
    script = (
        "import glob, os, subprocess, sys, tempfile\n"
        f"source = {EXTERNAL.replace('run = trainer', WARNED + 'run = trainer')!r}\n"
        "folder = tempfile.mkdtemp()\n"
        "path, scontrol = os.path.join(folder, 'train.py'), os.path.join(folder, 'scontrol')\n"
        "open(path, 'w').write(source)\n"
        "open(scontrol, 'w').write('#!/bin/sh\\necho scontrol $@\\n')\n"
        "os.chmod(scontrol, 0o755)\n"
        "common = dict(os.environ, PATH=folder + ':' + os.environ['PATH'], DEVICES='2', "
        f"SLURM_NTASKS='2', SLURM_NTASKS_PER_NODE='2', SLURM_NNODES='1', "
        f"SLURM_JOB_NAME='train', SLURM_JOB_ID='17', SLURM_NODEID='0', SLURM_JOB_NODELIST='localhost', "
        f"MASTER_ADDR='127.0.0.1', MASTER_PORT='{free_port()}')\n"
        "tasks = [subprocess.Popen([sys.executable, path], env=dict(common, SLURM_PROCID=str(r), SLURM_LOCALID=str(r)))"
        " for r in range(2)]\n"
        "ends = [task.wait() for task in tasks]\n"
        "print('saved', glob.glob('hpc_ckpt_*'))\n"
        "sys.exit(max(ends))\n"
    )
    result = run_script(script, timeout=300)
    assert result.output.count("scontrol requeue 17") == 1, result.output
    assert "saved ['hpc_ckpt_1.ckpt']" in result.output
    for rank in range(2):
        assert f"SLURMEnvironment rank {rank} of 2 ended" in result.output


def test_more_processes_than_devices(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(EXTERNAL)
    result = run_script(torchrun(script, processes=3), env={"DEVICES": "2"}, expect=1, timeout=300)
    assert "does not match the world size (3)" in result.output  # Lightning's own words


RAISES_ON = "def fault(module, index):\n    if index == 2 and module.global_rank == {rank}: strike()\n"
FAULTS = {
    "forward": (
        RAISES_ON.format(rank=1),
        "zero3",
    ),
    "backward": (
        "class Bad(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x): return x.view_as(x)\n"
        "    @staticmethod\n"
        "    def backward(ctx, g): raise ValueError('planted here')\n"
        "def fault(module, index):\n"
        "    if index == 2 and module.global_rank == 1:\n"
        "        plain = module.layers[1].forward\n"
        "        module.layers[1].forward = lambda x: Bad.apply(plain(x))\n",
        "zero3",
    ),
    "dataloader": (
        "class Raises(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 64\n"
        "    def __getitem__(self, i):\n"
        "        if int(os.environ.get('LOCAL_RANK', 0)) == 1 and i > 20: strike()\n"
        "        return (torch.ones(8),)\n"
        "def data(samples=64): return DataLoader(Raises(), batch_size=4)\n",
        "zero2",
    ),
    "callback": (
        "class Raises(L.Callback):\n"
        "    def on_train_batch_end(self, trainer, *_):\n"
        "        if trainer.global_rank == 1 and trainer.global_step == 3: strike()\n",
        "zero1",
    ),
    "rank zero": (
        RAISES_ON.format(rank=0),
        "zero3",
    ),
    "killed": (
        "def fault(module, index):\n"
        "    if index == 2 and module.global_rank == 1:\n"
        "        say(f'STRUCK {time.time()}')\n"
        "        os.kill(os.getpid(), signal.SIGKILL)",
        "zero3",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_failing_rank_ends_all_within_seconds(name: str) -> None:
    """All processes are gone within 30 s, the exit code is not 0, the traceback is there once, no child is left."""
    code, strategy = FAULTS[name]
    callbacks = "[Raises()]" if name == "callback" else "[]"
    run = f"\nif __name__ == '__main__':\n    trainer({strategy!r}, callbacks={callbacks}).fit(Module(), data())\n"
    started = time.time()
    result = run_script(MODULE + "\n" + code + run, expect=None, timeout=300, linger=10)
    assert not result.timed_out, result.output
    assert result.returncode != 0
    if name != "backward":  # whose fault is planted long before it strikes
        struck = max(float(line.split()[1]) for line in result.output.splitlines() if line.startswith("STRUCK "))
        assert started + result.seconds - struck < 30
    assert not result.survivors
    if name != "killed":
        ends = re.findall(r"^(?:\[rank\d\]: )?ValueError: planted here$", result.output, re.MULTILINE)
        assert len(ends) == 1, result.output  # others may quote it


@pytest.mark.parametrize(("strategy", "to"), [("zero3", (1,)), ("pp", (0,)), ("pp", (0, 1))])
def test_sigterm_ends_all_ranks(strategy: str, to: tuple[int, ...]) -> None:
    """Rank 0, another one or all are told to terminate: the processes end after the batch."""
    code = (
        "def fault(module, index):\n"
        f"    if index == 2 and module.global_rank in {to}:\n"
        "        say(f'STRUCK {time.time()}')\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    run = f"\nif __name__ == '__main__':\n    trainer({strategy!r}).fit(Module(), data())\n    print('went on')\n"
    started = time.time()
    result = run_script(MODULE + code + run, expect=None, timeout=300, linger=10)
    assert not result.timed_out, result.output
    assert result.returncode != 0
    struck = max(float(line.split()[1]) for line in result.output.splitlines() if line.startswith("STRUCK "))
    assert started + result.seconds - struck < 15
    assert "signal 15 (SIGTERM) was sent to ranks" in result.output
    assert "went on" not in result.output
    assert not result.survivors


def test_python_is_the_one_of_the_tests() -> None:
    assert run_script("import sys; print(sys.executable)").output.strip() == sys.executable
