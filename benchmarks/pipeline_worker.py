"""One rank of a pipeline: ours and torch's under the same schedule, alive in one process, taking turns.

Both hold the same weights of the same hand-written transformer, get the same micro-batches and compute gradients only:
an optimizer's step costs both the same. Spans of torch's stages are taken around the methods that compute, which is
where ours are taken, so that both bubbles are measured alike.
"""

from __future__ import annotations

import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dist.comm import Mesh
from lightning_dist.core.allocator import keep_freed_memory
from lightning_dist.core.layout import Layout
from lightning_dist.pipeline import PipelineEngine
from lightning_dist.pipeline.schedule import Action, Kind, Span, schedule_row
from lightning_dist.pipeline.schedule.schedules import default_virtual_stages

OURS, TORCH = "ours", "torch"
PEERS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb_h1": "ScheduleInterleavedZeroBubble",  # with one stage on each rank
    "zbv": "ScheduleZBVZeroBubble",
}


@dataclass(frozen=True)
class PipelineJob:
    """What is computed: `samples` in each of `micro_batches`, of `sequence` tokens."""

    schedule: str
    ranks: int
    micro_batches: int
    samples: int
    sequence: int
    hidden: int
    layers: int
    vocabulary: int
    seed: int

    @property
    def virtual_stages(self) -> int:
        return default_virtual_stages(self.schedule)

    @property
    def num_stages(self) -> int:
        return self.ranks * self.virtual_stages

    @property
    def split(self) -> list[int]:
        return [self.layers // self.num_stages] * self.num_stages


@dataclass(frozen=True)
class RankTurn:
    """A turn as one rank saw it."""

    seconds: float
    cpu_seconds: float
    spans: list[Span]


@dataclass(frozen=True)
class RankReady:
    """After the warm-up: the most bytes that were alive in a step, and how far gradients and losses are apart."""

    peak_bytes: dict[str, int]
    gradient_difference: float
    losses: dict[str, float | None]


class Block(nn.Module):
    """Attention and a perceptron, normalized before."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(hidden // 64, 1)
        self.norm, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class Transformer(nn.Module):
    """A language model; as a stage of torch's, only a part of the layers, the ends where they belong."""

    def __init__(self, job: PipelineJob) -> None:
        super().__init__()
        self.words: nn.Module | None = nn.Embedding(job.vocabulary, job.hidden)
        self.blocks = nn.ModuleList([Block(job.hidden) for _ in range(job.layers)])
        self.head: nn.Module | None = nn.Linear(job.hidden, job.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.words is not None:
            x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, of those made within the mode; `apart` from these."""

    def __init__(self, apart: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in apart}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().device.type != "meta":  # as that of fakes
                self._see(leaf.untyped_storage())
        return out

    def _see(self, storage: Any) -> None:
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, which: int, num_bytes: int) -> None:
        self._known.discard(which)
        self.now -= num_bytes


def model_of(job: PipelineJob) -> Transformer:
    torch.manual_seed(job.seed)
    return Transformer(job)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Ours:
    """lightning_dist's engine around the whole model."""

    def __init__(self, job: PipelineJob) -> None:
        self.model = model_of(job)
        self.engine = PipelineEngine(
            self.model,
            Mesh.from_world(Layout(pp=job.ranks)),
            num_micro_batches=job.micro_batches,
            schedule=job.schedule,
            virtual_stages=job.virtual_stages,
            split=job.split,
        )

    def step(self, tokens: Tensor) -> float | None:
        returned = self.engine.forward_backward(lambda part: loss_of(self.model(part), part), tokens).returned
        return float(returned)

    def spans(self) -> list[Span]:
        return self.engine.executor.stopwatch.spans()

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def zero_grad(self) -> None:
        self.model.zero_grad()


class Torch:
    """torch.distributed.pipelining: a module for each stage, cut by hand."""

    def __init__(self, job: PipelineJob) -> None:
        from torch.distributed import pipelining

        rank, placement = dist.get_rank(), schedule_row(job.schedule).placement
        self.mine = placement.stages(rank, job.ranks, job.virtual_stages)
        self.last = job.num_stages - 1 in self.mine
        self.parts: dict[int, Transformer] = {}
        self.taken: list[Span] = []
        stages = []
        for number in self.mine:
            part = self.parts[number] = model_of(job)
            size = job.layers // job.num_stages
            part.blocks = nn.ModuleList(part.blocks[number * size : (number + 1) * size])
            part.words = part.words if number == 0 else None
            part.head = part.head if number == job.num_stages - 1 else None
            stage = pipelining.PipelineStage(part, number, job.num_stages, torch.device("cpu"))
            self._watch(stage, number)
            stages.append(stage)
        kind: Any = getattr(pipelining, PEERS[job.schedule])
        single = job.schedule in ("gpipe", "1f1b")
        self.schedule = kind(stages[0] if single else stages, job.micro_batches, loss_fn=loss_of)
        self.offset = {number: number * (job.layers // job.num_stages) for number in self.mine}

    def _watch(self, stage: Any, number: int) -> None:
        def watched(name: str, kind_of: Callable[[dict[str, Any]], Kind]) -> None:
            inner = getattr(stage, name)

            def method(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
                begun = time.perf_counter()
                out = inner(micro_batch, *args, **kwargs)
                action = Action(kind_of(kwargs), number, micro_batch)
                self.taken.append(Span(action, begun, time.perf_counter()))
                return out

            setattr(stage, name, method)

        watched("forward_one_chunk", lambda _: Kind.FORWARD)
        watched("backward_one_chunk", lambda kw: Kind.BACKWARD if kw.get("full_backward", True) else Kind.INPUT_GRAD)
        watched("backward_weight_one_chunk", lambda _: Kind.WEIGHT_GRAD)

    def step(self, tokens: Tensor) -> float | None:
        self.taken.clear()
        losses: list[Tensor] = []
        self.schedule.step(
            *([tokens] if 0 in self.mine else []), **({"target": tokens, "losses": losses} if self.last else {})
        )
        return float(torch.stack(losses).detach().mean()) if losses else None

    def spans(self) -> list[Span]:
        return list(self.taken)

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for part in self.parts.values() for parameter in part.parameters()]

    def gradients(self) -> dict[str, Tensor]:
        found = {}
        for number, part in self.parts.items():
            for name, parameter in part.named_parameters():
                if name.startswith("blocks."):
                    _, index, rest = name.split(".", 2)
                    name = f"blocks.{int(index) + self.offset[number]}.{rest}"
                if parameter.grad is not None:
                    found[name] = parameter.grad
        return found

    def zero_grad(self) -> None:
        for part in self.parts.values():
            part.zero_grad()


def serve(connection: Connection, job: PipelineJob, rank: int, store: str, warmup: int) -> None:
    """Entry point of the process: answers (system, steps) with a `RankTurn`, ends at None."""
    try:
        torch.set_num_threads(1)
        keep_freed_memory()  # for both, in one process
        file = dist.FileStore(store, job.ranks)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=file, rank=rank, world_size=job.ranks)
        systems: dict[str, Ours | Torch] = {OURS: Ours(job), TORCH: Torch(job)}
        generator = torch.Generator().manual_seed(job.seed)
        shape = (job.micro_batches * job.samples, job.sequence)
        tokens = torch.randint(0, job.vocabulary, shape, generator=generator)
        connection.send(_warm_up(systems, tokens, warmup))
        while (turn := connection.recv()) is not None:
            name, steps = turn
            system = systems[name]
            dist.barrier()
            clock, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                system.zero_grad()
                system.step(tokens)
            seconds, used = time.perf_counter() - clock, time.process_time() - cpu
            dist.barrier()
            connection.send(RankTurn(seconds / steps, used / steps, system.spans()))
        dist.destroy_process_group()
    except EOFError:  # the parent is gone
        return
    except Exception as error:
        traceback.print_exc()
        connection.send(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[:200])


def _warm_up(systems: dict[str, Ours | Torch], tokens: Tensor, warmup: int) -> RankReady:
    losses: dict[str, float | None] = {}
    peaks: dict[str, int] = {}
    for name, system in systems.items():
        for _ in range(warmup):
            system.zero_grad()
            losses[name] = system.step(tokens)
    ours, theirs = systems[OURS].gradients(), systems[TORCH].gradients()
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"the systems train different parameters: {sorted(ours.keys() ^ theirs.keys())[:4]}")
    difference = max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs)
    for name, system in systems.items():
        with LiveBytes([tokens, *system.parameters(), *system.gradients().values()]) as live:
            system.step(tokens)  # gradients lie there already, and are added to
        peaks[name] = live.peak
        dist.barrier()
    return RankReady(peaks, difference, losses)
