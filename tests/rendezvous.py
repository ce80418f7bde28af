"""Run a lowered schedule on real threads, one for each rank, with messages that carry no names.

It shares no code with the library's validator and simulator, so the two can be held against each other. Stage s
multiplies by s + 2, micro-batch i enters as i + 1, and the loss is the last output.
"""

from __future__ import annotations

import threading
from collections import defaultdict

from lightning_dist.pipeline.schedule import Action, Schedule


class Post:
    """Messages between ranks in order of sending: a send waits for its receive, a use for its message."""

    def __init__(self, patience: float) -> None:
        self.changed = threading.Condition()
        self.patience = patience
        self.posted: dict[tuple[int, int], list[dict[str, int]]] = defaultdict(list)
        self.sent: dict[tuple[int, int], int] = defaultdict(int)

    def post(self, source: int, target: int) -> dict[str, int]:
        box: dict[str, int] = {}
        with self.changed:
            self.posted[source, target].append(box)
            self.changed.notify_all()
        return box

    def send(self, source: int, target: int, value: int) -> None:
        pair = source, target
        with self.changed:
            if not self.changed.wait_for(lambda: len(self.posted[pair]) > self.sent[pair], self.patience):
                raise TimeoutError
            self.posted[pair][self.sent[pair]]["value"] = value
            self.sent[pair] += 1
            self.changed.notify_all()

    def take(self, box: dict[str, int]) -> int:
        with self.changed:
            if not self.changed.wait_for(lambda: "value" in box, self.patience):
                raise TimeoutError
            return box["value"]


def run_on_threads(schedule: Schedule, *, patience: float = 20.0) -> dict[int, int]:
    """The weight gradient of each stage.

    Raises:
        TimeoutError: some rank waited longer than `patience` seconds.
    """
    holder = {a.stage: rank for rank, row in enumerate(schedule) for a in row if a.kind.value == "F"}
    post = Post(patience)
    gradients: dict[int, int] = defaultdict(int)
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            Worker(rank, holder, post, gradients).run(list(schedule[rank]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(schedule))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return dict(gradients)


class Worker:
    """One rank: what it has received, made and kept."""

    def __init__(self, rank: int, holder: dict[int, int], post: Post, gradients: dict[int, int]) -> None:
        self.rank, self.holder, self.post, self.gradients = rank, holder, post, gradients
        self.last = max(holder)
        self.boxes: dict[tuple[str, int, int], dict[str, int]] = {}
        self.inputs: dict[tuple[int, int], int] = {}
        self.outputs: dict[tuple[int, int], int] = {}
        self.arriving: dict[tuple[int, int], int] = {}  # gradient of a stage's output
        self.leaving: dict[tuple[int, int], int] = {}  # gradient of a stage's input

    def run(self, actions: list[Action]) -> None:
        for action in actions:
            kind, stage, i = action.kind.value, action.stage, action.micro_batch
            if i is None:
                continue
            if kind == "F":
                self.inputs[stage, i] = i + 1 if stage == 0 else self.get("F", stage, i, self.outputs, stage - 1)
                self.outputs[stage, i] = self.inputs[stage, i] * (stage + 2)
            elif kind in "BI":
                is_last = stage == self.last
                self.arriving[stage, i] = 1 if is_last else self.get("B", stage, i, self.leaving, stage + 1)
                assert (stage, i) in self.outputs
                self.leaving[stage, i] = self.arriving[stage, i] * (stage + 2)
            if kind in "BW":
                self.gradients[stage] += self.arriving[stage, i] * self.inputs[stage, i]
            step = 1 if kind.endswith("_F") else -1
            if kind.startswith("SEND"):
                made = self.outputs if kind == "SEND_F" else self.leaving
                self.post.send(self.rank, self.holder[stage + step], made[stage, i])
            elif kind.startswith("RECV"):
                self.boxes[kind[-1], stage, i] = self.post.post(self.holder[stage - step], self.rank)

    def get(self, way: str, stage: int, i: int, local: dict[tuple[int, int], int], neighbour: int) -> int:
        """What a stage takes from its neighbour: by message, or at hand if that lies on the same rank."""
        if self.holder[neighbour] == self.rank:
            return local[neighbour, i]
        return self.post.take(self.boxes[way, stage, i])
